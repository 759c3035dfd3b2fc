"""The decode loop, the only one: it chooses tokens, an engine of any kind computes them. numpy alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError, SpecMismatch, in_one_line
from fatdeploy.runtimes.engine import Capacity, Engine, Floats, State, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

Finish = Literal["eos", "length"]


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How to decode. ``max_new_tokens`` counts EOS and is the model's ``max_target`` unless said."""

    max_new_tokens: int | None = None
    length_candidates: int = 1

    def __post_init__(self) -> None:
        limit = 1 if self.max_new_tokens is None else self.max_new_tokens
        counts: dict[str, object] = {"max_new_tokens": limit, "length_candidates": self.length_candidates}
        reasons = [
            f"{name} must be a whole number from 1 up, found {value!r}"
            for name, value in counts.items()
            if isinstance(value, bool) or not isinstance(value, int) or value < 1
        ]
        if reasons:
            raise ConfigError(in_one_line("decode options refused", reasons))


@dataclass(frozen=True)
class Hypothesis:
    """One target in reading order without BOS and EOS, and what ended it: the model (``eos``) or the limit.

    ``text`` is there if the bundle has a tokenizer; ``dropped`` tokens of the source were cut because it was too long.
    """

    tokens: tuple[int, ...]
    finish: Finish
    text: str | None = None
    dropped: int = 0


def decode(
    engine: Engine[State], sources: Sequence[Sequence[int] | NDArray[np.generic]], options: DecodeOptions | None = None
) -> list[Hypothesis]:
    """Return the best target of each source; a result does not depend on what else is in the batch."""
    options = options or DecodeOptions()
    spec = engine.spec
    limit = _limit(spec, options)
    source, mask = padded(sources, spec)
    parallel = spec.decoding == "parallel"
    state = engine.encode(source, mask, Capacity(options.length_candidates if parallel else 1, limit))
    try:
        search = _decode_at_once if parallel else _decode_greedily
        found = search(engine, state, len(source), limit, options)
    finally:
        engine.release(state)
    if spec.target_order == "right_to_left":
        found = [Hypothesis(one.tokens[::-1], one.finish) for one in found]
    return found


def padded(sources: Sequence[Sequence[int] | NDArray[np.generic]], spec: ModelSpec) -> tuple[Tokens, Mask]:
    """Return sources of any lengths as ids [B, S] and mask, padded on the right; refuse those that cannot be read."""
    rows = [np.asarray(source) for source in sources]
    reasons = [f"source {index}: {reason}" for index, row in enumerate(rows) if (reason := wrong_source(row, spec))]
    if not rows:
        reasons.append("no source given")
    if reasons:
        raise SpecMismatch(in_one_line("cannot decode", reasons))
    lengths = np.array([len(row) for row in rows])
    mask = np.arange(lengths.max()) < lengths[:, None]
    ids = np.full(mask.shape, spec.pad_id, np.int64)
    ids[mask] = np.concatenate(rows)
    return ids, mask


def wrong_source(row: NDArray[np.generic], spec: ModelSpec) -> str:
    """Return why ids are no source of the model; empty if they are one."""
    if row.ndim != 1:
        return f"expected one axis of ids, found shape {row.shape}"
    if not row.size:
        return "is empty"
    if row.dtype.kind not in "iu":
        return f"ids must be integers, found {row.dtype}"
    if len(row) > spec.max_source:
        return f"has {len(row)} tokens, more than max_source = {spec.max_source} (truncate=True, --truncate: cut it)"
    wrong = [int(token) for token in row.tolist() if not 0 <= token < spec.vocab_size]
    return f"ids must lie in 0…{spec.vocab_size - 1}, found {wrong[0]}" if wrong else ""


def _limit(spec: ModelSpec, options: DecodeOptions) -> int:
    if options.max_new_tokens is None:
        return spec.max_target
    if options.max_new_tokens > spec.max_target:
        raise ConfigError(
            f"max_new_tokens must lie in 1…{spec.max_target} (the model's max_target), found {options.max_new_tokens}"
        )
    return options.max_new_tokens


def _decode_greedily(
    engine: Engine[State],
    state: State,
    batch: int,
    limit: int,
    options: DecodeOptions,  # noqa: ARG001
) -> list[Hypothesis]:
    spec = engine.spec
    chosen = np.full(batch, spec.bos_id, np.int64)
    output = np.empty((batch, limit), np.int64)
    # Position of a row's EOS; `limit` while it has none.
    ends = np.full(batch, limit)
    for position in range(limit):
        chosen = _logits(engine, chosen[:, None], state)[:, -1].argmax(-1)
        output[:, position] = chosen
        ends[(ends == limit) & (chosen == spec.eos_id)] = position
        if (ends < limit).all():
            break
        # A finished row reads padding: nothing that it says is looked at any more.
        chosen[ends < limit] = spec.pad_id
    return [_cut(row, int(end)) for row, end in zip(output, ends, strict=True)]


def _decode_at_once(
    engine: Engine[State], state: State, batch: int, limit: int, options: DecodeOptions
) -> list[Hypothesis]:
    spec, candidates = engine.spec, options.length_candidates
    lengths = np.full((batch, 1), limit)
    if spec.length == "head":
        # A cut length must not appear twice among the candidates.
        ranked = np.argsort(-engine.length_log_probs(state)[:, :limit], axis=-1, kind="stable")
        lengths = ranked[:, :candidates] + 1
    if lengths.shape[1] > 1:
        engine.reorder(state, np.repeat(np.arange(batch), lengths.shape[1]))
    positions = np.arange(lengths.max())
    tokens = np.where(positions < lengths.reshape(-1, 1), spec.bos_id, spec.pad_id)
    logits = _logits(engine, tokens, state)
    output = logits.argmax(-1)
    if spec.length == "eos":
        return [_cut(row, _first(row, spec.eos_id)) for row in output]
    best = _best_mean(logits, lengths)
    rows = output.reshape(batch, -1, len(positions))[np.arange(batch), best]
    return [
        Hypothesis(tuple(row[:end].tolist()), "eos")
        for row, end in zip(rows, lengths[np.arange(batch), best], strict=True)
    ]


def _best_mean(logits: Floats, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each source the candidate whose tokens have the highest mean log-probability."""
    if lengths.shape[1] == 1:
        return np.zeros(len(lengths), np.int64)
    top = logits.max(-1, keepdims=True)
    log_probs = -np.log(np.exp(logits - top).sum(-1))  # of the best token: [R, T]
    real = np.arange(logits.shape[1]) < lengths.reshape(-1, 1)
    means = (log_probs * real).sum(-1) / lengths.reshape(-1)
    best: NDArray[np.int64] = means.reshape(lengths.shape).argmax(-1)
    return best


def _logits(engine: Engine[State], tokens: Tokens, state: State) -> Floats:
    logits = engine.step(tokens, state, Want.LOGITS).logits
    if logits is None:
        raise SpecMismatch("the engine returned no logits although they were wanted")
    return logits


def _first(row: Tokens, token: int) -> int:
    places = np.flatnonzero(row == token)
    return int(places[0]) if places.size else len(row)


def _cut(row: Tokens, end: int) -> Hypothesis:
    return Hypothesis(tuple(row[:end].tolist()), "eos" if end < len(row) else "length")
