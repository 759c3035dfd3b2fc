"""Time greedy decoding of the reference models in PyTorch, and write the result as JSON.

Every engine runs in a process of its own (idle thread pools of another one would steal the cores), processes take turns
(A B A B …), and the tokens are checked against one pass over the whole sequence before a time is recorded.
"""

import json
import subprocess
import sys
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from fatdeploy.export.eager import EagerEngine
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.machine import this_machine
from fatdeploy.runtimes.engine import Capacity, Want

RESULTS = Path(__file__).parent / "results" / "reference_greedy.json"


def timed_decode(engine: EagerEngine, source: np.ndarray, target: int) -> tuple[dict[str, float], np.ndarray]:
    """Return seconds of each phase and the tokens; EOS does not end a row, so that every run does the same work."""
    started = time.perf_counter()
    state = engine.encode(source, np.ones_like(source, bool), Capacity(1, target))
    encoded = time.perf_counter()
    tokens = np.full((len(source), 1), engine.spec.bos_id)
    output, first = [tokens], 0.0
    for position in range(target):
        tokens = engine.step(tokens, state, Want.LOGITS).logits.argmax(-1)
        output.append(tokens)
        if position == 0:
            first = time.perf_counter()
    ended = time.perf_counter()
    phases = {
        "encode": encoded - started,
        "first_token": first - encoded,
        "per_token": (ended - first) / (target - 1),
        "end_to_end": ended - started,
    }
    return phases, np.concatenate(output, 1)


def check_tokens(engine: EagerEngine, source: np.ndarray, output: np.ndarray) -> None:
    """Raise unless the decoded tokens are the arg-max of the whole sequence in one pass."""
    with torch.inference_mode():
        logits = engine.model(
            torch.from_numpy(source), torch.ones(source.shape, dtype=torch.bool), torch.from_numpy(output[:, :-1])
        )
    if not np.array_equal(logits.argmax(-1).numpy(), output[:, 1:]):
        raise SystemExit("the decoded tokens are not those of the whole sequence: nothing was timed")


def measure_here(
    preset: str, batch: int, threads: int, sizes: tuple[int, int], repetitions: int
) -> list[dict[str, float]]:
    """Return the phases of each repetition in this process, after a warm-up whose output is checked."""
    torch.set_num_threads(threads)
    engine = EagerEngine(model_from_preset(preset))
    source = np.random.default_rng(0).integers(3, engine.spec.vocab_size, (batch, sizes[0]))
    _, output = timed_decode(engine, source, sizes[1])
    check_tokens(engine, source, output)
    return [timed_decode(engine, source, sizes[1])[0] for _ in range(repetitions)]


def measure_apart(arguments: list[str]) -> list[dict[str, float]]:
    """Return what ``measure_here`` returns in a process of its own."""
    run = subprocess.run(
        [sys.executable, __file__, "--here", *arguments], stdout=subprocess.PIPE, text=True, check=True
    )
    phases: list[dict[str, float]] = json.loads(run.stdout)
    return phases


def summary(phases: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return minimum, median and 95th percentile of each phase in milliseconds."""
    columns = {name: np.array([phase[name] for phase in phases]) * 1e3 for name in phases[0]}
    return {
        name: {"min_ms": float(ms.min()), "p50_ms": float(np.median(ms)), "p95_ms": float(np.percentile(ms, 95))}
        for name, ms in columns.items()
    }


def provenance() -> dict[str, Any]:
    """Return where and with what a result was made."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True, cwd=RESULTS.parent
    )
    return {
        "machine": this_machine().as_dict(),
        "versions": {name: version(name) for name in ("fatdeploy", "torch", "numpy")},
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).date().isoformat(),
    }


@click.command()
@click.option("--preset", "presets", multiple=True, default=["transformer-base", "fat-base"], show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=[1, 8], show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--source", default=32, show_default=True, help="Source length.")
@click.option("--target", default=64, show_default=True, help="Decoder steps.")
@click.option("--rounds", default=4, show_default=True, help="How often each engine takes its turn.")
@click.option("--repetitions", default=5, show_default=True, help="Decodes in a turn.")
@click.option("--out", default=RESULTS, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
@click.option("--here", is_flag=True, hidden=True)
def main(  # the options are the benchmark's axes
    presets: list[str],
    batches: list[int],
    threads: int,
    source: int,
    target: int,
    rounds: int,
    repetitions: int,
    out: Path,
    here: bool,
) -> None:
    """Time greedy decoding of the reference models; writes JSON."""
    if here:
        click.echo(json.dumps(measure_here(presets[0], batches[0], threads, (source, target), repetitions)))
        return
    fixed = ["--threads", threads, "--source", source, "--target", target, "--repetitions", repetitions]
    cases = list(product(presets, batches))
    phases: dict[tuple[str, int], list[dict[str, float]]] = {case: [] for case in cases}
    with click.progressbar(cases * rounds, file=sys.stderr, label="decoding") as turns:
        for preset, batch in turns:
            arguments = map(str, ["--preset", preset, "--batch", batch, *fixed])
            phases[preset, batch] += measure_apart(list(arguments))
    results = [
        {"preset": preset, "batch": batch, "repetitions": len(found), "phases": summary(found)}
        for (preset, batch), found in phases.items()
    ]
    settings = {
        "engine": "PyTorch reference",
        "threads": threads,
        "source": source,
        "target": target,
        "tokens_checked": True,
    }
    out.write_text(json.dumps({**provenance(), **settings, "results": results}, indent=2) + "\n")
    click.echo(f"wrote {out}")


if __name__ == "__main__":
    main()
