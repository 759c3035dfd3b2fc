"""What a measurement on a GPU depends on: device, driver, clocks, power limit, or why they are unknown."""

import csv
import shutil
import subprocess
from dataclasses import asdict, dataclass
from typing import Any

from fatdeploy.runtimes.doctor.cuda_driver import Cuda, cuda_here

TOOL = "nvidia-smi"
# The tool's names by ours, and whether the value is a number.
FIELDS = {
    "name": ("name", False),
    "uuid": ("uuid", False),
    "driver": ("driver_version", False),
    "sm_clock_mhz": ("clocks.sm", True),
    "most_sm_clock_mhz": ("clocks.max.sm", True),
    "memory_clock_mhz": ("clocks.mem", True),
    "power_limit_w": ("power.limit", True),
    "power_w": ("power.draw", True),
    "temperature_c": ("temperature.gpu", True),
    "memory_used_mb": ("memory.used", True),
}
LONGEST_S = 20


@dataclass(frozen=True)
class Gpus:
    """The device that computes, as CUDA names it, and what the driver's tool reports about every GPU here.

    CUDA numbers devices in another order than the tool: with several, the name tells which one. ``clocks`` is None if
    the tool is missing, and ``absent`` says why; a value that a GPU does not report is None.
    """

    name: str | None
    cuda: str | None
    clocks: tuple[dict[str, Any], ...] | None
    absent: str | None

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "cuda", **asdict(self)}


def gpus_here(cuda: Cuda | None = None, tool: str = TOOL) -> Gpus:
    """Return the current state of this machine's GPUs."""
    cuda = cuda or cuda_here()
    name = cuda.devices[0].name if cuda.devices else None
    clocks, absent = _clocks(tool)
    return Gpus(name, cuda.version, clocks, absent)


def _clocks(tool: str) -> tuple[tuple[dict[str, Any], ...] | None, str | None]:
    """Return a record per GPU, or why there is none."""
    program = shutil.which(tool)
    if program is None:
        return None, f"{tool} is not here: clocks and power are unknown"
    fields = ",".join(field for field, _ in FIELDS.values())
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        # The program is the driver's own, the arguments are ours.
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired) as error:
        return None, f"{tool} does not answer ({error}): clocks and power are unknown"
    if ran.returncode:
        message = " ".join((ran.stderr or ran.stdout).split())
        return None, f"{tool} ended with exit code {ran.returncode} ({message}): clocks and power are unknown"
    return records_from_csv(ran.stdout), None


def records_from_csv(text: str) -> tuple[dict[str, Any], ...]:
    """Return a record per line of the tool's output."""
    rows = csv.reader(text.splitlines(), skipinitialspace=True)
    return tuple(
        {name: _value(cell, number) for (name, (_, number)), cell in zip(FIELDS.items(), row, strict=True)}
        for row in rows
        if row
    )


def _value(cell: str, number: bool) -> Any:
    """Return a number or a text; None for what the tool puts in brackets because a GPU does not report it."""
    if cell.startswith("["):
        return None
    return float(cell) if number else cell
