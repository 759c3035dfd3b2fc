"""``fatdeploy inspect``: what a bundle holds, for people or as JSON."""

import json
from pathlib import Path

import click


@click.command(
    epilog="""\b
Examples:
  fatdeploy inspect my-model
  fatdeploy inspect my-model --json | jq .weights
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def inspect(bundle: Path, as_json: bool) -> None:
    """Show what a bundle holds: contract, graphs, weights, origin, proof.

    Every file is checked against its hash first; no graph is opened.
    """
    import fatdeploy

    inspection = fatdeploy.inspect(bundle)
    click.echo(json.dumps(inspection.as_dict(), indent=2) if as_json else "\n".join(inspection.lines()))
