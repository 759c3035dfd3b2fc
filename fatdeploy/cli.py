"""The command line's frame: which commands there are, where each lives, logging, and how errors are shown."""

import errno
import importlib
import logging
import os
import signal
import sys
from contextlib import suppress
from threading import current_thread, main_thread
from typing import Any, NoReturn

import click

from fatdeploy._version import VERSION
from fatdeploy.errors import FatdeployError

# Name of a command -> the module that holds it. Modules are imported when a command is named (or listed), and import
# torch or onnxruntime only inside a command: the help of a device that has neither is complete and quick.
COMMANDS = {
    "bench": "fatdeploy.runtimes.commands.bench",
    "build": "fatdeploy.runtimes.commands.build",
    "demo": "fatdeploy.export.commands.demo",
    "doctor": "fatdeploy.runtimes.commands.doctor",
    "eval": "fatdeploy.runtimes.commands.eval",
    "export": "fatdeploy.export.commands.export",
    "inspect": "fatdeploy.runtimes.commands.inspect",
    "presets": "fatdeploy.export.commands.presets",
    "run": "fatdeploy.runtimes.commands.run",
    "shortlist": "fatdeploy.runtimes.commands.shortlist",
    "train": "fatdeploy.export.commands.train",
    "verify": "fatdeploy.runtimes.commands.verify",
}

log = logging.getLogger("fatdeploy")


def imported(module: str, name: str) -> Any:
    """Return what a module holds under a name; the module is imported now."""
    return getattr(importlib.import_module(module), name)


class LazyGroup(click.Group):
    """A group that finds its commands by name, and turns our errors into one line (and their table) and exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        command = imported(COMMANDS[cmd_name], cmd_name)
        if not isinstance(command, click.Command):
            raise TypeError(f"{COMMANDS[cmd_name]}.{cmd_name} is not a command")
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # a full disk is an error now, not when Python ends
        except BrokenPipeError:
            # Whoever read the output has seen enough, as `head` has.
            _drop_output()
            ctx.exit(0)
        except FatdeployError as error:
            log.debug("traceback of the error below", exc_info=True)
            click.echo(f"Error: {' '.join(str(error).split())}", err=True)
            for line in error.table:
                click.echo(line, err=True)
            ctx.exit(1)
        except OSError as error:
            log.debug("traceback of the error below", exc_info=True)
            _drop_output()
            place = "" if error.filename is None else f"{error.filename}: "
            advice = "; free some space and run the same again" if error.errno == errno.ENOSPC else ""
            click.echo(f"Error: {place}{error.strerror or error}{advice}", err=True)
            ctx.exit(1)
        return result

    def main(self, *args: Any, **kwargs: Any) -> Any:
        # The default would end the process at once, and leave behind what it was writing.
        if current_thread() is not main_thread() or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return super().main(*args, **kwargs)
        signal.signal(signal.SIGTERM, _end)
        try:
            return super().main(*args, **kwargs)
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, _: object) -> NoReturn:
    """Leave through every ``finally``, with the exit code of a process that a signal ended."""
    raise SystemExit(128 + number)


def _drop_output() -> None:
    """Write what is still to be written nowhere: Python would fail again when it ends."""
    with suppress(OSError, ValueError):  # standard output that is no file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def set_up_logging(level: int) -> None:
    """Send the ``fatdeploy`` logger to stderr from ``level`` up."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(level)


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with:  fatdeploy doctor   then   fatdeploy demo",
)
@click.version_option(VERSION, prog_name="fatdeploy")
@click.option("-v", "--verbose", count=True, help="Say more (-vv: everything).")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing but errors.")
def main(verbose: int, quiet: bool) -> None:
    """Turn PyTorch encoder-decoder transformers into something that runs on a device, and prove that it is right.

    Results go to standard output, progress and messages to standard error.
    """
    if verbose and quiet:
        raise click.UsageError("--verbose and --quiet exclude each other")
    levels = [logging.WARNING, logging.INFO, logging.DEBUG]
    set_up_logging(logging.ERROR if quiet else levels[min(verbose, 2)])
