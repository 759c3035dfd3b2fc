"""One turn of beams, memory or a shortlist in a process of its own: what is decoded is checked, then timed.

Nothing here imports torch: the memory and the idle threads would be ours.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness.decoders import IMPORTED, repeated
from benchmarks.harness.measuring import Phases, timed_search
from benchmarks.harness.memory_alone import peak_bytes, resident_bytes
from benchmarks.harness.turns import Cache
from benchmarks.harness.watched import Watched
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.spec import Tokens

BeamPart = Literal["beams", "memory", "shortlist"]
BeamEngine = Literal["fatdeploy", "ctranslate2"]
# Decodes a number of steps and so many of the best targets; returns its phases, and the tokens [B, n, T].
BeamDecoder = Callable[[int, int], tuple[Phases, Tokens]]


@dataclass(frozen=True, kw_only=True)
class BeamTurn:
    """Which engine does what, in which setting."""

    part: BeamPart
    preset: str
    engine: BeamEngine
    batch: int
    beams: int
    threads: int
    workers: int = 1  # of CTranslate2: the batch is split over them
    shortlist: int = 0  # tokens that may be said; without it all of them


@dataclass(frozen=True, kw_only=True)
class BeamSizes:
    """What all turns of a run have in common."""

    cache: str
    source: int
    target: int
    repetitions: int


@dataclass(frozen=True)
class Expected:
    """Sources that EOS does not end, and the reference's best targets."""

    source: Tokens  # [B, S]
    tokens: Tokens  # [B, n, T]
    first: Tokens  # [B, n, 1], of a decode of one step
    scores: np.ndarray  # [B, n]

    def at(self, target: int) -> Tokens:
        """Return the best targets of so many steps, one or all."""
        return self.first if target == 1 else self.tokens


def expected_of(turn: BeamTurn, sizes: BeamSizes) -> Expected:
    """Return what was prepared for a turn."""
    cache = Cache(Path(sizes.cache), turn.preset)
    with np.load(cache.beams(turn.batch, turn.beams, sizes.source, sizes.target)) as file:
        return Expected(file["source"], file["tokens"], file["first"], file["scores"])


def beams(turn: BeamTurn, sizes: BeamSizes) -> dict[str, Any]:
    """Return seconds to load, and the phases of each repetition; all beams are checked first, then always the best."""
    expected = expected_of(turn, sizes)
    importlib.import_module(IMPORTED[turn.engine])
    started = time.perf_counter()
    decoder = DECODERS[turn.engine](turn, sizes, expected)
    load = time.perf_counter() - started
    for target in (sizes.target, 1):
        _checked(decoder, expected, target, turn.beams)
    phases = repeated(lambda target: _checked(decoder, expected, target, 1), sizes.target, sizes.repetitions)
    return {"load": load, "phases": phases}


def _checked(decoder: BeamDecoder, expected: Expected, target: int, count: int) -> Phases:
    phases, tokens = decoder(target, count)
    if not np.array_equal(tokens, expected.at(target)[:, :count]):
        raise SystemExit("the tokens are not those of the reference: nothing was recorded")
    return phases


def _fatdeploy_decoder(turn: BeamTurn, sizes: BeamSizes, expected: Expected) -> BeamDecoder:
    engine = OrtEngine(read_bundle(Cache(Path(sizes.cache), turn.preset).bundle), OrtOptions(threads=turn.threads))
    allowed = _shortlist(turn, engine.spec.vocab_size, expected) if turn.shortlist else None
    options = DecodeOptions(num_beams=turn.beams, shortlist=allowed)
    sources = list(expected.source)

    def decoder(target: int, count: int) -> tuple[Phases, Tokens]:
        phases, found = timed_search(engine, sources, replace(options, num_return_sequences=count), target)
        if turn.beams > 1 and target == sizes.target:
            _check_scores(found, expected)
        return phases, np.array([[one.tokens for one in (best, *best.alternatives)] for best in found])

    return decoder


