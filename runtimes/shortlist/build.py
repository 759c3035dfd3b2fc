"""Builds the shortlist of a bundle from texts, measures it on lines that were held out, and stores it."""

import logging
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fatdeploy.bundle import Bundle, changed_bundle, read_bundle
from fatdeploy.errors import ConfigError, DataError, SpecMismatch
from fatdeploy.manifest import FORMAT, SHORTLIST, ShortlistRecord
from fatdeploy.pairs import error_of_lines, read_sources
from fatdeploy.runtimes.bulk.sharing import BATCH_TOKENS
from fatdeploy.runtimes.decoding.sources import batches_of, padded
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Floats, Ids, State, Want
from fatdeploy.runtimes.model import Model
from fatdeploy.runtimes.proof.forced import decoder_inputs
from fatdeploy.runtimes.shortlist.counting import AlignedLine, TokenCounts
from fatdeploy.runtimes.shortlist.table import LexicalTable, copies_of, write_table
from fatdeploy.runtimes.text.source_reader import ReadSource
from fatdeploy.runtimes.text.token_ids import PlainSource, ids_from_text

# One line of so many measures the table and is not part of it.
HELD_OUT = 10
# Lines that are compared, at most: more show nothing new.
MOST_HELD_OUT = 500

log = logging.getLogger("fatdeploy")


@dataclass(frozen=True)
class Sizes:
    """How many target tokens a table has: per source token, and for every source."""

    per_token: int = 50
    frequent: int = 8000


@dataclass(frozen=True)
class ReadLine:
    """A source that the model can read, and its target in reading order without EOS if the file has one."""

    source: ReadSource
    target: tuple[int, ...] | None = None


DEFAULT_SIZES = Sizes()


def build_shortlist(
    path: str | Path,
    files: Sequence[str | Path],
    *,
    sizes: Sizes = DEFAULT_SIZES,
    as_ids: bool = False,
    truncate: bool = False,
    force: bool = False,
    progress: Callable[[int], None] | None = None,
    **engine_options: Any,
) -> ShortlistRecord:
    """Build the shortlist of a bundle from files of sources or pairs, store it there, and return its record.

    ``progress`` is called with the number of lines that another pass has read; there are two passes. Further keywords
    are those of ``fatdeploy.load``: threads, providers and so on. A failure leaves the bundle as it was.
    """
    bundle = read_bundle(path)
    check_possible(bundle, force=force)
    with closing(opened_engine(bundle, **engine_options)) as engine:
        model = Model(bundle, engine)
        lines = [line for file in files for line in lines_of(model, Path(file), as_ids=as_ids, truncate=truncate)]
        table, record = built_table(model, engine, lines, sizes, progress)
    store(bundle, table, record)
    return record


def check_possible(bundle: Bundle, *, force: bool) -> None:
    """Raise if a bundle cannot have a shortlist, or has one that must not be replaced."""
    if bundle.spec.decoding == "parallel":
        raise ConfigError(f"{bundle.path} is a parallel model, which chooses all tokens at once: it needs no shortlist")
    if SHORTLIST in bundle.manifest.files and not force:
        raise ConfigError(f"{bundle.path} has a shortlist already: pass --force (force=True) to replace it")


def count_lines(path: Path) -> int:
    """Return the number of lines of a file of sources or pairs; raise if it is none."""
    return len(read_sources(path))


def lines_of(model: Model, path: Path, *, as_ids: bool = False, truncate: bool = False) -> list[ReadLine]:
    """Return the lines of a file as tokens; one error lists all that the model cannot read."""
    lines, wrong = [], []
    pairs = read_sources(path)
    for number, (source, target) in enumerate(pairs, 1):
        try:
            tokens = None if target is None else _target_ids(model, target, as_ids)
            lines.append(ReadLine(model.read(_plain(source, as_ids), truncate=truncate), tokens))
        except SpecMismatch as error:
            wrong.append(f"source {error} at line {number}")
        except ConfigError as error:
            if not as_ids:
                raise
            wrong.append(f"{error} at line {number}")
    if wrong:
        raise error_of_lines(path, wrong, f"{len(pairs)} lines", "the model must be able to read every line")
    return lines


def built_table(
    model: Model,
    engine: Engine[State],
    lines: Sequence[ReadLine],
    sizes: Sizes,
    progress: Callable[[int], None] | None = None,
) -> tuple[LexicalTable, ShortlistRecord]:
    """Return a table from most lines, and what the others show about it."""
    if len(lines) < 2:
        raise DataError(f"a shortlist needs at least 2 lines, one of them to measure it with, found {len(lines)}")
    held = set([*range(len(lines))][HELD_OUT - 1 :: HELD_OUT][:MOST_HELD_OUT] or [len(lines) - 1])
    lines = _with_targets(model, lines, held, progress)
    learned = [line for index, line in enumerate(lines) if index not in held]
    counts = TokenCounts(model.spec, _aligned(engine, learned, progress))
    table = counts.table(per_token=sizes.per_token, frequent=sizes.frequent, copies=copies_of(model.spec))
    measured = _measured(Model(model.bundle, engine, table=table), [lines[index] for index in sorted(held)], table)
    record = ShortlistRecord(
        aligned_by="co-occurrence" if model.spec.alignment is None else "attention",
        lines=len(learned),
        frequent=len(table.frequent),
        per_token=sizes.per_token,
        source_tokens=len(table.sources),
        entries=len(table.targets),
        held_out=len(held),
        same_targets=measured.same_targets,
        tokens=measured.tokens,
        listed_tokens=measured.listed_tokens,
        mean_length=measured.mean_length,
    )
    return table, record


