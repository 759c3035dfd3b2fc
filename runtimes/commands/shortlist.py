"""``fatdeploy shortlist``: builds a bundle's shortlist from texts. It needs no torch."""

import json
from pathlib import Path
from typing import Unpack

import click

from fatdeploy.runtimes.commands.engine_options import EngineArguments, engine_options, truncate_option
from fatdeploy.runtimes.commands.progress import progress_bar


@click.command(
    epilog="""\b
Examples:
  fatdeploy shortlist zh-en news.zh
  fatdeploy shortlist zh-en news.zh talks.zh --per-token 100 --frequent 4000
  fatdeploy shortlist zh-en pairs.tsv --force
  fatdeploy shortlist my-model ids.txt --ids --json
then
  fatdeploy run zh-en --shortlist auto < more.zh
"""
)
@click.argument("bundle", type=click.Path(path_type=Path))
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--per-token",
    default=50,
    show_default=True,
    type=click.IntRange(1),
    help="Most target tokens of each source token.",
)
@click.option(
    "--frequent",
    default=8000,
    show_default=True,
    type=click.IntRange(0),
    help="Most target tokens that every source may have.",
)
@click.option("--ids", "as_ids", is_flag=True, help="Read lines as token ids separated by blanks, targets without EOS.")
@truncate_option
@click.option("--force", is_flag=True, help="Replace the shortlist that the bundle has.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@engine_options
def shortlist(
    bundle: Path,
    files: tuple[Path, ...],
    per_token: int,
    frequent: int,
    as_ids: bool,
    truncate: bool,
    force: bool,
    as_json: bool,
    **engine: Unpack[EngineArguments],
) -> None:
    """Build a bundle's shortlist: the target tokens that each source may need.

    FILE has one source per line, or a source, a TAB and its target. A few thousand lines of the texts that the model is
    for are best. The model decodes the sources itself; source tokens are aligned with what it would choose by its
    attention (bundles exported with --attention), otherwise by what occurs together.

    Every tenth line is held out: the result says how many of their targets stay the same. The shortlist is stored in
    the bundle and used on request only: fatdeploy run --shortlist auto, generate(shortlist="auto").
    """
    from fatdeploy.runtimes.shortlist.build import Sizes, build_shortlist, count_lines

    sizes = Sizes(per_token, frequent)
    with progress_bar(range(2 * sum(map(count_lines, files))), "reading") as bar:
        record = build_shortlist(
            bundle,
            files,
            sizes=sizes,
            as_ids=as_ids,
            truncate=truncate,
            force=force,
            progress=bar.update,
            **engine,
        )
    if as_json:
        from fatdeploy.records import json_from_record

        click.echo(json.dumps({"bundle": str(bundle), **json_from_record(record)}))
        return
    click.echo(f"{bundle}: {record.line()}")
