"""Random inputs on which a simplified graph must compute what the traced one computes."""

import numpy as np

from fatdeploy.export.tracing.simplify import Arrays
from fatdeploy.runtimes.engines.protocol import Want
from fatdeploy.spec import ModelSpec, TensorSpec
from fatdeploy.targets import Dialect

# Shapes on which a simplified graph must equal the traced one: batch, rows per source, source, step, capacity.
SAMPLES = ((1, 1, 1, 1, 4), (2, 3, 5, 4, 9), (3, 1, 9, 2, 12), (2, 2, 3, 1, 6))


def drawn_samples(spec: ModelSpec, inputs: tuple[TensorSpec, ...], dialect: Dialect) -> list[Arrays]:
    """Return random inputs of each shape."""
    samples = []
    for seed, (batch, rows_per_source, source, step, capacity) in enumerate(SAMPLES):
        capacity = min(capacity, spec.max_target) if dialect == "ort" else spec.max_target  # noqa: PLW2901
        sizes = {"batch": batch, "rows": batch * rows_per_source, "capacity": capacity}
        sizes |= {"source": min(source, spec.max_source), "step": min(step, spec.max_target)}
        draw = np.random.default_rng(seed)
        samples.append({tensor.name: _drawn(tensor, sizes, spec, draw) for tensor in inputs})
    return samples


def _drawn(tensor: TensorSpec, sizes: dict[str, int], spec: ModelSpec, draw: np.random.Generator) -> np.ndarray:
    shape = tensor.sized(sizes)
    if tensor == spec.want:
        return np.array(int(Want.TOPK))
    if tensor == spec.position:
        # Rows with several tokens begin at 0: not every op takes them after a past.
        last = sizes["capacity"] - 1 if sizes["step"] == 1 else 0
        return draw.integers(0, last + 1, shape)
    if tensor.dtype == "bool":
        # Right-padded: every row has its first token.
        return np.arange(shape[-1]) < draw.integers(1, shape[-1] + 1, (*shape[:-1], 1))
    if tensor.dtype == "int64" and tensor in spec.past:
        return draw.integers(0, sizes["source"], shape)
    if tensor.dtype == "int64":
        return draw.integers(0, spec.n_source_ids if tensor == spec.source else spec.vocab_size, shape)
    if tensor in spec.past:
        # Sums of features are positive; a normaliser near zero would turn rounding into a difference.
        return draw.uniform(0.5, 1.5, shape).astype(np.float32)
    return draw.standard_normal(shape, np.float32)
