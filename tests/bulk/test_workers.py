"""Many sources, shared by workers: results, order, progress, deadlines and errors are those of one worker."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

import fatdeploy
from fatdeploy import DecodeOptions, Hypothesis, Model
from fatdeploy.runtimes.bulk.crews import Crew, Crews
from fatdeploy.runtimes.engines.protocol import Engine, Refilling, StepOut, Want
from fatdeploy.spec import ModelSpec, Tokens
from tests.support.bundles import bundle_of
from tests.support.engines.gated import PATIENCE
from tests.support.engines.tables import RefilledEngine, TableEngine, TableState, hashed_logits
from tests.support.quantized import formed_of, quantized_of

TINY = "transformer-tiny"
OPTIONS = DecodeOptions(max_new_tokens=12)
CHOICES = {
    "greedy": replace(OPTIONS, scores=True),
    "samples": replace(OPTIONS, sample=True, num_return_sequences=2, top_k=9, seed=2),
    "beams": replace(OPTIONS, num_beams=3, num_return_sequences=2),
    "processors": replace(OPTIONS, no_repeat_ngram_size=2, forced_eos_id=2, bad_words=[[5], [6, 7]]),
    "stops": replace(OPTIONS, stop=[[5], [7]]),
    "a prefix": replace(OPTIONS, prefix=(9, 8, 7)),
}


def spec() -> ModelSpec:
    return replace(bundle_of(TINY).spec, alignment=None)


def tabled(kind: type[TableEngine] = RefilledEngine) -> Any:
    return kind(partial(hashed_logits, vocab_size=spec().vocab_size), spec())


def crewed(engine: Engine[Any], workers: int = 3, rows: int = 8) -> Model:
    """Return a model that shares 64 rows and more among workers."""
    crews = Crews(engine, workers, lambda: engine, "a test")
    crews._crew = Crew(engine, workers, rows)
    return Model(bundle_of(TINY), engine, crews)


def drawn_sources(count: int, seed: int = 3) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, 64, draw.integers(1, 20)).tolist() for _ in range(count)]


@pytest.mark.parametrize("options", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize("kind", [RefilledEngine, TableEngine])
def test_results_are_those_of_each_source_alone_in_their_order(kind: type[TableEngine], options: DecodeOptions) -> None:
    sources, engine = drawn_sources(90), tabled(kind)
    alone = Model(bundle_of(TINY), tabled(TableEngine))
    expected = [alone.generate([source], options)[0] for source in sources]
    counts: list[int] = []
    assert crewed(engine).generate(sources, options, progress=counts.append) == expected
    assert sum(counts) == 90
    assert min(counts) > 0
    assert engine.n_states == 0
    assert len({result.tokens for result in expected}) > 60


def test_finished_sources_are_replaced_where_that_is_possible() -> None:
    sources, engine = drawn_sources(90), tabled()
    crewed(engine).generate(sources, OPTIONS)
    assert engine.joined == 90 - 3 * 8
    # A source of two beams needs two rows.
    engine = tabled()
    crewed(engine, rows=40).generate(sources, replace(OPTIONS, num_beams=2))
    assert engine.joined == 90 - 3 * 20


def test_prefixes_of_their_own_stay_with_their_sources() -> None:
    draw, sources = np.random.default_rng(5), drawn_sources(80)
    prefixes = [None if index % 3 else draw.integers(3, 64, draw.integers(0, 5)).tolist() for index in range(80)]
    alone = Model(bundle_of(TINY), tabled(TableEngine))
    expected = [
        alone.generate([source], OPTIONS, prefixes=[prefix])[0]
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    assert crewed(tabled()).generate(sources, OPTIONS, prefixes=prefixes) == expected


def test_a_limit_of_positions_is_respected() -> None:
    engine = tabled()
    crewed(engine).generate(drawn_sources(90), OPTIONS, batch_tokens=100)
    # A source of 19 tokens and 12 positions of its target, as often as they fit.
    assert max(shape[0] for shape, _ in engine.calls) == 100 // (19 + 12 - 1)
    engine = tabled()
    crewed(engine).generate(drawn_sources(90), OPTIONS, batch_tokens=1)
    assert {shape[0] for shape, _ in engine.calls} == {1}


def test_few_sources_are_decoded_in_one_batch_by_the_calling_thread() -> None:
    engine, threads = tabled(), set()

    def processor(tokens: Tokens, scores: np.ndarray) -> np.ndarray:
        threads.add((threading.current_thread(), len(tokens)))
        return scores

    crewed(engine).generate(drawn_sources(63), OPTIONS)
    assert engine.calls[0] == ((63, 1), Want.LOGITS)
    assert engine.joined == 0
    # So is everything that calls a function of the caller.
    crewed(engine).generate(drawn_sources(90), replace(OPTIONS, processors=[processor]))
    assert {thread for thread, _ in threads} == {threading.current_thread()}
    assert max(rows for _, rows in threads) == 90


class Watched(RefilledEngine):
    """Waits in its first step for a number of other threads; counts the threads that step."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.threads: set[int] = set()
        self.barrier = threading.Barrier(3)
        self.fails_in: int | None = None

    def step(self, tokens: Tokens, state: TableState, want: Want) -> StepOut:
        if threading.get_ident() not in self.threads:
            self.threads.add(threading.get_ident())
            self.barrier.wait(PATIENCE)
        if self.fails_in is not None and len(self.calls) >= self.fails_in:
            raise RuntimeError("the step failed")
        return super().step(tokens, state, want)


