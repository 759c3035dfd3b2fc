"""The decode loop: on scripted engines, where every token is known, and on the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.checkpoint import stored_tensors
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import padded
from fatdeploy.runtimes.engines.protocol import Capacity
from tests.support.choices import AUTOREGRESSIVE, drawn_batch, tiny
from tests.support.engines.scripted import SPEC, ScriptedEngine

EOS = 2


def test_a_row_ends_at_eos_and_the_token_itself_is_not_part_of_it() -> None:
    assert decode(ScriptedEngine({5: [7, 8, EOS]}), [[5]]) == [Hypothesis((7, 8), "eos")]


def test_a_finished_row_stays_finished_while_others_go_on() -> None:
    engine = ScriptedEngine({5: [EOS, 9, 9, 9], 6: [7, 8, 7, EOS], 3: [8, 9, EOS]})
    results = decode(engine, [[5], [6], [3]])
    assert results == [Hypothesis((), "eos"), Hypothesis((7, 8, 7), "eos"), Hypothesis((8, 9), "eos")]
    # After its EOS a row reads padding, whatever it returns; it leaves when half of the batch is finished.
    assert engine.fed == [[[1], [1], [1]], [[0], [7], [8]], [[0], [8], [9]], [[7]]]


def test_decoding_stops_with_the_last_row() -> None:
    engine = ScriptedEngine({5: [EOS], 6: [EOS]})
    decode(engine, [[5], [6]])
    assert len(engine.fed) == 1


def test_a_row_without_eos_ends_at_the_limit() -> None:
    engine = ScriptedEngine({5: [7, 8, 9, 7], 6: [7, 8, EOS]})
    results = decode(engine, [[5], [6]], DecodeOptions(max_new_tokens=3))
    assert results == [Hypothesis((7, 8, 9), "length"), Hypothesis((7, 8), "eos")]
    assert engine.capacity == Capacity(rows_per_source=1, target_positions=3)


def test_the_default_limit_is_max_target() -> None:
    assert decode(ScriptedEngine({5: [7] * 6}), [[5]]) == [Hypothesis((7,) * 6, "length")]


def test_a_right_to_left_model_gives_its_tokens_in_reading_order() -> None:
    engine = ScriptedEngine({5: [7, 8, 9, EOS]}, replace(SPEC, target_order="right_to_left"))
    assert decode(engine, [[5]]) == [Hypothesis((9, 8, 7), "eos")]


def test_sources_are_padded_on_the_right() -> None:
    ids, mask = padded([[5], np.array([6, 7, 8], np.int32)], SPEC)
    assert ids.tolist() == [[5, 0, 0], [6, 7, 8]]
    assert mask.tolist() == [[True, False, False], [True, True, True]]
    assert ids.dtype == np.int64


@pytest.mark.parametrize(
    ("sources", "reason"),
    [
        ([], "no source given"),
        ([[5], []], "source 1: is empty"),
        ([[5, 10]], "source 0: ids must lie in 0…9, found 10"),
        ([[-1]], "source 0: ids must lie in 0…9, found -1"),
        ([[5] * 5], "source 0: has 5 tokens, more than max_source = 4"),
        ([[0.5]], "source 0: ids must be integers, found float64"),
        ([[True]], "source 0: ids must be integers, found bool"),
        ([["a"]], "source 0: ids must be integers, found <U1"),
        ([[5], [[5], [6, 7]]], "source 1: ids must be integers, found object"),
        ([[[5]]], r"source 0: expected one axis of ids, found shape \(1, 1\)"),
        ([[], [11]], "source 0: is empty; source 1: ids must lie"),
    ],
    ids=str,
)
def test_a_source_that_cannot_be_read_is_refused_before_anything_runs(sources: list, reason: str) -> None:
    engine = ScriptedEngine({})
    with pytest.raises(SpecMismatch, match=reason):
        decode(engine, sources)


@pytest.mark.parametrize("value", [0, -1, 2.5, True])
def test_a_limit_that_is_not_a_count_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="max_new_tokens must be a whole number from 1 up"):
        DecodeOptions(max_new_tokens=value)  # type: ignore[arg-type]


def test_a_limit_beyond_max_target_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_new_tokens must lie in 1…6 \(the model's max_target\), found 7"):
        decode(ScriptedEngine({5: [7]}), [[5]], DecodeOptions(max_new_tokens=7))


def with_eos(model: ReferenceModel, eos_id: int) -> ReferenceModel:
    """Return the same weights with another token as EOS: the numbers do not depend on it."""
    changed = ReferenceModel(replace(model.config, eos_id=eos_id)).eval()
    with torch.no_grad():
        for name, tensor in stored_tensors(changed).items():
            tensor.copy_(stored_tensors(model)[name])
    return changed


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
@torch.inference_mode()
def test_greedy_tokens_are_the_arg_max_of_the_whole_sequence(preset: str) -> None:
    model = tiny({}, base=preset)
    source, mask, _ = drawn_batch(model.config, [6, 2, 9], 1)
    sources = [row[real].tolist() for row, real in zip(source, mask, strict=True)]
    for result, row in zip(decode(EagerEngine(model), sources, DecodeOptions(max_new_tokens=30)), sources, strict=True):
        target = torch.tensor([[model.config.bos_id, *result.tokens]])
        best = model(torch.tensor([row]), torch.ones(1, len(row), dtype=torch.bool), target).argmax(-1)[0].tolist()
        ending = [model.config.eos_id] if result.finish == "eos" else best[-1:]
        assert best == [*result.tokens, *ending]


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
def test_a_row_that_meets_eos_first_changes_nothing_for_the_others(preset: str) -> None:
    model = tiny({}, base=preset)
    source, mask, _ = drawn_batch(model.config, [6, 2, 9, 4, 1, 7, 3, 12], 1, seed=3)
    sources = [row[real].tolist() for row, real in zip(source, mask, strict=True)]
    options = DecodeOptions(max_new_tokens=20)
    runs = (decode(EagerEngine(with_eos(model, silent)), sources, options) for silent in range(63, 2, -1))
    endless = [
        result.tokens for result in next(run for run in runs if all(result.finish == "length" for result in run))
    ]
    beginnings = [tokens[0] for tokens in endless]
    rarest = min(beginnings, key=beginnings.count)
    ended = decode(EagerEngine(with_eos(model, rarest)), sources, options)
    for result, tokens in zip(ended, endless, strict=True):
        cut = tokens.index(rarest) if rarest in tokens else len(tokens)
        assert result == Hypothesis(tokens[:cut], "eos" if rarest in tokens else "length")
    assert 0 < ended.count(Hypothesis((), "eos")) < len(ended)


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
def test_a_batch_gives_the_same_as_its_rows_alone_every_time(preset: str) -> None:
    engine = EagerEngine(tiny({}, base=preset))
    source, mask, _ = drawn_batch(engine.model.config, [6, 1, 30, 4], 1)
    sources = [row[real].tolist() for row, real in zip(source, mask, strict=True)]
    options = DecodeOptions(max_new_tokens=40)
    together = decode(engine, sources, options)
    assert together == [decode(engine, [row], options)[0] for row in sources]
    assert together == decode(engine, sources, options)


def test_both_target_orders_generate_the_same_and_read_it_differently() -> None:
    forward, backward = (EagerEngine(tiny({"target_order": order})) for order in ("left_to_right", "right_to_left"))
    [result], [other] = decode(forward, [[5, 6, 7]]), decode(backward, [[5, 6, 7]])
    assert result.tokens == other.tokens[::-1]
    assert len(set(result.tokens)) > 1
