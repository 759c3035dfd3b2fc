"""Bundles of the real model: exported by the command line with a clock, kept until the code or the weights change."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.provenance import ROOT, code_digest
from benchmarks.real.folders.packages import sha256_of
from benchmarks.real.sources import EVERY, MODEL, REAL, all_sentences, evenly
from fatdeploy.targets import CpuClass

CALIBRATION, PROBES = 100, 200  # sentences
# What a result keeps of a certificate; the rest names folders of the machine.
PROVED = ("parity", "gate", "original")
# Sentences that the comparison with the originals does not use: it takes every fourth, from the first.
OFFSETS = {"calibration": 1, "probes": 2}


@dataclass(frozen=True)
class Recipe:
    """How the real model is exported; what is None stays the command's default."""

    precision: str
    purpose: Literal["latency", "throughput"] | None = None
    bar: float | None = None  # the share of tokens that the gate asks for, and that the plan must reach
    cpu: CpuClass | None = None

    @property
    def name(self) -> str:
        """Return a name for folders."""
        bar = None if self.bar is None else f"{self.bar:g}"
        return ".".join(str(part) for part in (self.precision, self.purpose, bar, self.cpu) if part is not None)

    def arguments(self) -> list[str]:
        """Return the options of the command line."""
        options = {"--precision": self.precision, "--for": self.purpose, "--min-agreement": self.bar, "--cpu": self.cpu}
        return [word for name, value in options.items() if value is not None for word in (name, str(value))]


FP32 = Recipe("fp32")


def kept_bundle(recipe: Recipe, real: Path = REAL) -> Path:
    """Return the bundle of the real model, which is exported unless this code has exported these weights."""
    made_of = f"{sha256_of(real / MODEL / 'model.safetensors')[:12]}-{code_digest('fatdeploy', 'export')}"
    folder = real / "bundles" / f"{MODEL}-{made_of}.{recipe.name}.bundle"
    if not folder.exists():
        for old in folder.parent.glob(f"{MODEL}-{'?' * len(made_of)}.{recipe.name}.bundle"):
            shutil.rmtree(old)
        export_real(recipe, folder, real)
    return folder.resolve()


def export_real(recipe: Recipe, out: Path, real: Path = REAL) -> dict[str, Any]:
    """Export the real model and return the seconds, from the start of the command to its end, and what was proved.

    Integers are calibrated on some sentences and compared on others.
    """
    command = [sys.executable, "-m", "fatdeploy", "export", real / MODEL, *recipe.arguments(), "--out", out]
    if recipe.precision != FP32.precision:
        files = write_samples(real)
        command += ["--calibration", files["calibration"], "--probes", files["probes"]]
    started = time.perf_counter()
    run = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    seconds = time.perf_counter() - started
    if run.returncode:
        raise SystemExit(f"the export of {recipe.name} failed with exit code {run.returncode}")
    certificate = json.loads(run.stdout)
    return {"precision": recipe.precision, "seconds": seconds, **{name: certificate.get(name) for name in PROVED}}


def write_samples(real: Path) -> dict[str, Path]:
    """Write the sentences for calibration and those for the gate, each evenly from the whole text."""
    lines = all_sentences(real)
    counts = {"calibration": CALIBRATION, "probes": PROBES}
    files = {name: real / f"{name}.txt" for name in counts}
    for name, count in counts.items():
        others = lines[OFFSETS[name] :: EVERY]
        chosen = [others[row] for row in evenly(len(others), count)]
        files[name].write_text("".join(f"{line}\n" for line in chosen), encoding="utf-8")
    return files
