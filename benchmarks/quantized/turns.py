"""One turn of ``quantized`` in a process of its own: an engine in one precision decodes, or is compared token by token.

torch is imported for the reference alone: it would add its memory and idle threads to every other engine.
"""

import importlib
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.harness.profile_step import READ_BYTES, cache_bytes, profile_of, recorded
from benchmarks.harness.rounds import module_result, print_turn
from benchmarks.harness.settings import EXACT, DecodeSizes, EngineSetting
from benchmarks.harness.timing import Phases, repeated
from benchmarks.peers.decoders import IMPORTED, Decoder, loaded_decoder
from fatdeploy.bundle import read_bundle
from fatdeploy.manifest import DECODER
from fatdeploy.runtimes.bench.timing import read_bandwidth
from fatdeploy.runtimes.bench.weight_bytes import bytes_a_step_reads
from fatdeploy.runtimes.proof.probes import Probe, read_probes
from fatdeploy.spec import Tokens

QuantizedPart = Literal["greedy", "forced", "memory", "profile"]
BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class QuantizedTurn(EngineSetting):
    """Which engine does what, in which setting."""

    part: QuantizedPart

    @property
    def exact(self) -> bool:
        """Whether the tokens must be the reference's."""
        return self.precision in EXACT


def probe_and_model(turn: QuantizedTurn, sizes: DecodeSizes) -> tuple[Probe, Path | None]:
    """Return the sources of a turn, and the folder that its engine loads."""
    models = sizes.models(turn.preset)
    [probe] = read_probes(models.probe(turn.batch, sizes.source, sizes.target))
    return probe, turn.model(models)


def greedy(turn: QuantizedTurn, sizes: DecodeSizes) -> dict[str, Any]:
    """Return seconds to load, the phases of each repetition, size, and the share of tokens equal to the reference's.

    A quantized engine is timed on its own tokens: a step costs the same for every input.
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
    """Read every file of a folder, so that loading does not wait for the disk; return their size in bytes."""
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while block := file.read(BLOCK):
                    total += len(block)
    return total


def checked(turn: QuantizedTurn, decoder: Decoder, probe: Probe, target: int) -> tuple[Phases, Tokens]:
    """Return seconds and tokens of a decode; an exact engine must give the reference's tokens."""
    phases, tokens = decoder.decoded(target)
    expected = probe.tokens[:, :target]
    if tokens.shape != expected.shape:
        raise SystemExit(f"expected {expected.shape} tokens, found {tokens.shape}: no time was recorded")
    if turn.exact and not np.array_equal(tokens, expected):
        raise SystemExit("the tokens differ from the reference's: no time was recorded")
    return phases, tokens


def agreeing_prefix(tokens: Tokens, expected: Tokens) -> float:
    """Return the share of tokens [B, T] before the first difference of their row."""
    return float(np.logical_and.accumulate(tokens == expected, axis=1).mean())


def forced(turn: QuantizedTurn, sizes: DecodeSizes) -> dict[str, Any]:
    """Return the share of steps that choose the reference's token when all inputs are the reference's tokens."""
    probe, folder = probe_and_model(turn, sizes)
    tokens = loaded_decoder(turn, folder, probe).following(probe.tokens)
    return {"agreeing": float((tokens == probe.tokens).mean())}


def memory(turn: QuantizedTurn, sizes: DecodeSizes) -> dict[str, int]:
    """Return the memory of a process of its own that loads nothing but the engine."""
    probe, folder = probe_and_model(turn, sizes)
    sources = [row[real].tolist() for row, real in zip(probe.source, probe.mask, strict=True)]
    described = {**asdict(turn), "folder": str(folder), "sources": sources, "target": sizes.target}
    module = "benchmarks.quantized.memory_alone"
    memory_bytes: dict[str, int] = module_result(module, json.dumps(described), blas_threads=turn.threads)
    return memory_bytes


def profile(turn: QuantizedTurn, sizes: DecodeSizes) -> dict[str, Any]:
    """Return where the time of a bundle's step goes, how many bytes it reads, and how fast memory can be read."""
    probe, folder = probe_and_model(turn, sizes)
    assert folder is not None  # noqa: S101 - a bundle has one
    bundle = read_bundle(folder)
    length, steps = probe.source.shape[1], sizes.target
    step = profile_of(recorded(bundle, batch=turn.batch, threads=turn.threads, source=length, steps=steps))
    return {
        "ms": step.ms,
        "between_ms": step.between_ms,
        "ops": {cost.op: {"calls": cost.calls, "ms": cost.ms} for cost in step.ops},
        "weight_bytes": bytes_a_step_reads(bundle.path / DECODER),
        "cache_bytes": cache_bytes(bundle.spec, batch=turn.batch, source=length, steps=steps),
        "bytes_a_second": read_bandwidth(READ_BYTES, turn.threads),
    }


PARTS = {"greedy": greedy, "forced": forced, "memory": memory, "profile": profile}


if __name__ == "__main__":
    print_turn(QuantizedTurn, DecodeSizes, lambda turn, sizes: PARTS[turn.part](turn, sizes))
