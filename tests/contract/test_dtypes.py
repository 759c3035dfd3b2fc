"""Element types: sizes match numpy's, and numpy stores the types that it has no name for."""

import ml_dtypes
import numpy as np
import pytest

from fatdeploy.dtypes import ITEM_BYTES, stored_dtype


@pytest.mark.parametrize("name", ITEM_BYTES)
def test_element_sizes_match_numpy(name: str) -> None:
    assert np.dtype(stored_dtype(name)).itemsize == ITEM_BYTES[name]


def test_the_bits_of_a_bfloat16_are_the_first_half_of_a_float32() -> None:
    values = np.array([1.0, -2.5, 3e38], np.float32).astype(ml_dtypes.bfloat16)
    bits = values.view(stored_dtype("bfloat16"))
    assert ((bits.astype(np.uint32) << 16).view(np.float32) == values.astype(np.float32)).all()
