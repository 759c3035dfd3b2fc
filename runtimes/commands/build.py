"""``fatdeploy build`` and the options of engines. It needs TensorRT and numpy, imported when it runs, and no torch."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack, get_args

import click

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.commands.progress import show_stage
from fatdeploy.targets import Flavour

if TYPE_CHECKING:
    from fatdeploy.bundle import Bundle
    from fatdeploy.runtimes.engines.trt.build.build import BuildRequest

OPTIONS = [
    click.option(
        "--compute-capability",
        "capabilities",
        metavar="N.N,…",
        help="GPUs that tensorrt-rtx builds for, such as 8.6,8.9,12.0; this machine's unless said.",
    ),
    click.option(
        "--profile",
        "profiles",
        multiple=True,
        metavar="AXIS=SIZES,…",
        help="Sizes to build for, as LEAST:USUAL:MOST: batch=1:4:8,source=1:32:128 (also rows, step). May be repeated.",
    ),
    click.option(
        "--timing-cache",
        type=click.Path(path_type=Path, dir_okay=False),
        help="A file of measured kernels that builds of tensorrt read and add to.",
    ),
]


class BuildArguments(TypedDict):
    """The options of engines."""

    capabilities: str | None
    profiles: tuple[str, ...]
    timing_cache: Path | None


def build_options(command: Any) -> Any:
    """Give a command the options of engines."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def asked_engines(flavour: Flavour, chosen: Mapping[str, Any]) -> "BuildRequest":
    """Return the build that options ask for."""
    from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
    from fatdeploy.runtimes.engines.trt.build.profiles import profiles_from_text

    said = chosen["capabilities"]
    return BuildRequest(
        flavour=flavour,
        capabilities=() if said is None else tuple(one.strip() for one in said.split(",")),
        profiles=profiles_from_text(chosen["profiles"]),
        timing_cache=chosen["timing_cache"],
    )


def refuse_engine_options(chosen: Mapping[str, Any], why: str) -> None:
    """Raise if options of engines were given where none are built."""
    given = {
        "--compute-capability": chosen["capabilities"] is not None,
        "--profile": bool(chosen["profiles"]),
        "--timing-cache": chosen["timing_cache"] is not None,
    }
    reasons = [f"{name} is for engines" for name, said in given.items() if said]
    if reasons:
        raise ConfigError(in_one_line(why, reasons))


def engine_lines(bundle: "Bundle") -> list[str]:
    """Say which engines a bundle has, a line each."""
    return [
        f"{one.file}: {bundle.manifest.files[one.file].size / 1e6:.1f} MB, {one.flavour} {one.version} for compute "
        f"capability {', '.join(one.compute_capabilities)}"
        for one in bundle.manifest.plans
    ]


@click.command(
    epilog="""\b
Examples:
  fatdeploy build my-model
  fatdeploy build my-model --flavour tensorrt-rtx --compute-capability 8.6,8.9,12.0
  fatdeploy build my-model --profile batch=1:1:2 --profile batch=2:8:16
  fatdeploy build my-model --flavour tensorrt --timing-cache kernels.cache --drop-onnx
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option(
    "--flavour",
    type=click.Choice(get_args(Flavour)),
    help="Which TensorRT; the one that the bundle was exported for unless said.",
)
@build_options
@click.option(
    "--keep-onnx/--drop-onnx",
    default=True,
    show_default=True,
    help="Keep the graphs beside the engines, or engines alone: smaller, and never to be built again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def build(
    bundle: Path, flavour: Flavour | None, keep_onnx: bool, as_json: bool, **chosen: Unpack[BuildArguments]
) -> None:
    """Build TensorRT engines from the graphs of a bundle.

    BUNDLE was exported with --target tensorrt, tensorrt-rtx or onnx. TensorRT builds for the GPU that is here, for an
    engine runs on the kind of GPU and the version that built it; TensorRT-RTX builds without a GPU, too, for the
    compute capabilities that are named. The engines become part of the bundle; if a build fails, it stays as it was.
    """
    from fatdeploy.records import json_from_record
    from fatdeploy.runtimes.engines.trt.build.build import build_engines, chosen_flavour

    asked = asked_engines(chosen_flavour(bundle, flavour), chosen)
    built = build_engines(bundle, asked, stage=show_stage, keep_onnx=keep_onnx)
    if as_json:
        plans = [
            {**json_from_record(one), "bytes": built.manifest.files[one.file].size} for one in built.manifest.plans
        ]
        click.echo(json.dumps({"bundle": str(bundle), "bytes": built.total_bytes, "plans": plans}))
        return
    for line in engine_lines(built):
        click.echo(line)
