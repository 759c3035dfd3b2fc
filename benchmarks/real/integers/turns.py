"""One turn of the quantized model in a process of its own: its outputs, its choices after fp32's tokens, or its time.

Nothing here imports torch: it would add its memory and idle threads to what is measured.
"""

import json
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from benchmarks.harness.rounds import print_turn
from benchmarks.real.folders.opus_mt import EOS
from benchmarks.real.integers.settings import PARTS, IntegerEngine, IntegerSizes, IntegerTurn
from benchmarks.real.sources import MODEL, Vocabulary, evenly
from fatdeploy.bundle import read_bundle
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.loading import load
from fatdeploy.runtimes.proof.gate import Material, forced_fidelity
from fatdeploy.spec import ModelSpec

Ids = list[list[int]]
WARM_UP = 64  # sentences in bulk
WARM_UP_ALONE = 5
FORCED_BATCH = 64


class IntegerTranslating(Protocol):
    """A loaded engine."""

    def targets(self, sources: Ids) -> Ids:
        """Return targets without EOS."""
        ...

    def same_tokens(self, sources: Ids, targets: Ids) -> tuple[int, int]:
        """Return the number of steps after the given targets' tokens, EOS included, and of equal choices."""
        ...


class IntegerBundle:
    """Our bundle, as an application runs it."""

    def __init__(self, turn: IntegerTurn, sizes: IntegerSizes) -> None:
        self.folder, self.threads = sizes.bundles[turn.form], turn.threads
        part = PARTS[turn.part]
        self.model = load(self.folder, threads=turn.threads)
        changes: dict[str, Any] = {"num_beams": part.beams, "max_new_tokens": sizes.max_new_tokens}
        if part.beams > 1:
            changes["early_stopping"] = True  # CTranslate2 ends its beams like this
        if part.shortlist:
            changes["shortlist"] = "auto"
        self.changes = changes

    def targets(self, sources: Ids) -> Ids:
        """Return targets without EOS."""
        return [list(hypothesis.tokens) for hypothesis in self.model.generate(sources, **self.changes)]

    def same_tokens(self, sources: Ids, targets: Ids) -> tuple[int, int]:
        """Return the number of steps and of equal choices, by the code of the gate."""
        self.model.close()
        engine = opened_engine(read_bundle(self.folder), threads=self.threads)
        fidelity = forced_fidelity(engine, material_from(sources, targets, engine.spec))
        engine.close()
        return fidelity.tokens, fidelity.same


class IntegerPeer:
    """CTranslate2 on the same weights; it appends EOS to sources by itself."""

    def __init__(self, turn: IntegerTurn, sizes: IntegerSizes) -> None:
        import ctranslate2

        self.translator = ctranslate2.Translator(
            sizes.peer, compute_type=turn.form, intra_threads=turn.threads, inter_threads=turn.workers
        )
        self.ids = Vocabulary.of(Path(sizes.real) / MODEL).ids
        self.pieces = {index: piece for piece, index in self.ids.items()}
        part = PARTS[turn.part]
        self.options = {
            "max_batch_size": turn.batch,
            "max_decoding_length": sizes.max_new_tokens,
            "beam_size": part.beams,
            "use_vmap": part.shortlist,
        }

    def targets(self, sources: Ids) -> Ids:
        """Return targets without EOS."""
        results = self.translator.translate_batch(self._pieces(sources), **self.options)
        return [[self.ids[piece] for piece in result.hypotheses[0]] for result in results]

    def same_tokens(self, sources: Ids, targets: Ids) -> tuple[int, int]:
        """Return the number of steps and of equal choices: one token after every prefix, all of a length together."""
        tokens = [[*target, EOS] for target in targets]
        same = 0
        for step in range(max(map(len, tokens))):
            rows = [row for row, target in enumerate(tokens) if step < len(target)]
            prefixes = [[self.pieces[token] for token in tokens[row][:step]] for row in rows]
            results = self.translator.translate_batch(
                self._pieces([sources[row] for row in rows]),
                prefixes if step else None,
                beam_size=1,
                max_batch_size=FORCED_BATCH,
                max_decoding_length=step + 1,
                min_decoding_length=0,
            )
            for row, result in zip(rows, results, strict=True):
                chosen = result.hypotheses[0]
                same += (self.ids[chosen[step]] if len(chosen) > step else EOS) == tokens[row][step]
        return sum(map(len, tokens)), same

    def _pieces(self, sources: Ids) -> list[list[str]]:
        return [[self.pieces[index] for index in ids[:-1]] for ids in sources]


ENGINES: dict[IntegerEngine, type[IntegerTranslating]] = {"fatdeploy": IntegerBundle, "ctranslate2": IntegerPeer}


def material_from(sources: Ids, targets: Ids, spec: ModelSpec) -> Material:
    """Return the material of the gate; similar lengths are together."""
    tokens = [[*target, spec.eos_id] for target in targets]
    order = sorted(range(len(tokens)), key=lambda row: len(tokens[row]))
    source, mask = _padded([sources[row] for row in order], spec.pad_id)
    target, counted = _padded([tokens[row] for row in order], spec.pad_id)
    return Material(source, mask, target, counted.sum(1))


def _padded(rows: Ids, pad: int) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    padded = np.full(mask.shape, pad, np.int64)
    padded[mask] = np.concatenate(rows)
    return padded, mask


def measured(turn: IntegerTurn, sizes: IntegerSizes) -> dict[str, Any]:
    """Return what a turn is for."""
    started = time.perf_counter()
    engine = ENGINES[turn.engine](turn, sizes)
    load_seconds = time.perf_counter() - started
    if turn.kind == "forced":
        forced = json.loads(Path(sizes.forced).read_text())
        tokens, same = engine.same_tokens(forced["sources"], forced["targets"])
        return {"tokens": tokens, "same": same}
    sources = json.loads(Path(sizes.prepared).read_text())["sources"]
    if turn.kind == "outputs":
        return {"outputs": engine.targets(sources)}
    return {"load": load_seconds, **timed(engine, turn, sources, sizes)}


def rows_of(turn: IntegerTurn, sizes: IntegerSizes, total: int) -> list[int]:
    """Return which sentences a turn translates."""
    if PARTS[turn.part].alone:
        return evenly(total, sizes.alone)
    return evenly(total, sizes.survey if turn.kind == "survey" else total)


def timed(engine: IntegerTranslating, turn: IntegerTurn, sources: Ids, sizes: IntegerSizes) -> dict[str, Any]:
    """Return seconds of each sentence alone, or of all in bulk, and their outputs; beams in bulk are timed once."""
    part = PARTS[turn.part]
    chosen = [sources[row] for row in rows_of(turn, sizes, len(sources))]
    calls = [[source] for source in chosen] if part.alone else [chosen]
    for call in calls[:WARM_UP_ALONE]:
        engine.targets(call[:WARM_UP])
    once = turn.kind == "survey" or (part.beams > 1 and not part.alone)
    seconds, outputs = [], []
    for _ in range(1 if once else sizes.repetitions):
        targets: Ids = []
        for call in calls:
            started = time.perf_counter()
            translated = engine.targets(call)
            seconds.append(time.perf_counter() - started)
            targets += translated
        outputs.append(targets)
    return {
        "seconds": seconds,
        "tokens": sum(map(len, outputs[0])),
        "outputs": outputs[0],
        "repeatable": all(targets == outputs[0] for targets in outputs),
    }


if __name__ == "__main__":
    print_turn(IntegerTurn, IntegerSizes, measured)
