"""How results are written: a line each for people, a JSON object per line for programs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.text.lines import Line

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.runtimes.decoding.hypothesis import Finish, Hypothesis
    from fatdeploy.runtimes.decoding.streaming import Event, Stream

# Every character that ends a line becomes a blank, so that the pieces of a stream join to the line written without it.
IN_ONE_LINE = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


@dataclass(frozen=True)
class Output:
    """What to write of each result."""

    as_json: bool = False
    n_best: bool = False
    scores: bool = False
    alignments: bool = False
    keeps_lines: bool = False

    def lines(self, number: int, line: Line, result: "Hypothesis") -> Iterator[str]:
        """Yield the lines of a source's results; ``number`` counts sources from 0."""
        if self.as_json:
            yield json.dumps({**line.values(), **self.values(result, with_alternatives=True)}, ensure_ascii=False)
            return
        for hypothesis in (result, *result.alternatives):
            yield "\t".join(self._columns(number, hypothesis))

    def values(self, result: "Hypothesis", *, with_alternatives: bool = False) -> dict[str, Any]:
        """Return a result as JSON values."""
        values: dict[str, Any] = {"tokens": result.tokens, "text": result.text, "finish": result.finish}
        values["dropped"] = result.dropped
        if self.scores:
            values |= {"score": result.score, "log_probs": result.log_probs}
        if self.alignments and result.alignments is not None:
            values["alignments"] = [[round(weight, 6) for weight in row] for row in result.alignments.tolist()]
        if with_alternatives and self.n_best:
            values["alternatives"] = [self.values(hypothesis) for hypothesis in result.alternatives]
        return values

    def write_stream(self, line: Line, stream: "Stream") -> "Finish":
        """Write a target while it is decoded; return how it finished."""
        finish: Finish = "cancelled"
        any_written = False
        for event in stream:
            if event.hypothesis is not None:
                finish = event.hypothesis.finish
            if self.as_json:
                click.echo(json.dumps({**line.values(), **self.event_values(event)}, ensure_ascii=False))
                continue
            piece = " ".join(map(str, event.tokens)) if event.text is None else event.text.translate(IN_ONE_LINE)
            between = " " if event.text is None and piece and any_written else ""
            click.echo(between + piece, nl=False)
            any_written = any_written or bool(piece)
        if not self.as_json:
            click.echo()
        return finish

    def event_values(self, event: "Event") -> dict[str, Any]:
        """Return an event as JSON values."""
        values: dict[str, Any] = {"tokens": event.tokens, "text": event.text}
        return values if event.hypothesis is None else {**values, "result": self.values(event.hypothesis)}

    def _columns(self, number: int, hypothesis: "Hypothesis") -> Iterator[str]:
        if self.n_best:
            yield str(number)
        if self.scores:
            yield "" if hypothesis.score is None else f"{hypothesis.score:.4f}"
        yield (hypothesis.text or "") if self.keeps_lines else plain_text(hypothesis)
        if self.alignments:
            yield aligned_pairs(hypothesis)


def plain_text(hypothesis: "Hypothesis") -> str:
    """Return a target in one line: its text, or its token ids without a tokenizer."""
    if hypothesis.text is None:
        return " ".join(map(str, hypothesis.tokens))
    return hypothesis.text.translate(IN_ONE_LINE)


def aligned_pairs(hypothesis: "Hypothesis") -> str:
    """Return for each target token the source token with the most attention, as ``source-target`` from 0."""
    if hypothesis.alignments is None:
        return ""
    prefix = len(hypothesis.tokens) - len(hypothesis.alignments)
    places = hypothesis.alignments.argmax(-1).tolist()
    return " ".join(f"{place}-{prefix + index}" for index, place in enumerate(places))


def check_output_file(option: str, path: Path) -> None:
    """Refuse a file whose folder does not exist, before work that may take long."""
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; create it first")


def write_output_file(option: str, path: Path, text: str) -> None:
    """Write a result to the file that an option names."""
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise ConfigError(f"cannot write {option} {path}: {error.strerror or error}") from error
