"""An engine whose logits are a function of the source and the tokens so far: every number is known, all rows differ."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

import numpy as np

from fatdeploy.runtimes.engines.checks import sources_of_rows
from fatdeploy.runtimes.engines.protocol import ALL_SOURCES, Capacity, Floats, Rows, StepOut, Want
from fatdeploy.spec import AlignmentSpec, Mask, ModelSpec, Tokens

LogitsOf = Callable[[tuple[int, ...], tuple[int, ...]], Floats]

WORDS = ModelSpec(
    vocab_size=24, width=24, max_source=8, max_target=32, pad_id=0, bos_id=1, eos_id=2, top_k=12, alignment=None
)
ALIGNED = ModelSpec(
    **{**WORDS.__dict__, "alignment": AlignmentSpec(layer=0, heads=2)},
)


def hashed_logits(source: tuple[int, ...], tokens: tuple[int, ...], vocab_size: int = 24) -> Floats:
    """Return logits that look random and depend only on the source and the tokens so far."""
    draw = np.random.default_rng([*source, 999, *tokens])
    logits = draw.normal(0, 2, vocab_size).astype(np.float32)
    logits[2] += 0.8 * len(tokens) - 3  # EOS becomes more likely
    return logits


@dataclass
class Row:
    """A source and the tokens that a row has read."""

    source: tuple[int, ...]
    read: tuple[int, ...] = ()


class TableState(list[Row]):
    """The rows of a decode, equally many per source."""

    def __init__(self, rows: Iterable[Row], capacity: Capacity, width: int) -> None:
        super().__init__(rows)
        self.capacity, self.width, self.per_source = capacity, width, 1


class TableEngine:
    """Computes each row's logits by a function; the hidden state equals them, the output matrix is the identity."""

    def __init__(self, logits_of: LogitsOf = hashed_logits, spec: ModelSpec = WORDS) -> None:
        self.spec = spec
        self.logits_of = logits_of
        self.calls: list[tuple[tuple[int, ...], Want]] = []
        self._lock = Lock()
        self.n_states = 0

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> TableState:
        self.spec.check_source(source, mask)
        self.capacity = capacity
        with self._lock:
            self.n_states += 1
        rows = (Row(tuple(row[real].tolist())) for row, real in zip(source, mask, strict=True))
        return TableState(rows, capacity, source.shape[1])

    def step(self, tokens: Tokens, state: TableState, want: Want) -> StepOut:
        assert len(tokens) == len(state)
        self.calls.append((tokens.shape, want))
        position = max(len(row.read) for row in state)
        self.spec.check_tokens(tokens, position, state.capacity.target_positions)
        logits = np.empty((*tokens.shape, self.spec.vocab_size), np.float32)
        for index, row in enumerate(state):
            for place, token in enumerate(tokens[index].tolist()):
                row.read = (*row.read, token)
                logits[index, place] = self.logits_of(row.source, row.read)
        attention = self._attention(state, tokens.shape[1]) if self.spec.alignment else None
        if want is Want.HIDDEN:
            return StepOut(hidden=logits, attention=attention)
        if want is Want.LOGITS:
            return StepOut(logits=logits, attention=attention)
        log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        order = np.argsort(-log_probs, axis=-1, kind="stable")[..., : self.spec.top_k]
        best = np.take_along_axis(log_probs, order, -1)
        return StepOut(top_log_probs=best, top_ids=order, attention=attention)

    def reorder(self, state: TableState, rows: Rows) -> None:
        _, state.per_source = sources_of_rows(rows, state.per_source)
        assert state.per_source <= state.capacity.rows_per_source
        state[:] = [Row(state[row].source, state[row].read) for row in rows]

    def output_rows(self, ids: Sequence[int]) -> Floats:
        return np.eye(self.spec.vocab_size, dtype=np.float32)[ids]

    def output_bias(self, ids: Sequence[int]) -> None:
        return None

    def length_log_probs(self, state: TableState) -> Floats:
        raise NotImplementedError

    def release(self, state: TableState) -> None:
        with self._lock:
            self.n_states -= 1

    def close(self) -> None: ...

    def _attention(self, state: TableState, steps: int) -> Floats:
        """Return weights that identify their row and step: the last token read, at source position 0."""
        weights = np.zeros((len(state), 2, steps, state.width), np.float32)
        for index, row in enumerate(state):
            weights[index, 0, :, 0] = 2 * row.read[-1]
        return weights


class RefilledEngine(TableEngine):
    """The same engine with rows at positions of their own; ``joined`` counts the sources that took another's place."""

    refills = True
    joined = 0

    def refill(self, state: TableState, places: Rows, newcomers: TableState, chosen: slice = ALL_SOURCES) -> None:
        joining = list(newcomers)[chosen]
        assert newcomers.width <= state.width
        assert newcomers.capacity.rows_per_source == state.capacity.rows_per_source == state.per_source
        with self._lock:
            self.joined += len(joining)
        for place, row in zip(places.tolist(), joining, strict=True):
            for index in range(state.per_source):
                state[place * state.per_source + index] = Row(row.source)

    def rest(self, state: TableState, rows: Rows) -> None:
        for row in rows.tolist():
            state[row] = Row(state[row].source)
