"""``fatdeploy verify``: whether a bundle keeps its certificate's promise on this machine."""

import json
from functools import partial
from pathlib import Path
from typing import Unpack

import click

from fatdeploy.runtimes.commands.engine_options import EngineArguments, engine_options
from fatdeploy.runtimes.commands.progress import progress_bar


@click.command(
    epilog="""\b
Examples:
  fatdeploy verify my-model
  fatdeploy verify my-model --threads 1 --json
  fatdeploy verify my-model --against my-checkpoint --n 200 --seed 7
  fatdeploy verify zh-en --against ./opus-mt-zh-en
  fatdeploy verify my-model.bf16 --emulated
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.option(
    "--against",
    metavar="SOURCE",
    help="Also compare with the live model (the SOURCE of the export) on fresh random sources; needs torch.",
)
@click.option("--n", "count", default=32, show_default=True, type=click.IntRange(1), help="Sources for --against.")
@click.option("--seed", default=1, show_default=True, type=click.IntRange(0), help="Random seed for --against.")
@click.option("--record", is_flag=True, help="Add this kind of CPU to the certificate of a quantized bundle.")
@click.option(
    "--emulated",
    is_flag=True,
    help="Run fp16 or bf16 in float32 with every result rounded, where no kernels exist; needs fatdeploy[export].",
)
@engine_options
def verify(
    bundle: Path,
    as_json: bool,
    against: str | None,
    count: int,
    seed: int,
    record: bool,
    emulated: bool,
    **engine: Unpack[EngineArguments],
) -> None:
    """Check on this machine that a bundle gives the reference's tokens.

    Runs the probes that came with the bundle: every batch, each of its rows alone, one batch twice. It needs no torch.
    The exit code is 1 if anything differs.

    fp32 must give the reference's tokens. fp16 and bf16 must give as many as when they were exported, or as their bar
    asks for. int8 and int4 run the sources that passed their gate: their share of the reference's tokens must reach the
    bar on this CPU as well. In every precision a row of a batch must get what it gets alone.

    With --against, a token that the reference itself decides by no more than the noise of fp32 is a tie, counted apart.
    A Hugging Face folder is also compared with transformers itself, its logits and its generate, where it is installed.
    """
    import fatdeploy
    from fatdeploy.runtimes.proof.verify import LiveModel

    verification = fatdeploy.verify(
        bundle,
        against=None if against is None else LiveModel(source=against, count=count, seed=seed),
        record=record,
        emulated=emulated,
        progress=partial(progress_bar, label="comparing"),
        **engine,
    )
    if as_json:
        click.echo(json.dumps(verification.as_dict()))
        return
    click.echo(f"{bundle}: {verification.line()}")
    if verification.against is not None:
        click.echo(f"{bundle} against {against}: {verification.against.line()}")
    if verification.original is not None:
        click.echo(f"{bundle} against the original: {verification.original.line()}")
