"""ONNX Runtime: caches in place, bound once a sentence; a step changes the tokens and one number."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import DECODER, ENCODER, Bundle
from fatdeploy.errors import ConfigError
from fatdeploy.machine import usable_cores
from fatdeploy.runtimes.buffers import Array, BufferPool, Buffers, move_rows, zero_rows
from fatdeploy.runtimes.engine import (
    Capacity,
    Floats,
    Ids,
    Rows,
    StepOut,
    Want,
    check_length_head,
    check_step,
    check_want,
    checked_move,
    released_state,
)
from fatdeploy.runtimes.ort_bindings import MOST_HELD_BYTES, MOST_SHAPES, Binder, Bound
from fatdeploy.runtimes.ort_sessions import (
    OrtOptions,
    Provider,
    Sessions,
    onnxruntime_module,
    opened_sessions,
    run_failed,
)
from fatdeploy.runtimes.output_matrix import stored_output_rows
from fatdeploy.runtimes.saturation import check_saturation
from fatdeploy.spec import Mask, ModelSpec, Tokens

NOTHING = Buffers([])  # what a state has that was given back
# Keys that one product of an attention adds up at a time: a source of 7 alone is summed in another order than one of 7
# among longer ones. The 1e-7 between them is noise in fp32, but may become another integer and then much more.
WHOLE = 4


@dataclass
class OrtState:
    """Memory of the sources, and the decoder's state: arrays that onnxruntime writes in place."""

    inputs: dict[str, Any]  # what stays the same from step to step, as OrtValues
    sources: dict[str, Array]  # the same as arrays
    held: Buffers  # of all rows that there may be; a step is given the first
    capacity: Capacity
    rows: int
    most_rows: int  # that there ever were
    source_length: int  # as it was given; the arrays may be padded further
    n_steps: int = 0
    bound: dict[tuple[int, Want], Bound] = field(default_factory=dict)
    released: bool = False

    @property
    def buffers(self) -> list[list[Array]]:
        """The state: one set of arrays, or two that change places."""
        return self.held.sets

    @property
    def position(self) -> NDArray[np.int64]:
        """How many positions were fed."""
        return self.held.position


