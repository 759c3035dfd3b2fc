"""Compare quantized bundles on this CPU with an emulated one that has AVX2 and no VNNI, token by token.

Needs qemu-x86_64 (``apt-get install qemu-user``), about 30 times slower than the machine. A bundle for ``--cpu any``
must reach its bar on both; one with 8-bit weights must be refused by the emulated CPU. ``verify --record`` cannot be
used there: Linux's description of the CPU stays the machine's own.
"""

import json
import shutil
import subprocess
import sys
from typing import Any

import click

from benchmarks.harness.provenance import ROOT
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import read_certificate

EMULATOR = "qemu-x86_64"
CPU = "Haswell"
MODULE = "benchmarks.emulated.answers"
EXACT_EVERYWHERE = ("any", "x86-avx2")  # classes whose weights no CPU overflows


def answers_under(prefix: list[str], bundle: str, rows: int) -> dict[str, Any]:
    """Return what a bundle answers in a process that an emulator runs, or that runs directly."""
    # One thread: an emulated one is slow enough without others that spin.
    command = [*prefix, sys.executable, "-m", MODULE, bundle, str(rows)]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    if run.returncode:
        lines = run.stderr.strip().splitlines() or ["no message"]
        raise SystemExit(f"{' '.join([*prefix, MODULE])} failed with exit code {run.returncode}: {lines[-1]}")
    return dict(json.loads(run.stdout))


def equal_share(ours: list[list[int]], expected: list[list[int]]) -> float:
    """Return the share of equal tokens of sequences of the same lengths."""
    pairs = [pair for rows in zip(ours, expected, strict=True) for pair in zip(*rows, strict=True)]
    return sum(first == second for first, second in pairs) / len(pairs)


def judgement(bundle: Bundle, here: dict[str, Any], emulated: dict[str, Any]) -> tuple[bool, str]:
    """Return whether a bundle does on the emulated CPU what it promises, and that in words."""
    quantization = bundle.manifest.quantization
    if quantization is None:
        raise SystemExit(f"{bundle.path.name} is in {bundle.manifest.precision}; expected a quantized bundle")
    refusal = emulated.get("refusal")
    if quantization.cpu not in EXACT_EVERYWHERE:
        return refusal is not None, f"for {quantization.cpu}: " + (
            "refused, as it must be" if refusal else "NOT refused"
        )
    if refusal is not None:
        return False, f"refused although it is for --cpu {quantization.cpu}: {refusal}"
    gate = read_certificate(bundle).gate
    bar = gate.bar if gate is not None and gate.enforced else 0.0
    shares = [equal_share(found["choices"], here["expected"]) for found in (here, emulated)]
    same = equal_share(emulated["choices"], here["choices"])
    targets = sum(ours == theirs for ours, theirs in zip(emulated["targets"], here["targets"], strict=True))
    words = (
        f"{shares[0]:.2%} of the reference's tokens here, {shares[1]:.2%} emulated (bar {bar:.2%}); {same:.2%} of the "
        f"choices and {targets} of {len(here['targets'])} targets are the same on both"
    )
    return min(shares) >= bar, words


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, resolve_path=True))
@click.option("--cpu", default=CPU, show_default=True, help=f"A CPU that {EMULATOR} -cpu help lists.")
@click.option("--rows", type=click.IntRange(1), default=500, show_default=True, help="Probes of the gate to decode.")
def main(bundles: tuple[str, ...], cpu: str, rows: int) -> None:
    """Decode the probes of BUNDLES here and on an emulated CPU; exit code 1 if a promise is broken."""
    if shutil.which(EMULATOR) is None:
        raise SystemExit(f"{EMULATOR} is not available here: apt-get install qemu-user")
    kept = True
    for path in bundles:
        bundle = read_bundle(path)
        here = answers_under([], path, rows)
        fine, words = judgement(bundle, here, answers_under([EMULATOR, "-cpu", cpu], path, rows))
        kept = kept and fine
        click.echo(f"{bundle.path.name}: {'' if fine else 'FAILED: '}{words}")
    sys.exit(0 if kept else 1)


if __name__ == "__main__":
    main()
