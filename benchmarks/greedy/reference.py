"""Time greedy decoding of the reference models in PyTorch, and write the result as JSON.

Every engine runs in a process of its own (idle thread pools of another one would steal the cores), processes take turns
(A B A B …), and the tokens are checked against one pass over the whole sequence before a time is recorded.
"""

import json
import sys
from itertools import product
from pathlib import Path

import click
import numpy as np
import torch

from benchmarks.harness.measuring import RESULTS, Phases, provenance, result_apart, summary, timed_decode
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.weights import model_from_preset

OUT = RESULTS / "reference_greedy.json"


def check_tokens(engine: EagerEngine, source: np.ndarray, output: np.ndarray) -> None:
    """Raise unless the decoded tokens are the arg-max of the whole sequence in one pass."""
    read = np.concatenate([np.full((len(output), 1), engine.spec.bos_id), output[:, :-1]], 1)
    with torch.inference_mode():
        logits = engine.model(
            torch.from_numpy(source), torch.ones(source.shape, dtype=torch.bool), torch.from_numpy(read)
        )
    if not np.array_equal(logits.argmax(-1).numpy(), output):
        raise SystemExit("the decoded tokens are not those of the whole sequence: nothing was timed")


def measure_here(preset: str, batch: int, threads: int, sizes: tuple[int, int], repetitions: int) -> list[Phases]:
    """Return the phases of each repetition in this process, after a warm-up whose output is checked."""
    torch.set_num_threads(threads)
    engine = EagerEngine(model_from_preset(preset))
    source = np.random.default_rng(0).integers(3, engine.spec.vocab_size, (batch, sizes[0]))
    mask = np.ones_like(source, bool)
    _, output = timed_decode(engine, source, mask, sizes[1])
    check_tokens(engine, source, output)
    return [timed_decode(engine, source, mask, sizes[1])[0] for _ in range(repetitions)]


@click.command()
@click.option("--preset", "presets", multiple=True, default=["transformer-base", "fat-base"], show_default=True)
@click.option("--batch", "batches", multiple=True, type=int, default=[1, 8], show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--source", default=32, show_default=True, help="Source length.")
@click.option("--target", type=click.IntRange(2), default=64, show_default=True, help="Decoder steps.")
@click.option("--rounds", default=4, show_default=True, help="How often each engine takes its turn.")
@click.option("--repetitions", default=5, show_default=True, help="Decodes in a turn.")
@click.option("--out", default=OUT, type=click.Path(path_type=Path), show_default="benchmarks/results/…")
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
            phases[preset, batch] += result_apart(
                "benchmarks.greedy.reference", "--preset", preset, "--batch", batch, *fixed
            )
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
