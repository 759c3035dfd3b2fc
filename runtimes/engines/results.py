"""Which tensors a step must return for what the decode loop wants, and the step's result made of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.spec import ModelSpec, TensorSpec


def wanted_results(spec: ModelSpec, want: Want) -> tuple[TensorSpec, ...]:
    """Return the tensors to fetch from a step: what is wanted, and what costs nothing beside it."""
    scores: dict[Want, Sequence[TensorSpec]] = {Want.HIDDEN: (), Want.LOGITS: (spec.logits,), Want.TOPK: spec.best}
    return (*spec.hidden, *scores[want], *spec.attention)


def step_out_from_arrays(spec: ModelSpec, arrays: Mapping[str, NDArray[Any]]) -> StepOut:
    """Return the result of a step whose tensors are in ``arrays`` by name; the others are None."""
    top_log_probs, top_ids = (arrays.get(tensor.name) for tensor in spec.best)
    hidden, attention = (
        next((arrays.get(tensor.name) for tensor in part), None) for part in (spec.hidden, spec.attention)
    )
    return StepOut(hidden, arrays.get(spec.logits.name), top_log_probs, top_ids, attention)
