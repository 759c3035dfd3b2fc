"""One turn of ``real`` in a process of its own: sentences alone or in bulk, their targets checked before any time.

Nothing here imports torch: it would add its memory and idle threads to what is measured.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from benchmarks.harness.rounds import print_turn
from benchmarks.real.sources import MODEL, PEER, Vocabulary
from fatdeploy.runtimes.loading import load

RealEngine = Literal["fatdeploy", "ctranslate2"]
RealPart = Literal["alone", "bulk"]
Ids = list[list[int]]


@dataclass(frozen=True, kw_only=True)
class RealTurn:
    """Which engine translates, how, and whether one sentence at a time or all at once."""

    part: RealPart
    engine: RealEngine
    threads: int
    workers: int = 1  # CTranslate2 splits the sentences over them
    batch: int = 0  # sentences per batch; 0 is the engine's default


@dataclass(frozen=True, kw_only=True)
class RealSizes:
    """What all turns of a run share."""

    real: str
    bundle: str
    prepared: str  # file with sources and their greedy targets
    max_new_tokens: int
    alone: int  # sentences that are translated one at a time
    repetitions: int


class Translating(Protocol):
    """A loaded engine."""

    def targets(self, sources: Ids) -> Ids:
        """Return greedy targets without EOS."""
        ...


class BundleTranslating:
    """Our bundle, as an application runs it."""

    def __init__(self, turn: RealTurn, sizes: RealSizes) -> None:
        self.model = load(sizes.bundle, threads=turn.threads)
        # Otherwise the folder's own settings, as the bundle has them.
        self.options = self.model.options_with(num_beams=1, max_new_tokens=sizes.max_new_tokens)

    def targets(self, sources: Ids) -> Ids:
        """Return greedy targets without EOS."""
        return [list(hypothesis.tokens) for hypothesis in self.model.generate(sources, self.options)]


class PeerTranslating:
    """CTranslate2 on the same weights; it appends EOS to sources by itself."""

    def __init__(self, turn: RealTurn, sizes: RealSizes) -> None:
        import ctranslate2

        real = Path(sizes.real)
        self.translator = ctranslate2.Translator(
            str(real / PEER), compute_type="float32", intra_threads=turn.threads, inter_threads=turn.workers
        )
        self.ids = Vocabulary.of(real / MODEL).ids
        self.pieces = {index: piece for piece, index in self.ids.items()}
        self.options = {"max_batch_size": turn.batch, "max_decoding_length": sizes.max_new_tokens, "beam_size": 1}

    def targets(self, sources: Ids) -> Ids:
        """Return greedy targets without EOS."""
        pieces = [[self.pieces[index] for index in ids[:-1]] for ids in sources]
        results = self.translator.translate_batch(pieces, **self.options)
        return [[self.ids[piece] for piece in result.hypotheses[0]] for result in results]


ENGINES: dict[RealEngine, type[Translating]] = {"fatdeploy": BundleTranslating, "ctranslate2": PeerTranslating}


def measured(turn: RealTurn, sizes: RealSizes) -> dict[str, Any]:
    """Return seconds of each sentence alone, or of all of them in bulk, several times."""
    prepared = json.loads(Path(sizes.prepared).read_text())
    count = sizes.alone if turn.part == "alone" else len(prepared["sources"])
    sources, expected = prepared["sources"][:count], prepared["targets"][:count]
    started = time.perf_counter()
    engine = ENGINES[turn.engine](turn, sizes)
    load_seconds = time.perf_counter() - started
    calls = [([source], [target]) for source, target in zip(sources, expected, strict=True)]
    if turn.part == "bulk":
        calls = [(sources, expected)]
    for call in calls:
        _seconds(engine, *call)  # checks every target once, and warms up
    seconds = [_seconds(engine, *call) for _ in range(sizes.repetitions) for call in calls]
    return {"load": load_seconds, "seconds": seconds, "tokens": sum(map(len, expected))}


def _seconds(engine: Translating, sources: Ids, expected: Ids) -> float:
    started = time.perf_counter()
    targets = engine.targets(sources)
    ended = time.perf_counter()
    if targets != expected:
        raise SystemExit("the targets differ from those of transformers: nothing was recorded")
    return ended - started


if __name__ == "__main__":
    print_turn(RealTurn, RealSizes, measured)
