"""``fatdeploy demo``: the bundled model pronounces words, another translates; how well and how fast is shown."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fatdeploy.exporter import need_export_packages
from fatdeploy.runtimes.commands.progress import show_stage
from fatdeploy.tables import aligned

if TYPE_CHECKING:
    # Not at run time: a command's help must not need torch.
    from fatdeploy.export.g2p.demo import Demonstration


@click.command(
    epilog="""\b
Examples:
  fatdeploy demo
  fatdeploy demo onomatopoeia "o'clock" --json
  fatdeploy demo --translate build/real/opus-mt-zh-en
"""
)
@click.argument("words", nargs=-1)
@click.option(
    "--bundle",
    default="demo.bundle",
    show_default=True,
    type=click.Path(path_type=Path),
    help="Folder of the exported model, written if missing; a bundle with another precision or attention is refused.",
)
@click.option(
    "--translate",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Also translate Chinese sentences with this Hugging Face folder; its bundle is kept beside it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def demo(words: tuple[str, ...], bundle: Path, translate: Path | None, as_json: bool) -> None:
    """Pronounce English words with the bundled model.

    The first run exports the model to int8 and proves that its graphs return what the PyTorch model returns. Every run
    measures how close the integers come to it, and shows for each word the best pronunciations with their scores. It
    also shows which letters each phoneme of the longest word was read from, and the time per word. Upper case is read
    as lower case.
    """
    need_export_packages()
    from fatdeploy.export.g2p.demo import WORDS, demonstrated
    from fatdeploy.export.g2p.translation import translated

    result = demonstrated(words or WORDS, bundle, show_stage)
    if not as_json:
        for line in _lines(result):
            click.echo(line)
        click.echo(f"bundle: {bundle}, {result.bundle_bytes / 1e6:.1f} MB. Next: fatdeploy run {bundle} YOUR WORDS")
    act = None if translate is None else translated(translate, show_stage)
    if as_json:
        click.echo(json.dumps(result.as_dict() | ({} if act is None else {"translation": act.as_dict()})))
    elif act is not None:
        click.echo("\n" + "\n".join(act.lines()))
        click.echo(f"bundle: {act.bundle}, {act.bundle_bytes / 1e6:.1f} MB. Next: fatdeploy run {act.bundle} 你好")


def _lines(result: "Demonstration") -> list[str]:
    from fatdeploy.export.g2p.demo import picture_lines

    rows = [(entry.word, *(f"{text}  ({score:.2f})" for text, score in entry.best)) for entry in result.words]
    longest = max(result.words, key=lambda entry: len(entry.word))
    integers = result.quantized
    return [
        *aligned([("word", "best", "second", "third"), *rows]),
        f"\nWhich letters of {longest.word!r} each phoneme was read from:",
        *picture_lines(longest),
        f"\nlatency per word, greedy, {result.threads} thread: p50 {result.p50_ms:.2f} ms, p95 {result.p95_ms:.2f} ms",
        f"parity: {result.parity.line()}",
        f"int8: {integers.share:.2%} of {integers.tokens} tokens and {integers.same_sequences} of "
        f"{integers.sequences} words are the reference's; rows of a batch are bit-identical to the same rows alone",
    ]