def test_workers_step_at_once_and_the_caller_is_one_of_them() -> None:
    engine = tabled(Watched)
    crewed(engine).generate(drawn_sources(90), OPTIONS)
    assert len(engine.threads) == 3
    assert threading.get_ident() in engine.threads


@pytest.mark.parametrize("after", [0, 5, 30])
def test_an_error_is_raised_once_stops_all_workers_and_releases_their_states(after: int) -> None:
    engine = tabled(Watched)
    engine.fails_in, n_threads = after, threading.active_count()
    with pytest.raises(RuntimeError, match="the step failed"):
        crewed(engine).generate(drawn_sources(90), OPTIONS)
    assert engine.n_states == 0
    assert threading.active_count() == n_threads
    assert len(engine.calls) <= after + 3


def test_an_error_of_another_worker_is_raised_too() -> None:
    engine, caller = tabled(Watched), threading.get_ident()

    def fails_elsewhere(source: tuple[int, ...], tokens: tuple[int, ...]) -> Any:
        if threading.get_ident() != caller:
            raise RuntimeError("another worker failed")
        return hashed_logits(source, tokens, spec().vocab_size)

    engine.logits_of = fails_elsewhere
    with pytest.raises(RuntimeError, match="another worker failed"):
        crewed(engine).generate(drawn_sources(2000), OPTIONS)
    assert engine.n_states == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_or_an_error_of_progress_ends_the_call(error: type[BaseException]) -> None:
    engine, n_threads = tabled(), threading.active_count()

    def interrupted(count: int) -> None:
        raise error

    with pytest.raises(error):
        crewed(engine).generate(drawn_sources(90), OPTIONS, progress=interrupted)
    assert engine.n_states == 0
    assert threading.active_count() == n_threads


def test_progress_is_never_called_by_two_threads_at_once() -> None:
    busy, total = threading.Lock(), 0

    def progress(count: int) -> None:
        nonlocal total
        assert busy.acquire(blocking=False)
        total += count
        busy.release()

    crewed(tabled(), workers=4, rows=4).generate(drawn_sources(400), OPTIONS, progress=progress)
    assert total == 400


def test_what_has_not_begun_by_the_deadline_is_cancelled() -> None:
    expected = crewed(tabled()).generate(drawn_sources(90), OPTIONS)
    assert {result.finish for result in expected} <= {"eos", "length"}
    results = crewed(tabled()).generate(drawn_sources(90), replace(OPTIONS, timeout_s=1e-9))
    assert results == [Hypothesis((), "cancelled")] * 90


def test_several_threads_of_an_application_share_the_workers_engine() -> None:
    model, batches = crewed(tabled()), [drawn_sources(80, seed) for seed in range(4)]
    expected = [model.generate(batch, OPTIONS) for batch in batches]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda batch: model.generate(batch, OPTIONS), batches)) == expected


@pytest.mark.parametrize("preset", [TINY, "fat-tiny", "transformer-nat-tiny"])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_loaded_bundle_gives_the_same_with_and_without_workers(preset: str, threads: int) -> None:
    draw = np.random.default_rng(8)
    sources = [draw.integers(3, 64, draw.integers(1, 40)).tolist() for _ in range(300)]
    with fatdeploy.load(bundle_of(preset).path, threads=threads, spinning=False) as model:
        together = model.generate(sources, OPTIONS)
        assert model._crews is not None
        assert model._crews._crew is not None
        parts = [
            result for start in range(0, 300, 50) for result in model.generate(sources[start : start + 50], OPTIONS)
        ]
    assert together == parts


REFILLED = [
    *((TINY, precision) for precision in ("fp32", "int8", "blocks8")),
    *((preset, precision) for preset in ("at-tiny", "rnn-tiny") for precision in ("fp32", "int8")),
]


@pytest.mark.parametrize("beams", [1, 4])
@pytest.mark.parametrize(("preset", "precision"), REFILLED)
def test_refilled_rows_of_a_bundle_give_what_they_give_alone(preset: str, precision: str, beams: int) -> None:
    draw = np.random.default_rng(9)
    sources = [draw.integers(3, 64, draw.integers(1, 40)).tolist() for _ in range(70)]
    bundles = {
        "fp32": bundle_of,
        "int8": partial(quantized_of, precision="int8"),
        "blocks8": partial(formed_of, form="blocks8"),
    }
    bundle = bundles[precision](preset)
    options = DecodeOptions(num_beams=beams, max_new_tokens=20, scores=True, no_repeat_ngram_size=3, forced_eos_id=2)
    with fatdeploy.load(bundle.path, threads=1, spinning=False) as model:
        assert isinstance(model._engine, Refilling)
        assert model._engine.refills
        model._crews._crew = Crew(model._engine, 2, 8)  # type: ignore[union-attr]
        together = model.generate(sources, options)
        alone = [model.generate([source], options)[0] for source in sources]
    if precision != "fp32":
        assert together == alone  # bit for bit
    for result, other in zip(together, alone, strict=True):
        assert (result.tokens, result.finish) == (other.tokens, other.finish)
        assert result.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    assert len({result.tokens for result in together}) > 50


def test_a_batch_has_enough_sources_however_many_beams_each_has() -> None:
    engine, wide = tabled(), replace(OPTIONS, num_beams=4)
    rows: list[int] = []
    encode = engine.encode
    engine.encode = lambda source, mask, capacity: rows.append(len(source)) or encode(source, mask, capacity)
    crewed(engine, workers=1, rows=8).generate(drawn_sources(40), wide)
    # Eight rows would be two sources, and one would wait for the other.
    assert rows[0] == 16
