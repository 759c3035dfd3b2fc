"""What the decoder graph reads and writes, bound once per shape of call; a decode changes sources and results."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fatdeploy.runtimes.engines.ort.buffers import Array, Buffers
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.runtimes.engines.results import step_out_from_arrays, wanted_results
from fatdeploy.spec import ModelSpec, Tokens

# A waiting binding keeps its last sources and results alive. That makes short requests faster; for large ones, where a
# step takes much longer than binding, it would waste memory.
MOST_HELD_BYTES = 2**18
MOST_SHAPES = 4


@dataclass
class BoundCall:
    """Buffers of one shape of call, and the bindings that use them: two that alternate for recurrent state."""

    tokens: Tokens
    out: StepOut
    bindings: list[Any]
    n_bytes: int = 0  # of the results
    fed: dict[str, Array] = field(default_factory=dict)  # what is copied to a device before each run


class Binder:
    """Binds the tensors of one model's decoder."""

    def __init__(self, ort: Any, spec: ModelSpec, *, branches: bool) -> None:
        self.spec, self.branches = spec, branches
        self._value = ort.OrtValue.ortvalue_from_numpy
        self._result = self._value  # for an array that a run writes a result to
        self._read = frozenset(tensor.name for tensor in spec.decoder_inputs(branches=branches))
        self._tokens, self._position, self._want = (tensor.name for tensor in (spec.tokens, spec.position, spec.want))
        self._past, self._present = ([tensor.name for tensor in part] for part in (spec.past, spec.present))
        self._results = {want: wanted_results(spec, want) for want in Want}

    def values(self, arrays: dict[str, Array]) -> dict[str, Any]:
        """Return the arrays that the decoder reads as onnxruntime's values on the same memory."""
        return {name: self._value(array) for name, array in arrays.items() if name in self._read}

    def bound(
        self, decoder: Any, buffers: Buffers, sources: dict[str, Any], sizes: dict[str, int], want: Want
    ) -> BoundCall:
        """Return what a step of these sizes needs: new arrays for results, and bindings, reused where possible."""
        shape = sizes["rows"], sizes["step"], want
        bound = buffers.bound.pop(shape, None) or self._new_bound(decoder, buffers, *shape)
        arrays = {tensor.name: np.empty(tensor.sized(sizes), tensor.dtype) for tensor in self._results[want]}
        results = {name: self._result(array) for name, array in arrays.items()}
        for binding in bound.bindings:
            for name, value in sources.items():
                binding.bind_ortvalue_input(name, value)
            for name, value in results.items():
                binding.bind_ortvalue_output(name, value)
        n_bytes = sum(array.nbytes for array in arrays.values())
        return BoundCall(bound.tokens, step_out_from_arrays(self.spec, arrays), bound.bindings, n_bytes, bound.fed)

    def _new_bound(self, decoder: Any, buffers: Buffers, rows: int, steps: int, want: Want) -> BoundCall:
        """Return bindings that still lack sources and results."""
        tokens = np.empty((rows, steps), np.int64)
        step_inputs = {self._tokens: tokens, self._position: buffers.first_positions(rows)}
        if self.branches:
            step_inputs[self._want] = np.array(int(want))
        inputs = self.values(step_inputs)
        sets = [[self._value(array[:rows]) for array in arrays] for arrays in buffers.sets]
        bindings = []
        for past, present in zip(sets, [*sets[1:], sets[0]], strict=True):
            binding = decoder.io_binding()
            for name, value in (*inputs.items(), *zip(self._past, past, strict=True)):
                binding.bind_ortvalue_input(name, value)
            for name, value in zip(self._present, present, strict=True):
                binding.bind_ortvalue_output(name, value)
            bindings.append(binding)
        return BoundCall(tokens, StepOut(), bindings)
