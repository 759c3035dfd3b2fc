"""Sources that take the places of finished ones in an engine, fed with tokens that are known."""

from dataclasses import dataclass

import numpy as np

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.spec import Tokens

STEPS = 14  # of the longest script


def batch(sources: list[Tokens]) -> tuple[Tokens, np.ndarray]:
    width = max(len(source) for source in sources)
    padded, mask = np.zeros((len(sources), width), np.int64), np.zeros((len(sources), width), bool)
    for row, source in enumerate(sources):
        padded[row, : len(source)], mask[row, : len(source)] = source, True
    return padded, mask


@dataclass
class Script:
    """A source, and the tokens that its rows are fed with."""

    source: Tokens
    fed: Tokens  # [n, steps]


def scripts(draw: np.random.Generator, lengths: list[int], per_source: int) -> list[Script]:
    return [
        Script(draw.integers(3, 64, length), draw.integers(3, 64, (per_source, int(draw.integers(2, STEPS)))))
        for length in lengths
    ]


def alone(engine: OrtEngine | EagerEngine, script: Script) -> np.ndarray:
    """Return the logits [n, steps, V] of one source, token by token."""
    per_source = len(script.fed)
    state = engine.encode(*batch([script.source]), Capacity(per_source, STEPS))
    engine.reorder(state, np.zeros(per_source, np.int64))
    columns = [
        engine.step(script.fed[:, [step]], state, Want.LOGITS).logits.copy() for step in range(script.fed.shape[1])
    ]
    engine.release(state)
    return np.concatenate(columns, 1)


def refilled_logits(
    engine: OrtEngine, waiting: list[Script], per_source: int, places: int
) -> tuple[list[np.ndarray], list[int]]:
    """Return the logits of every script and the widths of the arrays, when finished sources are replaced."""
    running = list(range(places))
    state = engine.encode(*batch([waiting[index].source for index in running]), Capacity(per_source, STEPS))
    engine.reorder(state, np.repeat(np.arange(places), per_source))
    following, fed, results, widths = places, [0] * places, [[] for _ in waiting], []
    while running:
        tokens = np.concatenate([waiting[index].fed[:, [step]] for index, step in zip(running, fed, strict=True)])
        logits = engine.step(tokens, state, Want.LOGITS).logits.reshape(len(running), per_source, 1, -1)
        for place, index in enumerate(running):
            results[index].append(logits[place].copy())
        fed = [step + 1 for step in fed]
        finished = [place for place, index in enumerate(running) if fed[place] == waiting[index].fed.shape[1]]
        new = finished[: len(waiting) - following]
        if new:
            newcomers = list(range(following, following + len(new)))
            other = engine.encode(*batch([waiting[index].source for index in newcomers]), Capacity(1, 1))
            engine.refill(state, np.array(new), other)
            engine.release(other)
            following += len(new)
            for place, index in zip(new, newcomers, strict=True):
                running[place], fed[place] = index, 0
        left = [place for place in range(len(running)) if place in new or place not in finished]
        if len(left) < len(running):
            if left:
                rows = np.array(left)[:, None] * per_source + np.arange(per_source)
                engine.reorder(state, rows.reshape(-1))
            running, fed = [running[place] for place in left], [fed[place] for place in left]
        widths.append(state.sources[engine.spec.source_mask.name].shape[1])
    engine.release(state)
    return [np.concatenate(columns, 1) for columns in results], widths
