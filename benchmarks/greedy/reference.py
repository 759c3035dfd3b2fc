"""Time greedy decoding of the reference models in PyTorch, and write the result as JSON.

Every preset and batch has a process of its own (idle thread pools would steal another's cores), processes take turns
(A B A B …), and the tokens are checked against one pass over the whole sequence before a time is recorded.
"""

import json
import sys
from itertools import product
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import length_options, out_option, round_options, write_result
from benchmarks.harness.rounds import module_result
from benchmarks.harness.rows import phase_summaries
from benchmarks.harness.timing import Phases, timed_greedy
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.weights import model_from_preset

OUT = RESULTS / "reference_greedy.json"


def check_tokens(engine: EagerEngine, source: np.ndarray, output: np.ndarray) -> None:
    """Raise unless the decoded tokens are the arg-max of the whole sequence in one pass."""
    inputs = np.concatenate([np.full((len(output), 1), engine.spec.bos_id), output[:, :-1]], 1)
    with torch.inference_mode():
        logits = engine.model(
            torch.from_numpy(source), torch.ones(source.shape, dtype=torch.bool), torch.from_numpy(inputs)
        )
    if not np.array_equal(logits.argmax(-1).numpy(), output):
        raise SystemExit("the decoded tokens differ from those of the whole sequence: nothing was timed")


def measure_here(preset: str, batch: int, threads: int, sizes: tuple[int, int], repetitions: int) -> list[Phases]:
    """Return the phases of each repetition in this process, after a warm-up whose output is checked."""
    torch.set_num_threads(threads)
    engine = EagerEngine(model_from_preset(preset))
    source = np.random.default_rng(0).integers(3, engine.spec.vocab_size, (batch, sizes[0]))
    mask = np.ones_like(source, bool)
    _, output = timed_greedy(engine, source, mask, sizes[1])
    check_tokens(engine, source, output)
    return [timed_greedy(engine, source, mask, sizes[1])[0] for _ in range(repetitions)]


@click.command()
@click.option("--preset", "presets", multiple=True, default=["transformer-base", "fat-base"], show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=[1, 8], show_default=True)
@click.option("--threads", default=2, show_default=True)
@length_options()
@round_options(rounds=4, repetitions=5, measured="preset and batch")
@out_option(OUT)
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
    fixed = ["--here", "--threads", threads, "--source", source, "--target", target, "--repetitions", repetitions]
    cases = list(product(presets, batches))
    phases: dict[tuple[str, int], list[Phases]] = {case: [] for case in cases}
    with click.progressbar(cases * rounds, file=sys.stderr, label="decoding") as turns:
        for preset, batch in turns:
            phases[preset, batch] += module_result(
                "benchmarks.greedy.reference", "--preset", preset, "--batch", batch, *fixed
            )
    results = [
        {"preset": preset, "batch": batch, "repetitions": len(repeated), "phases": phase_summaries(repeated)}
        for (preset, batch), repeated in phases.items()
    ]
    settings = {
        "engine": "PyTorch reference",
        "threads": threads,
        "source": source,
        "target": target,
        "tokens_checked": True,
    }
    write_result(out, {**settings, "results": results}, ("fatdeploy", "torch", "numpy"))


if __name__ == "__main__":
    main()
