"""What a model's contract derives from its fields."""

import numpy as np

from fatdeploy.spec import ModelSpec


def test_ordinary_ids_are_all_but_padding_bos_and_eos_in_order() -> None:
    spec = ModelSpec(vocab_size=9, max_source=4, max_target=4, pad_id=5, bos_id=8, eos_id=0)
    ids = spec.ordinary_ids()
    assert ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert ids.dtype == np.int64