def store(bundle: Bundle, table: LexicalTable, record: ShortlistRecord) -> Bundle:
    """Write a table into a bundle, which is replaced as a whole."""
    with changed_bundle(bundle, replace(bundle.manifest, shortlist=record, format=FORMAT)) as folder:
        write_table(folder / SHORTLIST, table, bundle.spec)
    return read_bundle(bundle.path, check_hashes=False)


def _plain(text: str, as_ids: bool) -> PlainSource:
    return ids_from_text("source", text) if as_ids else text


def _target_ids(model: Model, text: str, as_ids: bool) -> tuple[int, ...]:
    """Return the tokens of a target in reading order."""
    ids = tuple(ids_from_text("target", text)) if as_ids else model.target_ids(text)
    ids = ids[: model.spec.max_target - 1]
    wrong = [token for token in ids if not 0 <= token < model.spec.vocab_size]
    if wrong:
        raise ConfigError(f"target ids must lie in 0…{model.spec.vocab_size - 1}, found {wrong[0]}")
    return ids


def _with_targets(
    model: Model, lines: Sequence[ReadLine], held: set[int], progress: Callable[[int], None] | None
) -> list[ReadLine]:
    """Return lines with the model's own greedy targets where they have none, and where they measure the table."""
    missing = [index for index, line in enumerate(lines) if line.target is None or index in held]
    results = model.generate([lines[index].source for index in missing], num_beams=1, progress=progress)
    if progress is not None:
        progress(len(lines) - len(missing))
    complete = list(lines)
    for index, result in zip(missing, results, strict=True):
        complete[index] = replace(lines[index], target=result.tokens)
    return complete


def _aligned(
    engine: Engine[State], lines: Sequence[ReadLine], progress: Callable[[int], None] | None
) -> list[AlignedLine]:
    """Return what the model would choose at each step of the lines' targets."""
    lengths = [len(line.source.ids) for line in lines]
    steps = [len(line.target or ()) + 1 for line in lines]
    aligned = []
    for batch in batches_of(lengths, 1, steps, BATCH_TOKENS // 2):
        aligned += _aligned_batch(engine, [lines[index] for index in batch])
        if progress is not None:
            progress(len(batch))
    return aligned


def _aligned_batch(engine: Engine[State], lines: Sequence[ReadLine]) -> list[AlignedLine]:
    spec = engine.spec
    targets = [_in_order_of_generation(line, engine) for line in lines]
    longest = max(len(target) for target in targets)
    tokens = np.full((len(lines), longest), spec.pad_id, np.int64)
    for row, target in zip(tokens, targets, strict=True):
        row[: len(target)] = target
    source, mask = padded([line.source.ids for line in lines], spec)
    state = engine.encode(source, mask, Capacity(1, longest))
    try:
        out = engine.step(decoder_inputs(spec, tokens), state, Want.TOPK)
        if out.top_ids is None or out.top_log_probs is None:
            raise SpecMismatch("the engine returned no best tokens although they were wanted")
        attention = None if out.attention is None else out.attention.mean(1)
        return [
            AlignedLine(
                np.asarray(line.source.ids, np.int64),
                np.array(out.top_ids[row, : len(target)]),
                np.exp(out.top_log_probs[row, : len(target)]),
                None if attention is None else _own_attention(attention[row], line, len(target)),
            )
            for row, (line, target) in enumerate(zip(lines, targets, strict=True))
        ]
    finally:
        engine.release(state)


def _own_attention(attention: Floats, line: ReadLine, steps: int) -> Floats:
    return np.array(attention[:steps, : len(line.source.ids)])


def _in_order_of_generation(line: ReadLine, engine: Engine[State]) -> Ids:
    target = line.target or ()
    ordered = target[::-1] if engine.spec.target_order == "right_to_left" else target
    return np.array([*ordered, engine.spec.eos_id][: engine.spec.max_target], np.int64)


@dataclass(frozen=True)
class TableAgreement:
    """How far a model with a table agrees with itself without one."""

    same_targets: int
    tokens: int
    listed_tokens: int
    mean_length: float


def _measured(model: Model, lines: Sequence[ReadLine], table: LexicalTable) -> TableAgreement:
    """Return what lines that a table has not seen show about it."""
    results = model.generate([line.source for line in lines], num_beams=1, shortlist="auto")
    lists = [_list_of(table, line.source) for line in lines]
    listed = [np.isin(np.array(line.target, np.int64), ids) for line, ids in zip(lines, lists, strict=True)]
    return TableAgreement(
        same_targets=sum(result.tokens == line.target for result, line in zip(results, lines, strict=True)),
        tokens=sum(len(row) for row in listed),
        listed_tokens=int(sum(row.sum() for row in listed)),
        mean_length=float(np.mean([len(ids) for ids in lists])),
    )


def _list_of(table: LexicalTable, source: ReadSource) -> Ids:
    return np.union1d(table.frequent, table.targets_of(np.asarray(source.ids, np.int64)))
