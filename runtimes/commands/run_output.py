"""How results are written: a line each for people, a JSON object a line for programs."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.runtimes.decoding.hypothesis import Finish, Hypothesis
    from fatdeploy.runtimes.decoding.streaming import Event, Stream

Given = str | list[int]

# All that ends a line, a character at a time: the pieces of a stream are then the line that is written without it.
IN_ONE_LINE = str.maketrans(dict.fromkeys("\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029", " "))


@dataclass(frozen=True)
class Output:
    """What to write of each result."""

    as_json: bool = False
    n_best: bool = False
    scores: bool = False
    alignments: bool = False

    def lines(self, number: int, source: Given, found: "Hypothesis") -> Iterator[str]:
        """Yield the lines of a source's results; ``number`` counts sources from 0."""
        if self.as_json:
            yield json.dumps({"source": source, **self.values(found, with_alternatives=True)}, ensure_ascii=False)
            return
        for one in (found, *found.alternatives):
            yield "\t".join(self._columns(number, one))

    def values(self, found: "Hypothesis", *, with_alternatives: bool = False) -> dict[str, Any]:
        """Return a result as JSON values."""
        values: dict[str, Any] = {"tokens": found.tokens, "text": found.text, "finish": found.finish}
        values["dropped"] = found.dropped
        if self.scores:
            values |= {"score": found.score, "log_probs": found.log_probs}
        if self.alignments and found.alignments is not None:
            values["alignments"] = [[round(weight, 6) for weight in row] for row in found.alignments.tolist()]
        if with_alternatives and self.n_best:
            values["alternatives"] = [self.values(one) for one in found.alternatives]
        return values

    def write_stream(self, source: Given, stream: "Stream") -> "Finish":
        """Write a target while it is decoded; return what ended it."""
        finish: Finish = "cancelled"
        any_written = False
        for event in stream:
            if event.hypothesis is not None:
                finish = event.hypothesis.finish
            if self.as_json:
                click.echo(json.dumps({"source": source, **self.event_values(event)}, ensure_ascii=False))
                continue
            piece = " ".join(map(str, event.tokens)) if event.text is None else event.text.translate(IN_ONE_LINE)
            between = " " if event.text is None and piece and any_written else ""
            click.echo(between + piece, nl=False)
            any_written = any_written or bool(piece)
        if not self.as_json:
            click.echo()
        return finish

    def event_values(self, event: "Event") -> dict[str, Any]:
        """Return what an event tells as JSON values."""
        values: dict[str, Any] = {"tokens": event.tokens, "text": event.text}
        return values if event.hypothesis is None else {**values, "result": self.values(event.hypothesis)}

    def _columns(self, number: int, found: "Hypothesis") -> Iterator[str]:
        if self.n_best:
            yield str(number)
        if self.scores:
            yield "" if found.score is None else f"{found.score:.4f}"
        yield plain_text(found)
        if self.alignments:
            yield pairs(found)


def plain_text(found: "Hypothesis") -> str:
    """Return a target in one line: its text, or the ids where there is none."""
    return " ".join(map(str, found.tokens)) if found.text is None else found.text.translate(IN_ONE_LINE)


def pairs(found: "Hypothesis") -> str:
    """Return for each target token the source token that it looks at most, as ``source-target`` from 0."""
    if found.alignments is None:
        return ""
    prefix = len(found.tokens) - len(found.alignments)
    return " ".join(f"{place}-{prefix + index}" for index, place in enumerate(found.alignments.argmax(-1).tolist()))
