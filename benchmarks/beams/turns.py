"""One turn of beams, memory or a shortlist in a process of its own: targets are checked first, then decodes are timed.

Nothing here imports torch: it would add its memory and idle threads to what is measured.
"""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import numpy as np

from benchmarks.harness.memory import resident_bytes
from benchmarks.harness.rounds import print_turn
from benchmarks.harness.settings import DecodeSizes
from benchmarks.harness.timing import Phases, phases_from_times, repeated
from benchmarks.harness.watched import WatchedEngine
from benchmarks.peers.decoders import IMPORTED
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import WEIGHTS
from fatdeploy.runtimes.bench.timing import peak_bytes, timed_decode
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.spec import Tokens

BeamPart = Literal["beams", "memory", "shortlist"]
BeamEngine = Literal["fatdeploy", "ctranslate2"]


class BeamDecoder(Protocol):
    """A loaded engine and the sources that it decodes."""

    def best(self, target: int, count: int) -> Tokens:
        """Return the tokens [B, n, T] of the best targets of a number of steps."""
        ...

    def timed(self, target: int) -> tuple[Phases, Tokens]:
        """Return the phases of a decode, and the tokens [B, T] of the best targets."""
        ...


@dataclass(frozen=True, kw_only=True)
class BeamTurn:
    """Which engine does what, in which setting."""

    part: BeamPart
    preset: str
    engine: BeamEngine
    batch: int
    beams: int
    threads: int
    workers: int = 1  # CTranslate2 splits the batch over them
    shortlist: int = 0  # number of allowed tokens; 0 allows all


@dataclass(frozen=True)
class ExpectedBeams:
    """Sources whose targets EOS does not end, and the reference's best targets."""

    source: Tokens  # [B, S]
    tokens: Tokens  # [B, n, T]
    first: Tokens  # [B, n, 1], after a decode of one step
    scores: np.ndarray  # [B, n]

    def at(self, target: int) -> Tokens:
        """Return the best targets of one step or of all."""
        return self.first if target == 1 else self.tokens


def expected_of(turn: BeamTurn, sizes: DecodeSizes) -> ExpectedBeams:
    """Return the prepared sources and targets of a turn."""
    with np.load(sizes.models(turn.preset).beams(turn.batch, turn.beams, sizes.source, sizes.target)) as file:
        return ExpectedBeams(file["source"], file["tokens"], file["first"], file["scores"])


def beams(turn: BeamTurn, sizes: DecodeSizes) -> dict[str, Any]:
    """Return seconds to load and the phases of each repetition; all beams are checked first, then always the best."""
    expected = expected_of(turn, sizes)
    importlib.import_module(IMPORTED[turn.engine])
    started = time.perf_counter()
    decoder = DECODERS[turn.engine](turn, sizes, expected)
    load = time.perf_counter() - started
    for target in (sizes.target, 1):
        _check_tokens(decoder.best(target, turn.beams), expected.at(target))
    phases = repeated(lambda target: _checked(decoder, expected, target), sizes.target, sizes.repetitions)
    return {"load": load, "phases": phases}


def _checked(decoder: BeamDecoder, expected: ExpectedBeams, target: int) -> Phases:
    phases, tokens = decoder.timed(target)
    _check_tokens(tokens, expected.at(target)[:, 0])
    return phases


def _check_tokens(tokens: Tokens, expected: Tokens) -> None:
    if not np.array_equal(tokens, expected):
        raise SystemExit("the tokens differ from the reference's: nothing was recorded")


class BundleBeams:
    """A bundle in the loop that applications run."""

    def __init__(self, turn: BeamTurn, sizes: DecodeSizes, expected: ExpectedBeams) -> None:
        bundle = read_bundle(sizes.models(turn.preset).bundle)
        self.engine = OrtEngine(bundle, OrtOptions(threads=turn.threads))
        allowed = _shortlist(turn, bundle.spec.vocab_size, expected) if turn.shortlist else None
        self.options = DecodeOptions(num_beams=turn.beams, shortlist=allowed)
        self.sources = list(expected.source)
        # Greedy targets have no score, and the prepared scores are those of all steps.
        self.scores = {sizes.target: expected.scores[:, 0]} if turn.beams > 1 else {}

    def best(self, target: int, count: int) -> Tokens:
        """Return the tokens [B, n, T] of the best targets, their scores checked."""
        options = replace(self.options, max_new_tokens=target, num_return_sequences=count)
        hypotheses = decode(self.engine, self.sources, options)
        if target in self.scores:
            _check_scores(hypotheses, self.scores[target])
        return np.array([[beam.tokens for beam in (best, *best.alternatives)] for best in hypotheses])

    def timed(self, target: int) -> tuple[Phases, Tokens]:
        """Return the phases of a decode, and the tokens [B, T] of the best targets."""
        times, tokens = timed_decode(self.engine, self.sources, replace(self.options, max_new_tokens=target))
        return phases_from_times(times), np.array(tokens)


