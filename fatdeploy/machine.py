"""Facts about this machine on which speed and rounding depend; read from the system, never guessed."""

import os
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# The instruction sets that inference kernels choose between, by Linux's names, in the order they are shown.
FEATURES = (
    # x86
    *("sse4_1", "avx", "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16"),
    # arm: `neon` on 32 bits, `asimd` on 64; asimddp is the int8 dot product, asimdhp arithmetic in fp16
    *("neon", "asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme", "sme2"),
)

# On Arm, Linux prints numbers instead of names. A core that is not listed is shown by its numbers.
ARM_CORES = {
    ("0x41", "0xc07"): "Cortex-A7",
    ("0x41", "0xd03"): "Cortex-A53",
    ("0x41", "0xd05"): "Cortex-A55",
    ("0x41", "0xd07"): "Cortex-A57",
    ("0x41", "0xd08"): "Cortex-A72",
    ("0x41", "0xd0b"): "Cortex-A76",
    ("0x41", "0xd0c"): "Neoverse-N1",
    ("0x41", "0xd40"): "Neoverse-V1",
    ("0x41", "0xd41"): "Cortex-A78",
    ("0x41", "0xd42"): "Cortex-A78AE",
    ("0x41", "0xd49"): "Neoverse-N2",
    ("0x41", "0xd4f"): "Neoverse-V2",
}

# macOS's names for the same features: words in two lists on Intel, one switch each on Apple silicon.
SYSCTL_WORDS = {
    "SSE4.1": "sse4_1",
    "AVX1.0": "avx",
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512F": "avx512f",
    "AVX512VNNI": "avx512_vnni",
}
SYSCTL_SWITCHES = {
    "hw.optional.neon": "asimd",
    "hw.optional.arm.FEAT_FP16": "asimdhp",
    "hw.optional.arm.FEAT_DotProd": "asimddp",
    "hw.optional.arm.FEAT_I8MM": "i8mm",
    "hw.optional.arm.FEAT_BF16": "bf16",
    "hw.optional.arm.FEAT_SME": "sme",
    "hw.optional.arm.FEAT_SME2": "sme2",
}

CPUINFO = Path("/proc/cpuinfo")
BOARD = Path("/proc/device-tree/model")


@dataclass(frozen=True)
class Cpu:
    """A processor: its name, and which of ``FEATURES`` it has; ``None`` where that is unknown."""

    name: str | None
    features: tuple[str, ...] | None


@dataclass(frozen=True)
class Machine:
    """The machine as certificates and benchmark results record it; ``None`` means unknown."""

    cpu: str | None
    board: str | None
    architecture: str
    features: tuple[str, ...] | None
    cores: int
    memory_bytes: int | None
    system: str
    python: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def this_machine() -> Machine:
    """Return the machine that this process runs on."""
    cpu = this_cpu()
    return Machine(
        cpu=cpu.name,
        board=text_of(BOARD),
        architecture=platform.machine(),
        features=cpu.features,
        cores=usable_cores(),
        memory_bytes=total_memory(),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
    )


def this_cpu() -> Cpu:
    """Return this machine's processor as far as the system describes it."""
    match platform.system():
        case "Linux":
            return cpu_from_cpuinfo(text_of(CPUINFO) or "")
        case "Darwin":
            return cpu_from_sysctl(sysctl_text())
        case _:
            return Cpu(platform.processor() or None, None)


def sysctl_text() -> str:
    """Return macOS's description of the processor."""
    return subprocess.run(
        ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"], capture_output=True, text=True, check=False
    ).stdout


def cpu_from_cpuinfo(text: str) -> Cpu:
    """Return the processor that the text of Linux's ``/proc/cpuinfo`` describes."""
    rows = list(rows_of(text))
    # x86 says `flags`, arm `Features`. Cores may differ and a thread may move, so only features of all cores count.
    sets = [set(value.split()) for key, value in rows if key in ("flags", "Features")]
    return Cpu(name_from_rows(rows), listed_features(set.intersection(*sets)) if sets else None)


def name_from_rows(rows: list[tuple[str, str]]) -> str | None:
    """Return the names of the kinds of core in ``/proc/cpuinfo``, joined by a plus."""
    makers = [value for key, value in rows if key == "CPU implementer"]
    parts = [value for key, value in rows if key == "CPU part"]
    # If there are numbers, `model name` is missing or as vague as "ARMv8 Processor rev 1 (v8l)".
    names = [
        ARM_CORES.get(core, f"arm implementer {core[0]} part {core[1]}") for core in zip(makers, parts, strict=False)
    ]
    names = names or [value for key, value in rows if key == "model name"]
    return " + ".join(dict.fromkeys(names)) or None


def cpu_from_sysctl(text: str) -> Cpu:
    """Return the processor that macOS's ``sysctl machdep.cpu hw.optional`` describes."""
    values = dict(rows_of(text))
    lists = [values.get(f"machdep.cpu.{key}", "") for key in ("features", "leaf7_features")]
    words = {SYSCTL_WORDS[word] for line in lists for word in line.split() if word in SYSCTL_WORDS}
    switches = {name for key, name in SYSCTL_SWITCHES.items() if values.get(key) == "1"}
    return Cpu(values.get("machdep.cpu.brand_string"), listed_features(words | switches) or None)


def rows_of(text: str) -> Iterator[tuple[str, str]]:
    """Yield the ``key : value`` lines of a text."""
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            yield key.strip(), value.strip()


def listed_features(features: set[str]) -> tuple[str, ...]:
    """Return those of ``FEATURES`` that are in the set, in their order."""
    return tuple(feature for feature in FEATURES if feature in features)


def text_of(path: Path) -> str | None:
    """Return a system file's text without the NUL that ends device-tree strings; ``None`` if there is no file."""
    try:
        return path.read_text(errors="replace").rstrip("\0\n")
    except OSError:
        return None


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def total_memory() -> int | None:
    """Return the machine's memory in bytes; ``None`` if the system does not tell."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
