"""Pairs for training and evaluation: a file of lines, each a source, a TAB and a target."""

from codecs import BOM_UTF8
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fatdeploy.errors import DataError, in_one_line

FORM = "a line is a source, one TAB and a target, in UTF-8"
FORM_OF_SOURCES = "a line is a source, or a source, one TAB and a target, in UTF-8"

# How many bad lines a message names; the others are counted.
MOST_NAMED = 20


@dataclass(frozen=True)
class Pair:
    """A source and the target that it should have."""

    source: str
    target: str


def read_pairs(path: Path) -> list[Pair]:
    """Return the pairs of a file, in order; one error lists all lines that are not a pair.

    Only line ends (LF or CRLF) and a byte order mark at the start are stripped. A source may occur on several lines.
    """
    lines = _lines(path, "pairs", FORM)
    pairs, wrong = [], []
    for number, line in enumerate(lines, 1):
        pair = _pair(line)
        if isinstance(pair, Pair):
            pairs.append(pair)
        else:
            wrong.append(_reason(pair, number))
    if wrong:
        raise error_of_lines(path, wrong, f"{len(lines)} lines")
    return pairs


def read_sources(path: Path) -> list[tuple[str, str | None]]:
    """Return the sources of a file, each with its target if the line has one after a TAB."""
    lines = _lines(path, "sources", FORM_OF_SOURCES)
    sources: list[tuple[str, str | None]] = []
    wrong = []
    for number, line in enumerate(lines, 1):
        pair = _pair(line if b"\t" in line else line + b"\tnone")
        if isinstance(pair, Pair):
            sources.append((pair.source, pair.target if b"\t" in line else None))
        else:
            wrong.append(_reason(pair, number))
    if wrong:
        raise error_of_lines(path, wrong, f"{len(lines)} lines", FORM_OF_SOURCES)
    return sources


def error_of_lines(path: Path, wrong: Sequence[str], among: str, expected: str = FORM) -> DataError:
    """Return the error for lines that cannot be used; ``wrong`` are reasons with line numbers."""
    more = len(wrong) - MOST_NAMED
    named = [*wrong[:MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]
    message = in_one_line(f"{path}: {len(wrong)} of {among} cannot be used", named)
    return DataError(f"{message}; {expected}: fix or remove them")


def _lines(path: Path, kind: str, form: str) -> list[bytes]:
    try:
        data = path.read_bytes()
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder, expected a file of {kind}: {form}") from error
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist, expected a file of {kind}: {form}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    # Not splitlines: a form feed or a line separator may be part of a text.
    lines = data.removeprefix(BOM_UTF8).split(b"\n")
    if not lines[-1]:
        lines.pop()
    if not lines:
        raise DataError(f"{path} is empty, expected a file of {kind}: {form}")
    return [line.removesuffix(b"\r") for line in lines]


def _reason(problem: tuple[str, str], number: int) -> str:
    reason, remark = problem
    return f"{reason} at line {number}{remark}"


def _pair(line: bytes) -> Pair | tuple[str, str]:
    """Return the pair on a line, or what is wrong with it and a remark."""
    if b"\0" in line:
        # It would pass as UTF-8: in UTF-16 every second byte of plain English is zero.
        return "is not UTF-8", " (byte 0x00, as in UTF-16)"
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return "is not UTF-8", f" (byte {line[error.start]:#04x})"
    columns = text.split("\t")
    if not text.strip():
        return "is blank", ""
    if len(columns) != 2:
        return "has no TAB" if len(columns) == 1 else f"has {len(columns) - 1} TABs", ""
    source, target = columns
    empty = [name for name, column in {"source": source, "target": target}.items() if not column.strip()]
    return (f"has an empty {empty[0]}", "") if empty else Pair(source, target)
