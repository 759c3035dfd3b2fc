"""Dataclasses to JSON and back, above all the spec that every bundle carries."""

import json
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fatdeploy.errors import SpecMismatch
from fatdeploy.records import RecordReader, json_from_record, shown
from fatdeploy.spec import ModelSpec, TensorSpec, cache_specs, recurrent_specs

SPEC = ModelSpec(
    vocab_size=97,
    width=32,
    max_source=64,
    max_target=48,
    pad_id=0,
    bos_id=1,
    eos_id=2,
    target_order="right_to_left",
    source=TensorSpec("source", "float32", ("batch", "source", 80)),
    state=(*cache_specs(0, 4, 8), *recurrent_specs(1, 4, 16, 8)),
)


@dataclass(frozen=True)
class Part:
    kind: Literal["a", 1]
    sizes: tuple[int | Literal["rows"], ...]


@dataclass(frozen=True)
class Whole:
    pair: tuple[str, bool]
    number: float
    part: Part | None
    parts: dict[str, Part]
    rest: object
    limit: int = 3

    def __post_init__(self) -> None:
        if self.number < 0:
            raise ValueError(f"number: must be at least 0, found {self.number}")


WHOLE = Whole(("x", True), 0.5, Part(1, (2, "rows")), {"p": Part("a", ())}, [None, {"deep": [1]}], 4)


def edited(**changes: Any) -> dict[str, Any]:
    values = {**json_from_record(WHOLE), **changes}
    return {name: value for name, value in values.items() if value is not MISSING}


def reasons_against(values: object, **permissions: bool) -> list[str]:
    reader = RecordReader(**permissions)
    assert (reader.read(Whole, values) is None) == bool(reader.reasons)
    return reader.reasons


def test_a_spec_comes_back_equal_and_its_dict_is_plain_json() -> None:
    values = SPEC.to_dict()
    assert json.loads(json.dumps(values)) == values
    assert ModelSpec.from_dict(values) == SPEC
    assert set(values) == {entry.name for entry in fields(ModelSpec)}
    assert values["state"][0]["shape"] == ["rows", 4, "capacity", 8]


@pytest.mark.parametrize("name", [entry.name for entry in fields(ModelSpec)])
def test_every_field_of_a_spec_is_needed_and_of_its_type(name: str) -> None:
    values = SPEC.to_dict()
    with pytest.raises(SpecMismatch, match=f"^spec refused: {name}: missing$"):
        ModelSpec.from_dict({key: value for key, value in values.items() if key != name})
    with pytest.raises(SpecMismatch, match=f"^spec refused: {name}: expected .*, found b''$"):
        ModelSpec.from_dict({**values, name: b""})


def test_a_spec_is_refused_with_all_reasons_and_their_places() -> None:
    values = SPEC.to_dict()
    del values["width"]
    values |= {"vocab_size": "97", "surplus": 1, "decoding": "backwards"}
    values["state"][1]["shape"][0] = "columns"
    del values["state"][2]["kind"]
    values["source"]["colour"] = "red"
    with pytest.raises(SpecMismatch) as caught:
        ModelSpec.from_dict(values)
    assert str(caught.value).startswith("spec refused: ")
    for reason in (
        "width: missing",
        "vocab_size: expected int, found '97'",
        "surplus: unknown",
        "decoding: expected one of ['autoregressive', 'parallel'], found 'backwards'",
        "state.1.shape.0: expected int or one of ['batch', 'rows', 'source', 'step', 'capacity'], found 'columns'",
        "state.2.kind: missing",
        "source.colour: unknown",
    ):
        assert reason in str(caught.value).removeprefix("spec refused: ").split("; ")


@pytest.mark.parametrize("values", [None, [], "spec", 3])
def test_a_value_that_is_not_an_object_is_not_a_spec(values: object) -> None:
    with pytest.raises(SpecMismatch, match="spec refused: expected an object, found"):
        ModelSpec.from_dict(values)


def test_nested_records_unions_pairs_and_free_values_come_back() -> None:
    values = json_from_record(WHOLE)
    assert RecordReader().read(Whole, json.loads(json.dumps(values))) == WHOLE
    assert RecordReader().read(Whole, edited(part=None)) == Whole(("x", True), 0.5, None, WHOLE.parts, WHOLE.rest, 4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pair": ["x"]}, "pair: expected a list of 2, found ['x']"),
        ({"pair": "xy"}, "pair: expected a list, found 'xy'"),
        ({"pair": ["x", 1]}, "pair.1: expected bool, found 1"),
        ({"number": "1"}, "number: expected float, found '1'"),
        ({"number": True}, "number: expected float, found True"),
        ({"number": -1}, "number: must be at least 0, found -1"),
        ({"limit": 3.0}, "limit: expected int, found 3.0"),
        ({"limit": True}, "limit: expected int, found True"),
        ({"limit": MISSING}, "limit: missing"),
        ({"part": 7}, "part: expected an object, found 7"),
        ({"part": {"kind": True, "sizes": []}}, "part.kind: expected one of ['a', 1], found True"),
        ({"part": {"kind": "a", "sizes": [None]}}, "part.sizes.0: expected int or one of ['rows'], found None"),
        ({"parts": []}, "parts: expected an object, found []"),
        ({"parts": {"\ud800\n": {"kind": "a"}}}, r"parts.'\ud800\n'.sizes: missing"),
        ({"parts": {"": None}}, "parts.'': expected an object, found None"),
        ({"rest": MISSING}, "rest: missing"),
        ({"more": 1}, "more: unknown"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_place(changes: dict[str, Any], reason: str) -> None:
    assert reasons_against(edited(**changes)) == [reason]


def test_unknown_fields_are_allowed_only_at_the_top_and_missing_ones_only_with_a_default() -> None:
    assert reasons_against(edited(more=1), allow_unknown=True) == []
    assert reasons_against(edited(part={"kind": "a", "sizes": [], "more": 1}), allow_unknown=True) == [
        "part.more: unknown"
    ]
    assert reasons_against(edited(limit=MISSING), allow_missing=True) == []
    assert reasons_against(edited(rest=MISSING), allow_missing=True) == ["rest: missing"]


def test_a_field_without_a_json_form_is_an_internal_error() -> None:
    @dataclass(frozen=True)
    class Odd:
        kind: np.dtype[np.float32]

    with pytest.raises(TypeError, match="has no JSON form"):
        RecordReader().read(Odd, {"kind": "float32"})


@given(st.text())
def test_whatever_is_shown_can_be_printed(text: str) -> None:
    assert shown(text).isprintable()
    assert 0 < len(shown(text)) <= 80
