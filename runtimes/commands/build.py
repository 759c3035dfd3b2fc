"""``fatdeploy build`` and the options of engines. It imports TensorRT and numpy when it runs, and never torch."""

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
        help="GPUs that tensorrt-rtx builds for, such as 8.6,8.9,12.0 (default: this machine's).",
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
        help="File of measured kernels, which tensorrt builds read and extend.",
    ),
]


class BuildArguments(TypedDict):
    """The options of engines."""

    capabilities: str | None
    profiles: tuple[str, ...]
    timing_cache: Path | None


def build_options(command: Any) -> Any:
    """Add the options of engines to a command."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def build_request(flavour: Flavour, chosen: Mapping[str, Any]) -> "BuildRequest":
    """Return the build that the options describe."""
    from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
    from fatdeploy.runtimes.engines.trt.build.profiles import profiles_from_text

    capabilities = chosen["capabilities"]
    return BuildRequest(
        flavour=flavour,
        capabilities=() if capabilities is None else tuple(name.strip() for name in capabilities.split(",")),
        profiles=profiles_from_text(chosen["profiles"]),
        timing_cache=chosen["timing_cache"],
    )


def refuse_engine_options(chosen: Mapping[str, Any], why: str) -> None:
    """Raise if options of engines are set where none are built."""
    options = {
        "--compute-capability": chosen["capabilities"] is not None,
        "--profile": bool(chosen["profiles"]),
        "--timing-cache": chosen["timing_cache"] is not None,
    }
    reasons = [f"{name} is for engines" for name, is_set in options.items() if is_set]
    if reasons:
        raise ConfigError(in_one_line(why, reasons))


def engine_lines(bundle: "Bundle") -> list[str]:
    """Return one line per engine of a bundle."""
    return [
        f"{record.file}: {bundle.manifest.files[record.file].size / 1e6:.1f} MB, {record.flavour} {record.version} "
        f"for compute capability {', '.join(record.compute_capabilities)}"
        for record in bundle.manifest.plans
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
    help="Which TensorRT to build with (default: the one that the bundle was exported for).",
)
@build_options
@click.option(
    "--keep-onnx/--drop-onnx",
    default=True,
    show_default=True,
    help="Keep the graphs beside the engines, or drop them: smaller, but engines cannot be built again.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was built as JSON.")
def build(
    bundle: Path, flavour: Flavour | None, keep_onnx: bool, as_json: bool, **chosen: Unpack[BuildArguments]
) -> None:
    """Build TensorRT engines from the graphs of a bundle.

    BUNDLE was exported with --target tensorrt, tensorrt-rtx or onnx. TensorRT builds for the GPU of this machine,
    because an engine runs only on the kind of GPU and the version that built it. TensorRT-RTX also builds without a
    GPU, for the compute capabilities that you name. The engines become part of the bundle; if a build fails, the
    bundle stays as it was.
    """
    from fatdeploy.records import json_from_record
    from fatdeploy.runtimes.engines.trt.build.build import build_engines, chosen_flavour

    request = build_request(chosen_flavour(bundle, flavour), chosen)
    built = build_engines(bundle, request, stage=show_stage, keep_onnx=keep_onnx)
    if as_json:
        plans = [
            {**json_from_record(record), "bytes": built.manifest.files[record.file].size}
            for record in built.manifest.plans
        ]
        click.echo(json.dumps({"bundle": str(bundle), "bytes": built.total_bytes, "plans": plans}))
        return
    for line in engine_lines(built):
        click.echo(line)
