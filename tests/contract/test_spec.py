"""What a model's contract derives from its fields, and the fields that it refuses."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fatdeploy.errors import SpecMismatch
from fatdeploy.records import json_from_record
from fatdeploy.spec import ModelSpec, StateSpec

SPEC = ModelSpec(vocab_size=9, source_vocab_size=7, max_source=4, max_target=4, pad_id=5, bos_id=8, eos_id=0)


def test_ordinary_ids_are_all_but_padding_bos_and_eos_in_order() -> None:
    spec = ModelSpec(vocab_size=9, max_source=4, max_target=4, pad_id=5, bos_id=8, eos_id=0)
    ids = spec.ordinary_ids()
    assert ids.tolist() == [1, 2, 3, 4, 6, 7]
    assert ids.dtype == np.int64


def test_sources_may_have_a_vocabulary_of_their_own() -> None:
    assert SPEC.n_source_ids == 7
    assert SPEC.ordinary_ids().tolist() == [1, 2, 3, 4, 6]


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"silent_ids": (5, 9, -1)}, "silent_ids must lie in 0…8, found 9; silent_ids must lie in 0…8, found -1"),
    ({"silent_ids": tuple(range(9))}, "silent_ids must leave a token that can be chosen"),
    ({"source_vocab_size": 0}, "source_vocab_size must be 1 or more, found 0"),
    ({"source_vocab_size": -3}, "source_vocab_size must be 1 or more, found -3"),
    ({"source_vocab_size": 5}, "pad_id must lie in 0…4, found 5"),
    ({"vocab_size": 8}, "bos_id must lie in 0…7, found 8"),
    ({"eos_id": -1}, "eos_id must lie in 0…8, found -1"),
    (
        {"state": (StateSpec("keys", "float32", ("rows", "capacity"), "cache", "source"),)},
        "state keys starts from the source, so it must be recurrent, found a cache; state keys starts from the source, "
        "so its axes must be rows and numbers, found ['rows', 'capacity']",
    ),
    (
        {"state": (StateSpec("sum", "float32", (4, "rows"), "recurrent", "source"),)},
        "state sum starts from the source, so its axes must be rows and numbers, found [4, 'rows']",
    ),
    (
        {"state": (StateSpec("keys", "float32", ("rows", 2, "capacity"), "ring"),)},
        "state keys is a ring, so its axes must be rows and numbers, found ['rows', 2, 'capacity']; state keys is a "
        "ring, so tokens_per_call must say how many tokens a call may have",
    ),
    ({"tokens_per_call": 0}, "tokens_per_call must be 1 or more, found 0"),
    ({"max_target": 0, "width": -2}, "width must be 1 or more, found -2; max_target must be 1 or more, found 0"),
]


@pytest.mark.parametrize(("changes", "reason"), WRONG)
def test_values_out_of_range_are_all_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecMismatch, match=rf"^{re.escape(reason)}$"):
        replace(SPEC, **changes)
    with pytest.raises(SpecMismatch, match=rf"^spec refused: {re.escape(reason)}$"):
        ModelSpec.from_dict({**SPEC.to_dict(), **json_from_record(changes)})
