"""One turn of ``quantized`` in a process of its own: an engine in one precision decodes, or is compared token by token.

Nothing here imports torch unless the reference takes its turn: the memory and the idle threads would be ours.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness.decoders import IMPORTED, Decoder, repeated
from benchmarks.harness.measuring import Phases, result_apart
from benchmarks.harness.profile_step import cache_bytes, profile_of, reading_speed, recorded
from benchmarks.harness.turns import EXACT, Cache, Setting, Sizes, loaded_decoder
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.bench.weight_bytes import bytes_a_step_reads
from fatdeploy.runtimes.proof.probes import Probe, read_probes
from fatdeploy.spec import Tokens

QuantizedPart = Literal["greedy", "forced", "memory", "profile"]
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class QuantizedTurn(Setting):
    """Which engine does what, in which setting."""

    part: QuantizedPart

    @property
    def exact(self) -> bool:
        """Whether nothing but the reference's tokens is right."""
        return self.precision in EXACT


def probe_and_model(turn: QuantizedTurn, sizes: Sizes) -> tuple[Probe, Path | None]:
    """Return the sources of a turn, and what its engine is to load."""
    cache = Cache(Path(sizes.cache), turn.preset)
    [probe] = read_probes(cache.probe(turn.batch, sizes.source, sizes.target))
    return probe, turn.model(cache)


def greedy(turn: QuantizedTurn, sizes: Sizes) -> dict[str, Any]:
    """Return seconds to load, the phases of each repetition, size, and how far the tokens are the reference's.

    A quantized engine is timed on the tokens that it says itself: a step costs the same whatever it reads.
    """
    probe, folder = probe_and_model(turn, sizes)
    importlib.import_module(IMPORTED[turn.engine])
    on_disk = None if folder is None else warmed(folder)
    started = time.perf_counter()
    decoder = loaded_decoder(turn, folder, probe)
    load = time.perf_counter() - started
    (_, tokens), _ = (checked(turn, decoder, probe, target) for target in (sizes.target, 1))
    timed = repeated(lambda target: checked(turn, decoder, probe, target)[0], sizes.target, sizes.repetitions)
    return {
        # Drawing weights is not loading them.
        "load": None if folder is None else load,
        "phases": timed,
        "agreeing_prefix": agreeing_prefix(tokens, probe.tokens),
        "bytes_on_disk": on_disk,
    }


def warmed(folder: Path) -> int:
    """Read every file of a folder, so that loading it waits for no disk; return how many bytes they are."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    total += len(block)
    return total


def checked(turn: QuantizedTurn, decoder: Decoder, probe: Probe, target: int) -> tuple[Phases, Tokens]:
    """Return seconds and tokens of a decode; an exact engine's that are not the reference's are an error."""
    phases, tokens = decoder.decoded(target)
    expected = probe.tokens[:, :target]
    if tokens.shape != expected.shape:
        raise SystemExit(f"{expected.shape} tokens were asked for, {tokens.shape} came: no time was recorded")
    if turn.exact and not np.array_equal(tokens, expected):
        raise SystemExit("the tokens are not those of the reference: no time was recorded")
    return phases, tokens


def agreeing_prefix(tokens: Tokens, expected: Tokens) -> float:
    """Return the share of tokens [B, T] that come before a row's first difference."""
    return float(np.logical_and.accumulate(tokens == expected, axis=1).mean())


def forced(turn: QuantizedTurn, sizes: Sizes) -> dict[str, Any]:
    """Return the share of steps that say what the reference says when all before it are the reference's tokens."""
    probe, folder = probe_and_model(turn, sizes)
    said = loaded_decoder(turn, folder, probe).following(probe.tokens)
    return {"agreeing": float((said == probe.tokens).mean())}


def memory(turn: QuantizedTurn, sizes: Sizes) -> dict[str, int]:
    """Return what a process holds in which nothing but the engine is loaded: not this one."""
    probe, folder = probe_and_model(turn, sizes)
    sources = [row[real].tolist() for row, real in zip(probe.source, probe.mask, strict=True)]
    asked = {**asdict(turn), "folder": str(folder), "sources": sources, "target": sizes.target}
    held: dict[str, int] = result_apart("benchmarks.harness.memory_alone", json.dumps(asked), blas_threads=turn.threads)
    return held


def profile(turn: QuantizedTurn, sizes: Sizes) -> dict[str, Any]:
    """Return where the time of a bundle's step goes, how much it has to read, and how fast memory can be read."""
    probe, folder = probe_and_model(turn, sizes)
    assert folder is not None  # noqa: S101 - a bundle has one
    bundle = read_bundle(folder)
    length, steps = probe.source.shape[1], sizes.target
    found = profile_of(recorded(bundle, batch=turn.batch, threads=turn.threads, source=length, steps=steps))
    return {
        "ms": found.ms,
        "between_ms": found.between_ms,
        "ops": {one.op: {"calls": one.calls, "ms": one.ms} for one in found.ops},
        "weight_bytes": bytes_a_step_reads(bundle.path / DECODER),
        "cache_bytes": cache_bytes(bundle.spec, batch=turn.batch, source=length, steps=steps),
        "bytes_a_second": reading_speed(turn.threads),
    }


PARTS: dict[QuantizedPart, Callable[[QuantizedTurn, Sizes], Any]] = {
    "greedy": greedy,
    "forced": forced,
    "memory": memory,
    "profile": profile,
}


def main() -> None:
    """Do the turn that the argument describes, and print its result."""
    described = json.loads(sys.argv[1])
    turn, sizes = QuantizedTurn(**described["turn"]), Sizes(**described["sizes"])
    print(json.dumps(PARTS[turn.part](turn, sizes)))


if __name__ == "__main__":
    main()
