"""Sources that take the places of finished ones: each result is what the source gives alone."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, decode, refills, task_of
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.refilling import Waiting
from fatdeploy.runtimes.engines.protocol import Floats, Rows
from tests.support.engines.tables import ALIGNED, RefilledEngine, TableEngine, TableState, hashed_logits

Prefixes = list[list[int] | None]


def drawn_sources(count: int, seed: int = 1) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    rows = [draw.integers(3, 24, draw.integers(1, 9)).tolist() for _ in range(count)]
    return sorted(rows, key=len, reverse=True)


def text_of(tokens: Any) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


def refilled(
    engine: RefilledEngine,
    sources: list[list[int]],
    options: DecodeOptions,
    *,
    places: int = 5,
    share: float = 0.25,
    prefixes: Prefixes | None = None,
    deadline: float | None = None,
    ahead: int = 0,
) -> list[Hypothesis]:
    """Return the results of sources, in their order; those that never began are missing.

    ``ahead`` more sources than asked for are handed out to be encoded.
    """
    task = task_of(engine.spec, sources, options, prefixes=prefixes, text_of=text_of)
    assert refills(engine, task)
    queue = deque(range(len(sources)))

    def take(count: int) -> list[int]:
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    waiting = Waiting(lambda count: take(count + ahead), share)
    with Decoding.of_task(engine, task, take(places), deadline=deadline, waiting=waiting) as decoding:
        results = decoding.run()
        by_source = dict(zip(decoding.arrivals, results, strict=True))
    assert engine.n_states == 0
    return [by_source[index] for index in sorted(by_source)]


def alone(sources: list[list[int]], options: DecodeOptions, prefixes: Prefixes | None = None) -> list[Hypothesis]:
    own = [None] * len(sources) if prefixes is None else prefixes
    results = []
    for source, prefix in zip(sources, own, strict=True):
        engine = TableEngine(spec=ALIGNED)
        with Decoding(engine, [source], options, prefixes=[prefix], text_of=text_of) as decoding:
            results += decoding.run()
    return results


CHOICES = {
    "greedy": DecodeOptions(),
    "a limit": DecodeOptions(max_new_tokens=4),
    "scores": DecodeOptions(scores=True),
    "samples": DecodeOptions(sample=True, num_return_sequences=3, seed=3, top_k=9, scores=True),
    "a prefix": DecodeOptions(prefix=(4, 9), max_new_tokens=9),
    "a shortlist": DecodeOptions(shortlist=[3, 5, 8, 9, 11, 20]),
    "stops": DecodeOptions(stop=[[5], [7, 8], [3, 4, 5]], min_new_tokens=2),
    "a text that stops": DecodeOptions(stop=["k", "gh"]),
    "processors of places": DecodeOptions(
        min_new_tokens=3, max_new_tokens=8, forced_bos_id=7, forced_eos_id=2, begin_suppress_tokens=[4]
    ),
    "processors of tokens": DecodeOptions(
        repetition_penalty=1.7, no_repeat_ngram_size=2, bad_words=[[5], [6, 7]], encoder_repetition_penalty=1.3
    ),
    "beams": DecodeOptions(num_beams=4, num_return_sequences=4),
    "two ends and a long search": DecodeOptions(num_beams=2, eos_ids=[2, 5], early_stopping="never"),
    "beams at a limit": DecodeOptions(num_beams=3, max_new_tokens=4, early_stopping=True),
    "beams after a prefix": DecodeOptions(num_beams=3, prefix=(4, 9), max_new_tokens=9, num_return_sequences=2),
    "beams of a shortlist": DecodeOptions(num_beams=2, shortlist=[3, 5, 8, 9, 11, 20], suppress_tokens=[5]),
    "beams with stops": DecodeOptions(num_beams=3, stop=[[5], [7, 8], "k"], min_new_tokens=2),
    "beams with processors": DecodeOptions(
        num_beams=3, num_return_sequences=3, repetition_penalty=1.7, no_repeat_ngram_size=2, forced_eos_id=2
    ),
    "normalized beams": DecodeOptions(
        num_beams=4, renormalize=True, bad_words=[[5], [6, 7]], forced_eos_id=2, max_new_tokens=12
    ),
    "drawn beams": DecodeOptions(num_beams=3, sample=True, seed=5, top_k=9, num_return_sequences=3),
    "diverse beams": DecodeOptions(num_beams=4, num_beam_groups=2, diversity_penalty=1.5, num_return_sequences=4),
}


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_source_that_joins_gives_what_it_gives_alone(options: DecodeOptions, share: float) -> None:
    sources, engine = drawn_sources(40), RefilledEngine(spec=ALIGNED)
    results = refilled(engine, sources, options, share=share)
    expected = alone(sources, options)
    assert results == expected
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(result.alignments), np.asarray(other.alignments))
    assert engine.joined == 35
    assert len({result.tokens for result in results}) > 30


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("ahead", [1, 6, 40])
def test_a_source_that_was_encoded_early_gives_the_same(options: DecodeOptions, ahead: int) -> None:
    sources, engine = drawn_sources(30), RefilledEngine(spec=ALIGNED)
    assert refilled(engine, sources, options, share=0.0, ahead=ahead) == alone(sources, options)
    assert engine.joined == 25


class Encodes(RefilledEngine):
    """Counts the sources of each encode."""

    def __init__(self) -> None:
        super().__init__(spec=ALIGNED)
        self.encoded: list[int] = []

    def encode(self, source: Any, *arguments: Any) -> TableState:
        self.encoded.append(len(source))
        return super().encode(source, *arguments)


def test_sources_that_are_taken_together_are_encoded_together() -> None:
    engine = Encodes()
    refilled(engine, drawn_sources(40), DecodeOptions(), share=0.0, ahead=9)
    assert sum(engine.encoded) == 40
    assert engine.encoded[0] == 5
    assert min(engine.encoded[1:-1]) >= 10


def test_sources_that_never_join_are_released() -> None:
    engine = RefilledEngine(spec=ALIGNED)
    task = task_of(engine.spec, drawn_sources(30), DecodeOptions())
    queue = deque(range(3, 30))
    waiting = Waiting(lambda count: [queue.popleft() for _ in range(count + 20)], 0.0)
    with Decoding.of_task(engine, task, range(3), waiting=waiting) as decoding:
        while not engine.joined:
            decoding.advance()
        assert engine.n_states == 2
        begun = len(decoding.arrivals)
    assert engine.n_states == 0
    assert begun == 3 + engine.joined


@pytest.mark.parametrize("places", [1, 2, 7, 39, 40, 60])
def test_any_number_of_places_gives_the_same(places: int) -> None:
    sources, options, engine = drawn_sources(40, seed=2), DecodeOptions(scores=True), RefilledEngine(spec=ALIGNED)
    assert refilled(engine, sources, options, places=places) == alone(sources, options)
    assert engine.joined == max(0, 40 - places)


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(scores=True),
        DecodeOptions(sample=True, num_return_sequences=2, seed=1),
        DecodeOptions(stop=["k", [5]], no_repeat_ngram_size=2, forced_eos_id=2, max_new_tokens=11),
        DecodeOptions(num_beams=3, num_return_sequences=3),
        DecodeOptions(num_beams=2, stop=["k", [5]], no_repeat_ngram_size=2, forced_eos_id=2, max_new_tokens=11),
        DecodeOptions(num_beams=4, num_beam_groups=2, diversity_penalty=1.5, bad_words=[[5]]),
    ],
    ids=["greedy", "samples", "stops and processors", "beams", "beams, stops and processors", "diverse beams"],
)
def test_each_newcomer_reads_a_prefix_of_its_own(options: DecodeOptions) -> None:
    draw = np.random.default_rng(7)
    sources = drawn_sources(30, seed=4)
    # EOS in a prefix ends nothing.
    prefixes: Prefixes = [
        None if index % 4 == 0 else draw.choice([2, 3, 5, 8, 11], draw.integers(0, 7)).tolist() for index in range(30)
    ]
    results = refilled(RefilledEngine(spec=ALIGNED), sources, options, prefixes=prefixes)
    assert results == alone(sources, options, prefixes)


def test_targets_that_read_from_right_to_left_come_in_reading_order() -> None:
    spec = replace(ALIGNED, target_order="right_to_left", alignment=None)
    sources = drawn_sources(12)
    results = refilled(RefilledEngine(spec=spec), sources, DecodeOptions())
    assert results == [decode(TableEngine(spec=spec), [source])[0] for source in sources]


def never_ends(source: tuple[int, ...], tokens: tuple[int, ...]) -> Floats:
    """Return logits whose EOS wins only for short sources."""
    logits = hashed_logits(source, tokens)
    logits[2] = 30 if len(source) < 4 and len(tokens) >= 2 else -99
    return logits


@pytest.mark.parametrize("beams", [1, 3])
def test_finished_rows_never_grow_beyond_the_capacity_while_they_wait(beams: int) -> None:
    # One row runs up to the limit again and again while all others are finished after two steps.
    sources = [[5] * 8, *([[3 + index % 20] for index in range(12)])]
    engine = RefilledEngine(never_ends)
    options = DecodeOptions(num_beams=beams)
    results = refilled(engine, sources, options, places=4, share=1.0)
    assert results == [decode(TableEngine(never_ends), [source], options)[0] for source in sources]
    assert [result.finish for result in results] == ["length", *["eos"] * 12]
    assert len(results[0].tokens) == 32


def test_rows_are_full_until_no_source_waits_and_leave_then() -> None:
    engine = RefilledEngine()
    refilled(engine, drawn_sources(60), DecodeOptions(), places=8, share=0.0)
    rows = [shape[0] for shape, _ in engine.calls]
    assert rows == sorted(rows, reverse=True)
    assert (rows[0], rows[-1]) == (8, 1)
    steps = sum(len(result.tokens) + 1 for result in alone(drawn_sources(60), DecodeOptions()))
    # Eight rows that were always busy would need this many calls.
    assert len(engine.calls) <= steps / 8 + 20


def test_a_deadline_cancels_what_runs_and_leaves_out_what_has_not_begun() -> None:
    sources = drawn_sources(20)
    results = refilled(RefilledEngine(spec=ALIGNED), sources, DecodeOptions(), deadline=0.0)
    assert [(result.tokens, result.finish) for result in results] == [((), "cancelled")] * 5


def test_a_deadline_in_the_middle_keeps_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr("fatdeploy.runtimes.decoding.loop.monotonic", lambda: next(clock))
    sources = drawn_sources(20)
    results = refilled(RefilledEngine(spec=ALIGNED), sources, DecodeOptions(), share=0.0, deadline=9.0)
    expected = alone(sources, DecodeOptions())
    cancelled = 0
    assert 5 < len(results) < 20
    for result, whole in zip(results, expected, strict=False):
        if result.finish == "cancelled":
            cancelled += 1
            assert result.tokens == whole.tokens[: len(result.tokens)]
        else:
            assert result == whole
    assert cancelled == 5
    assert any(result.tokens for result in results if result.finish == "cancelled")


class Failing(RefilledEngine):
    """Raises in the middle of a verb."""

    fails = "refill"

    def encode(self, *arguments: Any) -> TableState:
        return self._or_raise("encode", super().encode, *arguments)

    def refill(self, *arguments: Any) -> None:
        self._or_raise("refill", super().refill, *arguments)

    def rest(self, state: TableState, rows: Rows) -> None:
        self._or_raise("rest", super().rest, state, rows)

    def _or_raise(self, verb: str, call: Callable[..., Any], *arguments: Any) -> Any:
        if self.fails == verb and len(self.calls) > 3:
            raise RuntimeError(f"{verb} failed")
        return call(*arguments)


@pytest.mark.parametrize("verb", ["encode", "refill", "rest"])
def test_states_are_released_if_the_engine_fails(verb: str) -> None:
    engine = Failing()
    engine.fails = verb
    with pytest.raises(RuntimeError, match=f"{verb} failed"):
        refilled(engine, drawn_sources(30), DecodeOptions(), share=0.0, ahead=2)
    assert engine.n_states == 0


def test_only_some_engines_searches_and_processors_can_refill() -> None:
    engine = RefilledEngine()

    def can(options: DecodeOptions, engine: Any = engine) -> bool:
        return refills(engine, task_of(engine.spec, [[5]], options))

    assert can(DecodeOptions())
    assert can(DecodeOptions(no_repeat_ngram_size=2, sample=True))
    assert not can(DecodeOptions(), TableEngine())
    assert can(DecodeOptions(num_beams=2))
    assert not can(DecodeOptions(processors=[lambda tokens, scores: scores]))
    engine.refills = False
    assert not can(DecodeOptions())


def test_an_engine_that_cannot_refill_is_refused() -> None:
    engine = TableEngine()
    with pytest.raises(TypeError, match="TableEngine cannot replace finished sources"):
        Decoding.of_task(engine, task_of(engine.spec, [[5]], DecodeOptions()), [0], waiting=Waiting(lambda _: []))
    assert engine.n_states == 0
