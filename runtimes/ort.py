"""ONNX Runtime: caches in place, bound once a sentence; a step changes the tokens and one number."""

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import DECODER, ENCODER, Bundle
from fatdeploy.errors import BackendUnavailable, BundleError, SpecMismatch, in_one_line
from fatdeploy.runtimes.engine import Capacity, Floats, Rows, StepOut, Want, check_want, sources_of_rows
from fatdeploy.spec import Mask, ModelSpec, TensorSpec, Tokens

Array = NDArray[Any]


def onnxruntime_module() -> Any:
    """Import onnxruntime, or say what to install."""
    try:
        return importlib.import_module("onnxruntime")
    except ImportError as error:
        raise BackendUnavailable(f"onnxruntime cannot be imported ({error}): pip install 'fatdeploy[cpu]'") from error


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
    buffers: list[list[Array]]  # one set for caches, two that change places for recurrent state
    capacity: int
    rows: int
    position: NDArray[np.int64]
    n_steps: int = 0
    bound: dict[tuple[int, Want], Bound] = field(default_factory=dict)


class OrtEngine:
    """Runs a bundle's two graphs on the CPU."""

    def __init__(
        self, bundle: Bundle, *, threads: int | None = None, spinning: bool = True, optimised: bool = True
    ) -> None:
        self._ort = onnxruntime_module()
        self.spec: ModelSpec = bundle.spec
        self._optimised = optimised
        self.branches = bundle.manifest.dialect == "ort"
        self._encoder = self._session(bundle, ENCODER, threads, spinning=spinning)
        self._decoder = self._session(bundle, DECODER, threads, spinning=spinning)
        spec = self.spec
        self._check(self._encoder, ENCODER, spec.encoder_inputs(), spec.encoder_outputs())
        self._check(self._decoder, DECODER, spec.decoder_inputs(branches=self.branches), spec.decoder_outputs())

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        """Read the source and return a state with one row a source."""
        self.spec.check_source(source, mask)
        outputs = self._encoder.run(None, {self.spec.source.name: source, self.spec.source_mask.name: mask})
        names = [one.name for one in self.spec.encoder_outputs()]
        sources = {
            self.spec.source.name: source,
            self.spec.source_mask.name: mask,
            **dict(zip(names, outputs, strict=True)),
        }
        # In `standard` graphs the capacity is a number of the graph.
        positions = capacity.target_positions if self.branches else self.spec.max_target
        buffers = [self._zeros(len(source), positions) for _ in range(2 if self._recurrent else 1)]
        return OrtState(
            self._values(sources), sources, buffers, capacity.target_positions, len(source), np.zeros((), np.int64)
        )

    def step(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]; nothing is copied but them."""
        check_want(self.spec, want)
        self.spec.check_tokens(tokens, int(state.position), state.capacity)
        if len(tokens) != state.rows:
            raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {state.rows}")
        key = (tokens.shape[1], want)
        if key not in state.bound:
            state.bound[key] = self._bound(state, *key)
        bound = state.bound[key]
        bound.tokens[...] = tokens
        self._decoder.run_with_iobinding(bound.bindings[state.n_steps % len(bound.bindings)])
        state.position += tokens.shape[1]
        state.n_steps += 1
        return bound.out

    def reorder(self, state: OrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave."""
        if rows.size and not (rows.min() >= 0 and rows.max() < state.rows):
            raise SpecMismatch(f"reorder refused: the state has rows 0…{state.rows - 1}, found {rows.tolist()}")
        batch = len(state.sources[self.spec.source_mask.name])
        kept, _ = sources_of_rows(rows, state.rows // batch)
        if not np.array_equal(kept, np.arange(batch)):
            state.sources = {name: np.ascontiguousarray(array[kept]) for name, array in state.sources.items()}
            state.inputs = self._values(state.sources)
        current = state.n_steps % len(state.buffers)
        moved = [np.ascontiguousarray(array[rows]) for array in state.buffers[current]]
        state.buffers = [moved, *([np.empty_like(array) for array in moved] for _ in state.buffers[1:])]
        state.rows, state.n_steps = len(rows), 0
        state.bound.clear()

    def length_log_probs(self, state: OrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        if not self.spec.length_log_probs:
            raise SpecMismatch("this model has no length head: its targets end with EOS")
        log_probs: Floats = state.sources[self.spec.length_log_probs[0].name]
        return log_probs

    def release(self, state: OrtState) -> None:
        """Drop a state."""

    def close(self) -> None:
        """Give the sessions back."""
        del self._encoder, self._decoder

    @property
    def _recurrent(self) -> bool:
        return any(one.kind == "recurrent" for one in self.spec.state)

    def _session(self, bundle: Bundle, name: str, threads: int | None, *, spinning: bool) -> Any:
        options = self._ort.SessionOptions()
        options.log_severity_level = 3
        if not self._optimised:
            options.graph_optimization_level = self._ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        if threads is not None:
            options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "1" if spinning else "0")
        # Two sessions are two pools: an idle one that spins would steal the other's cores.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        return self._ort.InferenceSession(
            str(bundle.file(name)),
            options,
            providers=["CPUExecutionProvider"],
            # The fused kernel is slower than the two ops it replaces.
            disabled_optimizers=["SkipLayerNormFusion"],
        )

    def _check(self, session: Any, name: str, inputs: tuple[TensorSpec, ...], outputs: tuple[TensorSpec, ...]) -> None:
        """Raise unless a graph's inputs and outputs are those of the contract."""
        reasons = []
        for kind, found, expected in (
            ("input", session.get_inputs(), inputs),
            ("output", session.get_outputs(), outputs),
        ):
            names = [one.name for one in found], [one.name for one in expected]
            if names[0] != names[1]:
                reasons.append(f"{kind}s must be {names[1]}, found {names[0]}")
            else:
                reasons += [
                    f"{one.name} must have {len(spec.shape)} axes, found {one.shape}"
                    for one, spec in zip(found, expected, strict=True)
                    if len(one.shape) != len(spec.shape)
                    or any(
                        isinstance(size, int) and size != there
                        for size, there in zip(spec.shape, one.shape, strict=True)
                    )
                ]
        if reasons:
            raise BundleError(in_one_line(f"{name} does not fit the bundle's contract", reasons))

    def _zeros(self, rows: int, capacity: int) -> list[Array]:
        sizes = {"rows": rows, "capacity": capacity}
        return [np.zeros(one.sized(sizes), one.dtype) for one in self.spec.state]

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
        sets = state.buffers
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
        binding = self._decoder.io_binding()
        for name, one in inputs.items():
            binding.bind_ortvalue_input(name, one)
        for name, array in results.items():
            binding.bind_ortvalue_output(name, value(array))
        for spec, array in zip(self.spec.past, past, strict=True):
            binding.bind_ortvalue_input(spec.name, value(array))
        for spec, array in zip(self.spec.present, present, strict=True):
            binding.bind_ortvalue_output(spec.name, value(array))
        return binding
