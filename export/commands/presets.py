"""``fatdeploy presets``: the models that come with the package."""

import json

import click

from fatdeploy.exporter import need_export_packages
from fatdeploy.tables import aligned


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

    models = summaries()
    if as_json:
        click.echo(json.dumps([summary.as_dict() for summary in models], indent=2))
        return
    for line in aligned([Summary.HEADINGS, *(summary.row() for summary in models)]):
        click.echo(line)
