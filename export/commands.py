"""Commands that need torch, and how their results are shown. torch is imported when a command runs, never before."""

import importlib.util
import json

import click

from fatdeploy.errors import BackendUnavailable
from fatdeploy.tables import aligned


def need_export_packages() -> None:
    """Raise, with what to type, unless the packages of ``fatdeploy[export]`` are here."""
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendUnavailable(f"needs {' and '.join(missing)}, not installed here: pip install 'fatdeploy[export]'")


@click.command(
    epilog="""\b
Examples:
  fatdeploy presets
  fatdeploy presets --json
"""
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON list with every value of each configuration.")
def presets(as_json: bool) -> None:
    """List the models that come with fatdeploy.

    Every preset in every size, with its parameter count. A name such as fat-small stands for that model with seeded
    random weights.
    """
    need_export_packages()
    from fatdeploy.export.reference.summary import Summary, summaries

    found = summaries()
    if as_json:
        click.echo(json.dumps([summary.as_dict() for summary in found], indent=2))
        return
    for line in aligned([Summary.HEADINGS, *(summary.row() for summary in found)]):
        click.echo(line)


@click.command(
    epilog="""\b
Examples:
  fatdeploy demo
  fatdeploy demo --preset transformer-small --sources 8 --json
"""
)
@click.option("--preset", default="fat-small", show_default=True, help="Which model; see: fatdeploy presets")
@click.option("--sources", default=4, show_default=True, type=click.IntRange(1, 256), help="How many random sources.")
@click.option("--max-new-tokens", default=24, show_default=True, type=click.IntRange(1), help="Most tokens a target.")
@click.option("--seed", default=0, show_default=True, type=click.IntRange(0, 2**31 - 1), help="Of weights and sources.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(preset: str, sources: int, max_new_tokens: int, seed: int, as_json: bool) -> None:
    """Decode a few sources and show output and speed.

    A reference model decodes random sources. Its weights are random too, so the tokens mean nothing; they are what an
    exported model must reproduce exactly.
    """
    need_export_packages()
    from fatdeploy.export.demo import demonstrated
    from fatdeploy.runtimes.decode import DecodeOptions

    shown = demonstrated(preset, sources, DecodeOptions(max_new_tokens=max_new_tokens), seed)
    if as_json:
        click.echo(json.dumps(shown.as_dict()))
        return
    for source, output in zip(shown.sources, shown.outputs, strict=True):
        click.echo(f"source  {' '.join(map(str, source))}")
        click.echo(f"output  {' '.join(map(str, output.tokens))}  [{output.finish}]\n")
    click.echo(
        f"{preset} (PyTorch reference, random weights): {shown.steps} steps of {sources} rows in "
        f"{shown.seconds * 1e3:.0f} ms, {shown.steps_per_second:.0f} steps/s"
    )
