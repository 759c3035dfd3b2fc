"""What is measured of the quantized model: parts, our bundles, and all settings of CTranslate2 that may be its best."""

from dataclasses import dataclass
from itertools import product
from typing import Literal

from benchmarks.real.exports import FP32, Recipe
from fatdeploy.machine import this_machine
from fatdeploy.runtimes.proof.cpu_checks import cpu_class
from fatdeploy.targets import CpuClass

IntegerEngine = Literal["fatdeploy", "ctranslate2"]
Kind = Literal["outputs", "forced", "survey", "timed"]
BEAMS = 4
PEER_FP32, PEER_INT8 = "float32", "int8_float32"  # CTranslate2's names; its "int8" means the second on a CPU
SPLITS = ((1, 2), (2, 1))  # CTranslate2's workers, and the threads of each
SHORTLIST = "-shortlist"  # ends the name of a bundle that has one
BEST = 2  # settings of CTranslate2 that are measured in rounds


@dataclass(frozen=True)
class IntegerPart:
    """Sentences one at a time or all at once, how they are searched, and the peer's batches that may be its best."""

    alone: bool
    beams: int = 1
    shortlist: bool = False
    batches: tuple[int, ...] = (1,)
    forms: tuple[str, ...] = ()  # of our bundles


PARTS: dict[str, IntegerPart] = {
    "greedy-alone": IntegerPart(alone=True, forms=("fp32", "int8-latency", "int8-throughput", "int4")),
    "greedy-bulk": IntegerPart(
        alone=False, batches=(32, 64, 128), forms=("fp32", "int8-latency", "int8-throughput", "int4")
    ),
    "beams-alone": IntegerPart(alone=True, beams=BEAMS, forms=("int8-latency", "int4")),
    "beams-bulk": IntegerPart(alone=False, beams=BEAMS, batches=(16, 32, 64), forms=("int8-throughput",)),
    "shortlist-bulk": IntegerPart(
        alone=False, shortlist=True, batches=(32, 64, 128), forms=(f"int8-throughput{SHORTLIST}",)
    ),
}


@dataclass(frozen=True, kw_only=True)
class IntegerTurn:
    """Which engine translates, in which form and setting: for its outputs, for a choice of settings, or for a time."""

    kind: Kind
    part: str
    engine: IntegerEngine
    form: str  # the name of a bundle, or a compute type of CTranslate2
    threads: int
    workers: int = 1
    batch: int = 0  # sentences per batch; 0 is the engine's default


@dataclass(frozen=True, kw_only=True)
class IntegerSizes:
    """What all turns of a run share."""

    real: str
    peer: str  # CTranslate2's folder, with a shortlist where there is one
    bundles: dict[str, str]  # form -> folder
    prepared: str  # file with sources
    forced: str  # file with sources and the targets of fp32 that each step follows
    max_new_tokens: int
    alone: int  # sentences that are translated one at a time
    survey: int  # sentences in bulk by which settings of the peer are chosen
    repetitions: int


def recipes(cpu: CpuClass | None) -> dict[str, Recipe]:
    """Return how each of our bundles is exported for a class of CPU."""
    return {
        "fp32": FP32,
        "int8-latency": Recipe("int8", "latency", None, cpu),
        "int8-throughput": Recipe("int8", "throughput", 0.98, cpu),
        "int4": Recipe("int4", None, 0.98, cpu),
    }


def cpu_here() -> CpuClass | None:
    """Return the class of this CPU; None, the default of an export, where weights of 8 bits may overflow."""
    here = cpu_class(this_machine())
    return here if here in ("x86-vnni", "arm64") else None


def peer_settings(part: str, compute_types: tuple[str, ...], kind: Kind = "survey") -> list[IntegerTurn]:
    """Return every setting of CTranslate2 that may be its best."""
    return [
        IntegerTurn(
            kind=kind, part=part, engine="ctranslate2", form=form, threads=threads, workers=workers, batch=batch
        )
        for form, (workers, threads), batch in product(compute_types, SPLITS, PARTS[part].batches)
    ]
