"""Options that several commands share: how a bundle runs, and how sources are batched."""

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, cast, get_args

import click

from fatdeploy.targets import Provider

Command = TypeVar("Command", bound=Callable[..., Any])

spinning_option = click.option(
    "--spinning/--no-spinning",
    default=True,
    show_default=True,
    help="Keep cores busy while threads wait: faster alone, slower next to other programs.",
)
truncate_option = click.option(
    "--truncate", is_flag=True, help="Cut sources that are too long instead of refusing them."
)
split_option = click.option(
    "--split",
    type=click.Choice(["sentences"]),
    help="Cut each text into sentences, decode them on their own and join the results; lines stay as they are.",
)
batch_tokens_option = click.option(
    "--batch-tokens",
    default=None,
    type=click.IntRange(1),
    help="Most positions to decode together: targets times the lengths of source and target (default: 8192, or four "
    "times as many for hundreds of sources). Changes no result.",
)


def language_options(command: Command) -> Command:
    """Add the options that name languages."""
    for side in ("target", "source"):
        command = click.option(
            f"--{side}-language",
            metavar="CODE",
            help=f"Language of the {side}s, for a model with languages (fatdeploy inspect lists them).",
        )(command)
    return command


class EngineArguments(TypedDict):
    """The values of the options below: the keywords of the engine."""

    threads: int | None
    spinning: bool
    providers: tuple[Provider, ...]
    cuda_graphs: bool


def engine_options(command: Command) -> Command:
    """Add the options that say how a bundle runs."""
    options = (
        click.option(
            "--threads", type=click.IntRange(1), help="Number of onnxruntime threads (default: one per core)."
        ),
        spinning_option,
        click.option(
            "--provider",
            "providers",
            multiple=True,
            type=click.Choice(get_args(Provider)),
            help="Where onnxruntime runs (default: what the bundle was exported for). It never falls back silently.",
        ),
        click.option(
            "--cuda-graphs/--no-cuda-graphs",
            default=True,
            show_default=True,
            help="Record the steps of a TensorRT bundle and replay them; for TensorRT only.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def popped_engine_arguments(arguments: Any) -> EngineArguments:
    """Return the engine's keywords, removed from all arguments of a command."""
    return cast("EngineArguments", {name: arguments.pop(name) for name in EngineArguments.__annotations__})
