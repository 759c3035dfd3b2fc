"""``fatdeploy export``: its options and what it prints. It imports torch and numpy only when the command runs."""

import json
from pathlib import Path
from typing import Unpack, get_args

import click

from fatdeploy.exporter import need_export_packages
from fatdeploy.runtimes.commands.build import BuildArguments, build_options, engine_lines
from fatdeploy.runtimes.commands.progress import show_stage
from fatdeploy.targets import (
    DEFAULT_TARGET,
    TARGETS,
    CpuClass,
    MetricName,
    Precision,
    Target,
    precision_help,
    target_help,
)


class ExportArguments(BuildArguments):
    """The options of an export that say what becomes of the model."""

    max_source: int | None
    max_target: int | None
    top_k: int | None
    attention_layer: int | None
    precision: str
    precision_of: tuple[str, ...]
    cpu: str
    calibration: Path | None
    probes: Path | None
    purpose: str
    rows: int | None
    shortlist_from: tuple[Path, ...]
    recover: bool
    min_agreement: float | None
    max_loss: float
    metric: str | None
    build: bool
    activations: str
    ranges: str
    tokenizer: str


@click.command(
    epilog="""\b
Examples:
  fatdeploy export ./opus-mt-zh-en --out zh-en
  fatdeploy export ./opus-mt-zh-en --out zh-en.int8 --precision int8 --calibration some.zh --probes others.zh
  fatdeploy export ./opus-mt-zh-en --out zh-en.bulk --precision int8 --for throughput \\
    --calibration some.zh --probes others.zh
  fatdeploy export ./opus-mt-zh-en --out zh-en --shortlist-from news.zh
  fatdeploy export g2p --out g2p.bundle
  fatdeploy export fat-small --out fat-small.bundle
  fatdeploy export my-checkpoint --out my-model --force
  fatdeploy export my_package.models:build --out my-model
  fatdeploy export transformer-base --out graphs --target onnx --max-source 128 --max-target 128
  fatdeploy export g2p --out g2p.half --target onnx --precision fp16
  fatdeploy export g2p --out g2p.cuda --target ort-cuda --precision fp16
  fatdeploy export g2p --out g2p.rtx --target tensorrt-rtx --precision fp16 --compute-capability 8.6,8.9,12.0
  fatdeploy export g2p --out g2p.trt --target tensorrt --precision fp16 --no-build
  fatdeploy export my-checkpoint --out aligned --attention 5
  fatdeploy export g2p --out g2p.int8 --precision int8
  fatdeploy export my-checkpoint --out small --precision int4 --precision-of output=int8 \\
    --calibration some.txt --probes pairs.tsv
"""
)
@click.argument("source")
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The bundle's folder.")
@click.option(
    "--target",
    default=DEFAULT_TARGET,
    show_default=True,
    type=click.Choice(list(TARGETS)),
    help=f"Where the bundle runs. {target_help()}",
)
@build_options
@click.option(
    "--build/--no-build",
    default=True,
    help="Build TensorRT engines now, or leave that to the device (fatdeploy build).",
)
@click.option("--max-source", type=click.IntRange(1), help="Longest source (default: the model's limit).")
@click.option("--max-target", type=click.IntRange(1), help="Longest target (default: the model's limit).")
@click.option("--top-k", type=click.IntRange(1), help="How many best tokens a step can return (default: 16).")
@click.option(
    "--attention",
    "attention_layer",
    type=click.IntRange(0),
    metavar="LAYER",
    help="Also return the cross-attention weights of this decoder layer (alignments).",
)
@click.option(
    "--precision",
    default="fp32",
    show_default=True,
    type=click.Choice(get_args(Precision)),
    help=f"Precision of the matrices, and the targets that take it: {precision_help()} Integers must pass the gate.",
)
@click.option(
    "--precision-of",
    multiple=True,
    metavar="NAME=PRECISION",
    help="Precision of single matrices, by name or pattern: output=int8, 'encoder.*=fp32'. May be repeated.",
)
@click.option(
    "--cpu",
    default="any",
    show_default=True,
    type=click.Choice(get_args(CpuClass)),
    help="Which CPUs the int8 weights are for; 'any' is right on all of them.",
)
@click.option(
    "--activations",
    default="int8",
    show_default=True,
    type=click.Choice(["int8", "float"]),
    help="Activations of int8 matrices in standard graphs: integers, or floats (only the weights are small).",
)
@click.option(
    "--ranges",
    default="percentile",
    show_default=True,
    type=click.Choice(["min-max", "percentile"]),
    help="Ranges of activations in standard graphs: everything that calibration saw, or 99.99 % of it.",
)
@click.option(
    "--tokenizer",
    default="keep",
    show_default=True,
    type=click.Choice(["keep", "convert"]),
    help="Keep sentencepiece models (exact), or convert them to tokenizer.json and count the differences on the texts "
    "of --calibration.",
)
@click.option("--calibration", type=click.Path(path_type=Path), help="File of sources for the ranges of activations.")
@click.option("--probes", type=click.Path(path_type=Path), help="File of sources or pairs that the gate compares.")
@click.option(
    "--for",
    "purpose",
    default="latency",
    show_default=True,
    type=click.Choice(["latency", "throughput"]),
    help="What int8 is to be fast at: one source at a time, or many at once.",
)
@click.option("--rows", type=click.IntRange(1), help="Rows of a step to be fast at (default: 1, or 32 for throughput).")
@click.option(
    "--shortlist-from",
    multiple=True,
    type=click.Path(path_type=Path),
    help="File of sources or pairs from which the bundle gets a shortlist (see: fatdeploy shortlist). May be repeated.",
)
@click.option("--recover", is_flag=True, hidden=True, help="No effect: what the gate needs is always kept.")
@click.option(
    "--min-agreement",
    type=click.FloatRange(0, 1),
    help="Least share of the reference's tokens that passes the gate (default: 0.99; 0.98 for throughput and int4). "
    "Where the probes have targets, --max-loss decides alone unless this is given.",
)
@click.option(
    "--max-loss",
    default=0.3,
    show_default=True,
    type=click.FloatRange(0),
    help="Most points of the metric that may be lost, where the probes have targets.",
)
@click.option(
    "--metric",
    type=click.Choice(get_args(MetricName)),
    help="Metric of the gate (default: bleu for subword tokens, otherwise token_error_rate).",
)
@click.option("--licence", help="Licence of the weights, for the manifest.")
@click.option("--force", is_flag=True, help="Replace an existing bundle.")
@click.option("--json", "as_json", is_flag=True, help="Print the certificate as JSON.")
def export(
    source: str,
    out: Path,
    target: Target,
    licence: str | None,
    force: bool,
    as_json: bool,
    **chosen: Unpack[ExportArguments],
) -> None:
    """Turn a model into a bundle and prove it right.

    SOURCE is a Hugging Face folder, a checkpoint's folder, g2p (the bundled model: English words to phonemes), a
    preset (see: fatdeploy presets), or package.module:factory for a model of your own. The graphs must give the
    reference's tokens on probes where the reference decides every step by ten times the noise of fp32; otherwise
    nothing is written. A Hugging Face folder brings its tokenizer and its generation settings along, and is compared
    with transformers where that is installed.

    With --precision int8 or int4 the matrices of those graphs become integers. The bundle is then compared with the
    reference on real sources. Below the bar nothing is written, and a table shows which matrices cost most.

    For fp16 and bf16 the certificate says how many tokens are the reference's; a trained model must reach 99.5 %.

    With --target tensorrt or tensorrt-rtx, engines are built from the graphs. TensorRT needs the GPU that will run
    them; TensorRT-RTX builds ahead of time for the compute capabilities you name.
    """
    need_export_packages()
    from fatdeploy.certificate import read_certificate
    from fatdeploy.export.api import export_model
    from fatdeploy.export.commands.export_options import choices_of, engines_of, precision_of

    bundle = export_model(
        source,
        out,
        target=target,
        precision=precision_of(chosen),
        choices=choices_of(chosen),
        licence=licence,
        convert_tokenizer=chosen["tokenizer"] == "convert",
        calibration=chosen["calibration"],
        probes=chosen["probes"],
        shortlist_from=chosen["shortlist_from"],
        engines=engines_of(target, chosen),
        force=force,
        progress=show_stage,
    )
    certificate = read_certificate(bundle)
    if as_json:
        click.echo(json.dumps({"bundle": str(out), "bytes": bundle.total_bytes, **certificate.as_dict()}))
        return
    click.echo(f"{out}: {bundle.total_bytes / 1e6:.1f} MB; {certificate.parity.line()}")
    if certificate.original is not None:
        click.echo(f"{out}: {certificate.original.line()}")
    if certificate.gate is not None:
        click.echo(f"{out}: {certificate.gate.line(bundle.manifest.precision)}")
    if bundle.manifest.shortlist is not None:
        click.echo(f"{out}: shortlist of {bundle.manifest.shortlist.line()}")
    for line in engine_lines(bundle):
        click.echo(f"{out}: {line}")
    if not chosen["build"]:
        click.echo(f"{out}: no engines yet; on the device: fatdeploy build {out}")