class OrtEngine:
    """Runs a bundle's two graphs; any number of threads may decode at once, each with a state of its own."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        threads: int | None = None,
        spinning: bool = True,
        providers: Sequence[Provider] = ("cpu",),
        optimised: bool = True,
        profile: Path | None = None,
    ) -> None:
        options = OrtOptions(
            threads=threads, spinning=spinning, providers=providers, optimised=optimised, profile=profile
        )
        self._ort = onnxruntime_module()
        self._bundle = bundle
        self.spec: ModelSpec = bundle.spec
        self.branches = bundle.manifest.dialect == "ort"
        self.pool = BufferPool()
        check_saturation(self._ort, bundle)
        self._sessions: Sessions | None = opened_sessions(self._ort, bundle, options)
        self._binder = Binder(self._ort, self.spec, branches=self.branches)
        self._memory = [one.name for one in self.spec.encoder_outputs()]
        # onnxruntime keeps the memory of all encodes that ever ran at once; more than there are cores end no sooner.
        self._encoding = BoundedSemaphore(usable_cores())
        self._n_sets = 2 if any(one.kind == "recurrent" for one in self.spec.state) else 1

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        """Read the source and return a state with one row a source."""
        self.spec.check_source(source, mask)
        length = source.shape[1]
        if self._bundle.manifest.quantization is not None:
            source, mask = _padded_to_whole(source, mask, self.spec)
        encoder = self._open.encoder
        try:
            with self._encoding:
                outputs = encoder.run(self._memory, {self.spec.source.name: source, self.spec.source_mask.name: mask})
        except Exception as error:  # onnxruntime's have no base of their own
            raise run_failed(self._bundle, ENCODER, error) from error
        sources = {
            self.spec.source.name: source,
            self.spec.source_mask.name: mask,
            **dict(zip(self._memory, outputs, strict=True)),
        }
        # In `standard` graphs the capacity is a number of the graph.
        positions = capacity.target_positions if self.branches else self.spec.max_target
        rows = len(source)
        buffers = self._zeros(rows * capacity.rows_per_source, positions)
        return OrtState(self._binder.values(sources), sources, buffers, capacity, rows, rows, length)

    def step(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]; nothing is copied but them."""
        _check_held(state)
        check_want(self.spec, want)
        position = int(state.position)
        check_step(self.spec, tokens, state.rows, position, state.capacity.target_positions)
        key = (tokens.shape[1], want)
        bound = state.bound.get(key) or self._bound(state, *key)
        bound.tokens[...] = tokens
        try:
            self._open.decoder.run_with_iobinding(bound.bindings[state.n_steps % len(bound.bindings)])
        except Exception as error:
            raise run_failed(self._bundle, DECODER, error) from error
        state.position[...] = position + tokens.shape[1]
        state.n_steps += 1
        return bound.out

    def reorder(self, state: OrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave.

        Only rows that another continues are copied, only their written positions, and buffers stay where they are.
        onnxruntime could be told instead which row holds each position: that is slower (benchmarks/beam_rows.py).
        """
        _check_held(state)
        batch = len(state.sources[self.spec.source_mask.name])
        kept, _ = checked_move(rows, state.rows, batch, state.capacity)
        move_rows(self.spec.state, state.buffers[state.n_steps % len(state.buffers)], rows, int(state.position))
        leaving = kept.tolist() != list(range(batch))
        if leaving:
            state.sources = {name: np.ascontiguousarray(array[kept]) for name, array in state.sources.items()}
            state.inputs = self._binder.values(state.sources)
        if leaving or len(rows) != state.rows:
            _set_aside(state)
        state.rows, state.most_rows = len(rows), max(len(rows), state.most_rows)

    def length_log_probs(self, state: OrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        _check_held(state)
        check_length_head(self.spec)
        log_probs: Floats = state.sources[self.spec.length_log_probs[0].name]
        return log_probs

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M]; None if the bundle has none."""
        return stored_output_rows(self._bundle, ids)

    def release(self, state: OrtState) -> None:
        """Take a state back: its buffers serve the next decode of the same shapes."""
        _check_held(state)
        state.released = True
        zero_rows(self.spec.state, state.buffers, state.most_rows, int(state.position))
        state.position[...] = 0
        _set_aside(state)
        self.pool.give(state.held)
        state.held = NOTHING

    def close(self) -> None:
        """Give the sessions back; a decode that is under way ends with an error."""
        self._sessions = None
        self.pool.clear()

    @property
    def _open(self) -> Sessions:
        if self._sessions is None:
            raise ConfigError("this engine is closed: load the bundle again")
        return self._sessions

    def _zeros(self, rows: int, capacity: int) -> Buffers:
        """Return zeroed buffers, used ones where there are any."""
        sizes = {"rows": rows, "capacity": capacity}
        shapes = [one.sized(sizes) for one in self.spec.state]
        found = self.pool.take(shapes)
        if found is not None:
            return found
        dtypes = [one.dtype for one in self.spec.state]
        return Buffers([[np.zeros(*one) for one in zip(shapes, dtypes, strict=True)] for _ in range(self._n_sets)])

    def _bound(self, state: OrtState, steps: int, want: Want) -> Bound:
        """Return buffers and bindings for calls of ``steps`` tokens that want the same."""
        source = state.sources[self.spec.source_mask.name].shape[1]
        sizes = {"rows": state.rows, "step": steps, "source": source}
        bound = self._binder.bound(self._open.decoder, state.held, state.inputs, sizes, want)
        if bound.out.attention is not None and source > state.source_length:
            bound.out = replace(bound.out, attention=bound.out.attention[..., : state.source_length])
        state.bound[steps, want] = bound
        return bound


def _padded_to_whole(source: Tokens, mask: Mask, spec: ModelSpec) -> tuple[Tokens, Mask]:
    """Return sources padded to a multiple of WHOLE tokens, or to the longest that there may be."""
    missing = min(-(-source.shape[1] // WHOLE) * WHOLE, spec.max_source) - source.shape[1]
    if not missing:
        return source, mask
    sides = ((0, 0), (0, missing))
    return np.pad(source, sides, constant_values=spec.pad_id), np.pad(mask, sides)


def _set_aside(state: OrtState) -> None:
    """Leave bindings to later calls of their shape, of this decode or of another in the same buffers."""
    waiting = state.held.bound
    n_bytes = sum(array.nbytes for array in state.sources.values())
    for key, bound in state.bound.items():
        if n_bytes + bound.n_bytes <= MOST_HELD_BYTES:
            waiting[state.rows, *key] = bound
    while len(waiting) > MOST_SHAPES:
        del waiting[next(iter(waiting))]
    state.bound = {}


def _check_held(state: OrtState) -> None:
    if state.released:
        raise released_state()