def _shortlist(turn: BeamTurn, vocab_size: int, expected: Expected) -> list[int]:
    """Return the reference's tokens, and random others."""
    said = np.unique(np.concatenate([expected.tokens.ravel(), expected.first.ravel()]))
    others = np.setdiff1d(np.arange(vocab_size), said)
    drawn = np.random.default_rng(0).choice(others, turn.shortlist - len(said), replace=False)
    return sorted([*said.tolist(), *drawn.tolist()])


def _check_scores(found: list[Hypothesis], expected: Expected) -> None:
    if not np.allclose([one.score for one in found], expected.scores[:, 0], rtol=1e-4, atol=1e-4):
        raise SystemExit("the scores are not those of the reference: nothing was recorded")


def _ctranslate2_decoder(turn: BeamTurn, sizes: BeamSizes, expected: Expected) -> BeamDecoder:
    from benchmarks.peers.ctranslate2_decoding import Translation

    folder = Cache(Path(sizes.cache), turn.preset).ctranslate2
    translation = Translation(folder, threads=turn.threads, workers=turn.workers)
    sources = translation.sources(expected.source, np.ones_like(expected.source, bool))

    def decoder(target: int, count: int) -> tuple[Phases, Tokens]:
        started = time.perf_counter()
        results = translation.results(sources, target, turn.beams, count)
        ended = time.perf_counter()
        return {"end_to_end": ended - started}, translation.all_tokens(results)

    return decoder


DECODERS: dict[BeamEngine, Callable[[BeamTurn, BeamSizes, Expected], BeamDecoder]] = {
    "fatdeploy": _fatdeploy_decoder,
    "ctranslate2": _ctranslate2_decoder,
}


def memory(turn: BeamTurn, sizes: BeamSizes) -> dict[str, Any]:
    """Return what a process holds at most, and what of it is the sources' memory and the decoder's state."""
    expected = expected_of(turn, sizes)
    importlib.import_module("onnxruntime")
    imported = resident_bytes()
    bundle = read_bundle(Cache(Path(sizes.cache), turn.preset).bundle)
    engine = Watched(OrtEngine(bundle, OrtOptions(threads=turn.threads)))
    loaded = resident_bytes()
    options = DecodeOptions(max_new_tokens=sizes.target, num_beams=turn.beams)
    with Decoding(engine, list(expected.source), options) as decoding:
        held = []
        while decoding.advance():
            held.append(_held_bytes(engine))
        found = decoding.results()
    if [one.tokens for one in found] != [tuple(best) for best in expected.tokens[:, 0].tolist()]:
        raise SystemExit("the tokens are not those of the reference: nothing was recorded")
    return {
        "after_import_bytes": imported,
        "after_load_bytes": loaded,
        "after_decode_bytes": resident_bytes(),
        "peak_bytes": peak_bytes(),
        "weights_bytes": bundle.manifest.files[WEIGHTS].size,
        # The most of any step.
        "memory_bytes": max(one["memory"] for one in held),
        "state_bytes": max(one["state"] for one in held),
    }


def _held_bytes(engine: Watched) -> dict[str, int]:
    """Return the sizes of cross keys and values, which belong to sources, and of the state, which belongs to rows."""
    [state] = engine.held
    return {
        "memory": sum(state.sources[one.name].nbytes for one in engine.spec.memory),
        "state": sum(array.nbytes for arrays in state.arrays for array in arrays),
    }


PARTS: dict[BeamPart, Callable[[BeamTurn, BeamSizes], Any]] = {"beams": beams, "memory": memory, "shortlist": beams}


def main() -> None:
    """Do the turn that the argument describes, and print its result."""
    described = json.loads(sys.argv[1])
    turn, sizes = BeamTurn(**described["turn"]), BeamSizes(**described["sizes"])
    print(json.dumps(PARTS[turn.part](turn, sizes)))


if __name__ == "__main__":
    main()
