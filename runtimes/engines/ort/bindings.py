"""What the decoder graph reads and writes, bound once for a shape of call; a decode changes sources and results."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fatdeploy.runtimes.engines.ort.buffers import Array, Buffers
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.spec import ModelSpec, TensorSpec, Tokens

# Bindings that wait hold the sources that they read last, and the results. A short request is quicker for it; of more
# bytes, where a step takes much longer than binding, it would be a waste.
MOST_HELD_BYTES = 2**18
MOST_SHAPES = 4


@dataclass
class Bound:
    """Buffers of one shape of call, and the bindings that use them: two that alternate for recurrent state."""

    tokens: Tokens
    out: StepOut
    bindings: list[Any]
    n_bytes: int = 0  # of results
    fed: dict[str, Array] = field(default_factory=dict)  # what a device is given anew before each run


class Binder:
    """Binds the tensors of one model's decoder."""

    def __init__(self, ort: Any, spec: ModelSpec, *, branches: bool) -> None:
        self.spec, self.branches = spec, branches
        self._value = ort.OrtValue.ortvalue_from_numpy
        self._result = self._value  # of an array that a run leaves a result in
        self._read = frozenset(one.name for one in spec.decoder_inputs(branches=branches))
        self._tokens, self._position, self._want = (one.name for one in (spec.tokens, spec.position, spec.want))
        self._past, self._present = ([one.name for one in kind] for kind in (spec.past, spec.present))
        asked: dict[Want, Sequence[TensorSpec]] = {Want.HIDDEN: (), Want.LOGITS: (spec.logits,), Want.TOPK: spec.best}
        self._results = {want: (*spec.hidden, *asked[want], *spec.attention) for want in Want}
        # Fields of StepOut and the tensors that they are.
        self._fields = {
            one.name: field
            for field, ones in {
                "hidden": spec.hidden,
                "logits": (spec.logits,),
                "top_log_probs": spec.best[:1],
                "top_ids": spec.best[1:],
                "attention": spec.attention,
            }.items()
            for one in ones
        }

    def values(self, arrays: dict[str, Array]) -> dict[str, Any]:
        """Return those of some arrays that the decoder reads, as onnxruntime's values on the same memory."""
        return {name: self._value(array) for name, array in arrays.items() if name in self._read}

    def bound(
        self, decoder: Any, buffers: Buffers, sources: dict[str, Any], sizes: dict[str, int], want: Want
    ) -> Bound:
        """Return what a step of some size needs: results of its own, and bindings, used ones where there are any."""
        shape = sizes["rows"], sizes["step"], want
        made = buffers.bound.pop(shape, None) or self._made(decoder, buffers, *shape)
        arrays = {one.name: np.empty(one.sized(sizes), one.dtype) for one in self._results[want]}
        results = {name: self._result(array) for name, array in arrays.items()}
        for binding in made.bindings:
            for name, value in sources.items():
                binding.bind_ortvalue_input(name, value)
            for name, value in results.items():
                binding.bind_ortvalue_output(name, value)
        out = StepOut(**{self._fields[name]: array for name, array in arrays.items()})
        n_bytes = sum(array.nbytes for array in arrays.values())
        return Bound(made.tokens, out, made.bindings, n_bytes, made.fed)

    def _made(self, decoder: Any, buffers: Buffers, rows: int, steps: int, want: Want) -> Bound:
        """Return bindings to which sources and results are missing."""
        tokens = np.empty((rows, steps), np.int64)
        changing = {self._tokens: tokens, self._position: buffers.position}
        if self.branches:
            changing[self._want] = np.array(int(want))
        inputs = self.values(changing)
        sets = [[self._value(array[:rows]) for array in arrays] for arrays in buffers.sets]
        bindings = []
        for past, present in zip(sets, [*sets[1:], sets[0]], strict=True):
            binding = decoder.io_binding()
            for name, value in (*inputs.items(), *zip(self._past, past, strict=True)):
                binding.bind_ortvalue_input(name, value)
            for name, value in zip(self._present, present, strict=True):
                binding.bind_ortvalue_output(name, value)
            bindings.append(binding)
        return Bound(tokens, StepOut(), bindings)
