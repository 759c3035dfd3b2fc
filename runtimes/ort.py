"""ONNX Runtime: caches in place, bound once a sentence; a step changes the tokens and one number."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import DECODER, ENCODER, Bundle
from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.buffers import Array, BufferPool, Buffers, move_rows, zero_rows
from fatdeploy.runtimes.engine import Capacity, Floats, Ids, Rows, StepOut, Want, check_want, sources_of_rows
from fatdeploy.runtimes.ort_sessions import (
    OrtOptions,
    Provider,
    Sessions,
    onnxruntime_module,
    opened_sessions,
    run_failed,
)
from fatdeploy.runtimes.output_matrix import stored_output_rows
from fatdeploy.spec import Mask, ModelSpec, Tokens


@dataclass
class Bound:
    """Buffers of one shape of call, and the bindings that use them: two that alternate for recurrent state."""

    tokens: Tokens
    out: StepOut
    bindings: list[Any]


@dataclass
class OrtState:
    """Memory of the sources, and the decoder's state: arrays that onnxruntime writes in place."""

    inputs: dict[str, Any]  # what stays the same from step to step, as OrtValues
    sources: dict[str, Array]  # the same as arrays
    buffers: Buffers  # of all rows that there may be; a step is given the first
    capacity: Capacity
    rows: int
    most_rows: int  # that there ever were
    position: NDArray[np.int64]
    n_steps: int = 0
    bound: dict[tuple[int, Want], Bound] = field(default_factory=dict)
    released: bool = False


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
    ) -> None:
        options = OrtOptions(threads=threads, spinning=spinning, providers=providers, optimised=optimised)
        self._ort = onnxruntime_module()
        self._bundle = bundle
        self.spec: ModelSpec = bundle.spec
        self.branches = bundle.manifest.dialect == "ort"
        self.pool = BufferPool()
        self._sessions: Sessions | None = opened_sessions(self._ort, bundle, options)

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        """Read the source and return a state with one row a source."""
        self.spec.check_source(source, mask)
        encoder = self._open.encoder
        try:
            outputs = encoder.run(None, {self.spec.source.name: source, self.spec.source_mask.name: mask})
        except Exception as error:  # onnxruntime's have no base of their own
            raise run_failed(self._bundle, ENCODER, error) from error
        names = [one.name for one in self.spec.encoder_outputs()]
        sources = {
            self.spec.source.name: source,
            self.spec.source_mask.name: mask,
            **dict(zip(names, outputs, strict=True)),
        }
        # In `standard` graphs the capacity is a number of the graph.
        positions = capacity.target_positions if self.branches else self.spec.max_target
        rows = len(source)
        buffers = self._zeros(rows * capacity.rows_per_source, positions)
        return OrtState(self._values(sources), sources, buffers, capacity, rows, rows, np.zeros((), np.int64))

    def step(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]; nothing is copied but them."""
        _check_held(state)
        check_want(self.spec, want)
        self.spec.check_tokens(tokens, int(state.position), state.capacity.target_positions)
        if len(tokens) != state.rows:
            raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {state.rows}")
        key = (tokens.shape[1], want)
        if key not in state.bound:
            state.bound[key] = self._bound(state, *key)
        bound = state.bound[key]
        bound.tokens[...] = tokens
        decoder, binding = self._open.decoder, bound.bindings[state.n_steps % len(bound.bindings)]
        try:
            decoder.run_with_iobinding(binding)
        except Exception as error:
            raise run_failed(self._bundle, DECODER, error) from error
        state.position += tokens.shape[1]
        state.n_steps += 1
        return bound.out

    def reorder(self, state: OrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave.

        Only rows that another continues are copied, only their written positions, and buffers stay where they are.
        """
        _check_held(state)
        if rows.size and not (rows.min() >= 0 and rows.max() < state.rows):
            raise SpecMismatch(f"reorder refused: the state has rows 0…{state.rows - 1}, found {rows.tolist()}")
        batch = len(state.sources[self.spec.source_mask.name])
        kept, each = sources_of_rows(rows, state.rows // batch)
        if each > state.capacity.rows_per_source:
            raise SpecMismatch(
                f"reorder refused: {each} rows a source, the state was encoded for a capacity of "
                f"rows_per_source = {state.capacity.rows_per_source}"
            )
        move_rows(self.spec.state, state.buffers[state.n_steps % len(state.buffers)], rows, int(state.position))
        leaving = not np.array_equal(kept, np.arange(batch))
        if leaving:
            state.sources = {name: np.ascontiguousarray(array[kept]) for name, array in state.sources.items()}
            state.inputs = self._values(state.sources)
        if leaving or len(rows) != state.rows:
            state.bound.clear()
        state.rows, state.most_rows = len(rows), max(len(rows), state.most_rows)

    def length_log_probs(self, state: OrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        _check_held(state)
        if not self.spec.length_log_probs:
            raise SpecMismatch("this model has no length head: its targets end with EOS")
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
        self.pool.give(state.buffers)
        state.buffers, state.bound = [], {}

    def close(self) -> None:
        """Give the sessions back; a decode that is under way ends with an error."""
        self._sessions = None
        self.pool.clear()

    @property
    def _open(self) -> Sessions:
        if self._sessions is None:
            raise ConfigError("this engine is closed: load the bundle again")
        return self._sessions

    @property
    def _recurrent(self) -> bool:
        return any(one.kind == "recurrent" for one in self.spec.state)

    def _zeros(self, rows: int, capacity: int) -> Buffers:
        """Return zeroed buffers, used ones where there are any."""
        sizes = {"rows": rows, "capacity": capacity}
        shapes = [one.sized(sizes) for one in self.spec.state]
        sets = 2 if self._recurrent else 1
        return self.pool.take(shapes) or [
            [np.zeros(shape, one.dtype) for shape, one in zip(shapes, self.spec.state, strict=True)]
            for _ in range(sets)
        ]

    def _values(self, arrays: dict[str, Array]) -> dict[str, Any]:
        wanted = {one.name for one in self.spec.decoder_inputs(branches=self.branches)}
        value = self._ort.OrtValue.ortvalue_from_numpy
        return {name: value(array) for name, array in arrays.items() if name in wanted}

    def _bound(self, state: OrtState, steps: int, want: Want) -> Bound:
        """Return buffers and bindings for calls of ``steps`` tokens that want the same."""
        sizes = {"rows": state.rows, "step": steps, "source": state.sources[self.spec.source_mask.name].shape[1]}
        spec = self.spec
        asked = {Want.HIDDEN: (), Want.LOGITS: (spec.logits,), Want.TOPK: spec.best}[want]
        wanted = (*spec.hidden, *asked, *spec.attention)
        results = {one.name: np.empty(one.sized(sizes), one.dtype) for one in wanted}
        tokens = np.empty((state.rows, steps), np.int64)
        changing = {self.spec.tokens.name: tokens, self.spec.position.name: state.position}
        if self.branches:
            changing[self.spec.want.name] = np.array(int(want))
        inputs = {**state.inputs, **self._values(changing)}
        sets = [[array[: state.rows] for array in arrays] for arrays in state.buffers]
        pairs = [(sets[i], sets[(i + 1) % len(sets)]) for i in range(len(sets))]
        bindings = [self._binding(inputs, results, past, present) for past, present in pairs]
        return Bound(tokens, self._step_out(results), bindings)

    def _step_out(self, results: dict[str, Array]) -> StepOut:
        spec = self.spec
        return StepOut(
            hidden=next((results[one.name] for one in spec.hidden), None),
            logits=results.get(spec.logits.name),
            top_log_probs=results.get(spec.best[0].name),
            top_ids=results.get(spec.best[1].name),
            attention=next((results[one.name] for one in spec.attention), None),
        )

    def _binding(
        self, inputs: dict[str, Any], results: dict[str, Array], past: list[Array], present: list[Array]
    ) -> Any:
        value = self._ort.OrtValue.ortvalue_from_numpy
        binding = self._open.decoder.io_binding()
        for name, one in inputs.items():
            binding.bind_ortvalue_input(name, one)
        for name, array in results.items():
            binding.bind_ortvalue_output(name, value(array))
        for spec, array in zip(self.spec.past, past, strict=True):
            binding.bind_ortvalue_input(spec.name, value(array))
        for spec, array in zip(self.spec.present, present, strict=True):
            binding.bind_ortvalue_output(spec.name, value(array))
        return binding


def _check_held(state: OrtState) -> None:
    """Raise if a state was given back: its buffers may be another decode's by now."""
    if state.released:
        raise SpecMismatch("this state was released and cannot be used any more: encode the source again")