def _shortlist(turn: BeamTurn, vocab_size: int, expected: ExpectedBeams) -> list[int]:
    """Return the reference's tokens, and random others."""
    needed = np.unique(np.concatenate([expected.tokens.ravel(), expected.first.ravel()]))
    others = np.setdiff1d(np.arange(vocab_size), needed)
    drawn = np.random.default_rng(0).choice(others, turn.shortlist - len(needed), replace=False)
    return sorted([*needed.tolist(), *drawn.tolist()])


def _check_scores(hypotheses: list[Hypothesis], expected: np.ndarray) -> None:
    if not np.allclose([hypothesis.score for hypothesis in hypotheses], expected, rtol=1e-4, atol=1e-4):
        raise SystemExit("the scores differ from the reference's: nothing was recorded")


class TranslatedBeams:
    """CTranslate2, which decodes by itself and shows nothing but its result."""

    def __init__(self, turn: BeamTurn, sizes: DecodeSizes, expected: ExpectedBeams) -> None:
        from benchmarks.peers.ctranslate2_decoding import Translation

        folder = sizes.models(turn.preset).ctranslate2
        self.translation = Translation(folder, threads=turn.threads, workers=turn.workers)
        self.sources = self.translation.sources(expected.source, np.ones_like(expected.source, bool))
        self.beams = turn.beams

    def best(self, target: int, count: int) -> Tokens:
        """Return the tokens [B, n, T] of the best targets."""
        return self.translation.all_tokens(self.translation.results(self.sources, target, self.beams, count))

    def timed(self, target: int) -> tuple[Phases, Tokens]:
        """Return the seconds of a decode, and the tokens [B, T] of the best targets."""
        started = time.perf_counter()
        results = self.translation.results(self.sources, target, self.beams)
        ended = time.perf_counter()
        return {"end_to_end": ended - started}, self.translation.tokens(results)


DECODERS: dict[BeamEngine, Callable[[BeamTurn, DecodeSizes, ExpectedBeams], BeamDecoder]] = {
    "fatdeploy": BundleBeams,
    "ctranslate2": TranslatedBeams,
}


def memory(turn: BeamTurn, sizes: DecodeSizes) -> dict[str, Any]:
    """Return the peak memory of a process, and the parts that belong to the sources and to the decoder's state."""
    expected = expected_of(turn, sizes)
    importlib.import_module("onnxruntime")
    imported = resident_bytes()
    bundle = read_bundle(sizes.models(turn.preset).bundle)
    engine = WatchedEngine(OrtEngine(bundle, OrtOptions(threads=turn.threads)))
    loaded = resident_bytes()
    options = DecodeOptions(max_new_tokens=sizes.target, num_beams=turn.beams)
    with Decoding(engine, list(expected.source), options) as decoding:
        step_bytes = []
        while decoding.advance():
            step_bytes.append(_state_bytes(engine))
        hypotheses = decoding.results()
    _check_tokens(np.array([hypothesis.tokens for hypothesis in hypotheses]), expected.tokens[:, 0])
    return {
        "after_import_bytes": imported,
        "after_load_bytes": loaded,
        "after_decode_bytes": resident_bytes(),
        "peak_bytes": peak_bytes(),
        "weights_bytes": bundle.manifest.files[WEIGHTS].size,
        # The largest of any step.
        "memory_bytes": max(parts["memory"] for parts in step_bytes),
        "state_bytes": max(parts["state"] for parts in step_bytes),
    }


def _state_bytes(engine: WatchedEngine) -> dict[str, int]:
    """Return the sizes of cross keys and values, which belong to sources, and of the state, which belongs to rows."""
    [state] = engine.states
    return {
        "memory": sum(state.sources[tensor.name].nbytes for tensor in engine.spec.memory),
        "state": sum(array.nbytes for arrays in state.arrays for array in arrays),
    }


PARTS = {"beams": beams, "memory": memory, "shortlist": beams}


if __name__ == "__main__":
    print_turn(BeamTurn, DecodeSizes, lambda turn, sizes: PARTS[turn.part](turn, sizes))
