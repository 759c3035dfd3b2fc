"""Options that commands share: how a bundle is run."""

from collections.abc import Callable
from typing import Any, TypedDict, TypeVar, get_args

import click

from fatdeploy.targets import Provider

Command = TypeVar("Command", bound=Callable[..., Any])


class EngineArguments(TypedDict):
    """What the options below become: the keywords of the engine."""

    threads: int | None
    spinning: bool
    providers: tuple[Provider, ...]
    cuda_graphs: bool


def engine_options(command: Command) -> Command:
    """Add the options that say how a bundle is run."""
    options = (
        click.option(
            "--threads", type=click.IntRange(1), help="Threads of onnxruntime; as many as there are cores unless said."
        ),
        click.option(
            "--spinning/--no-spinning",
            default=True,
            show_default=True,
            help="Threads that wait keep their cores busy: quicker alone, slower beside other programs.",
        ),
        click.option(
            "--provider",
            "providers",
            multiple=True,
            type=click.Choice(get_args(Provider)),
            help="Where onnxruntime runs, what the bundle was exported for unless said; what is not here is an error.",
        ),
        click.option(
            "--cuda-graphs/--no-cuda-graphs",
            default=True,
            show_default=True,
            help="Record the steps of a TensorRT bundle and replay them; only for those.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
