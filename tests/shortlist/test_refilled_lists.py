"""Lists by source where sources join a running decode: each result is what the source gives alone."""

from collections import deque
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from fatdeploy.bundle import Bundle
from fatdeploy.runtimes.bulk.crews import Crew, Crews
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, decode, refills, task_of
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.refilling import Waiting
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.model import Model
from tests.support.decoding.source_lists import TABLE, listed
from tests.support.quantized import formed_of, quantized_of

TINY = "transformer-tiny"
OPTIONS = {
    "greedy": DecodeOptions(scores=True),
    "beams": DecodeOptions(num_beams=3, num_return_sequences=3),
    "samples": DecodeOptions(sample=True, num_return_sequences=2, top_p=0.9, seed=7, scores=True),
    "forced": DecodeOptions(suppress_tokens=[10], bad_words=[[17], [3, 3]], forced_eos_id=2, scores=True),
    "forced beams": DecodeOptions(num_beams=3, bad_words=[[17]], forced_eos_id=2, renormalize=True),
}
BUNDLES = {
    "static": lambda: quantized_of(TINY, "int8"),
    "smoothed": lambda: formed_of(TINY, "static", smoothed=True),
    # Decoders whose state starts from the source.
    "at": lambda: quantized_of("at-tiny", "int8"),
    "rnn": lambda: quantized_of("rnn-tiny", "int8"),
}


def drawn_sources(count: int) -> list[list[int]]:
    draw = np.random.default_rng(5)
    rows = [draw.integers(3, 64, draw.integers(1, 9)).tolist() for _ in range(count)]
    return sorted(rows, key=len, reverse=True)


def own(options: DecodeOptions) -> DecodeOptions:
    return replace(options, shortlist="auto", max_new_tokens=10)


def refilled(bundle: Bundle, sources: list[list[int]], options: DecodeOptions) -> list[Hypothesis]:
    """Return the results of sources that share five places."""
    queue = deque(range(len(sources)))

    def take(count: int) -> list[int]:
        return [queue.popleft() for _ in range(min(count, len(queue)))]

    with closing(OrtEngine(bundle, OrtOptions(threads=1))) as engine:
        task = task_of(engine.spec, sources, options, table=TABLE)
        assert refills(engine, task)
        with Decoding.of_task(engine, task, take(5), waiting=Waiting(take, 0.25)) as decoding:
            results = dict(zip(decoding.arrivals, decoding.run(), strict=True))
    return [results[index] for index in range(len(sources))]


def alone(bundle: Bundle, sources: list[list[int]], options: DecodeOptions) -> list[Hypothesis]:
    with closing(OrtEngine(bundle, OrtOptions(threads=1))) as engine:
        return [decode(engine, [source], options, table=TABLE)[0] for source in sources]


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("form", BUNDLES)
def test_a_source_that_joins_keeps_to_its_own_list(form: str, name: str) -> None:
    bundle, options, sources = BUNDLES[form](), own(OPTIONS[name]), drawn_sources(24)
    results = refilled(bundle, sources, options)
    assert results == alone(bundle, sources, options)
    for source, result in zip(sources, results, strict=True):
        assert set(result.tokens) <= listed(source)
    assert len({result.tokens for result in results}) > 12


@pytest.mark.parametrize("name", ["greedy", "beams"])
def test_blocks_give_a_source_that_joins_the_tokens_that_it_has_alone(name: str) -> None:
    bundle, options, sources = formed_of(TINY, "blocks8"), own(OPTIONS[name]), drawn_sources(24)
    expected = [result.tokens for result in alone(bundle, sources, options)]
    assert [result.tokens for result in refilled(bundle, sources, options)] == expected


class TwoWorkers(Crews):
    """Two workers with few rows each, whatever is faster here."""

    def crew_for(self, n_rows: int, *, hurried: bool = False) -> Crew | None:
        return Crew(self._engine, 2, 6)


@pytest.mark.parametrize("name", ["greedy", "beams"])
@pytest.mark.parametrize("form", BUNDLES)
def test_workers_decode_with_the_lists_of_their_own_sources(form: str, name: str) -> None:
    bundle, options, sources = BUNDLES[form](), own(OPTIONS[name]), drawn_sources(40)
    engine = OrtEngine(bundle, OrtOptions(threads=1))
    with Model(bundle, engine, TwoWorkers(engine, 2, lambda: engine, "key"), table=TABLE) as model:
        results = model.generate(sources, options)
    assert results == alone(bundle, sources, options)


def test_a_part_of_a_task_has_its_table() -> None:
    bundle, options, sources = quantized_of(TINY, "int8"), own(DecodeOptions()), drawn_sources(6)
    with closing(OrtEngine(bundle, OrtOptions(threads=1))) as engine:
        task = task_of(engine.spec, sources, options, table=TABLE)
        with Decoding.of_task(engine, task, [4, 1]) as decoding:
            assert decoding.run() == alone(bundle, [sources[4], sources[1]], options)
