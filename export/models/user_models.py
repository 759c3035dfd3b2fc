"""Your own models: found by ``package.module:factory``, and checked against their spec before tracing."""

import importlib
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from fatdeploy.errors import ConfigError, ExportFailed, in_one_line
from fatdeploy.export.models.exportable import Exportable, Memory, exportable_model
from fatdeploy.spec import ModelSpec, TensorSpec

# Two sources and a target of four tokens: enough to test padding, rows and a second step.
LENGTHS, STEPS = (3, 2), 4


def is_factory(source: str) -> bool:
    """Return whether a source is written ``package.module:factory``."""
    module, colon, name = source.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def model_from_factory(source: str) -> nn.Module:
    """Return the model of ``package.module:factory``; modules are found as ``python -m`` finds them."""
    module_name, _, name = source.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {source}: {error}; expected package.module:factory") from error
    model = factory()
    check_user_model(exportable_model(model))
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{source} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


@torch.inference_mode()
def check_user_model(model: Exportable) -> None:
    """Raise ExportFailed unless memory and state fit the spec, and ``forward`` agrees with repeated steps."""
    spec = model.spec
    source, mask, tokens = _drawn_example(spec)
    (batch, longest), steps = source.shape, tokens.shape[1]
    sizes = {"batch": batch, "rows": batch, "source": longest, "capacity": spec.max_target}
    memory = Memory(source, mask, model.encoded(source, mask))
    state = model.started(memory, spec.max_target)
    own = memory.tensors[: len(memory.tensors) - len(spec.starts)]
    encoded = _wrong_tensors("encode", own, spec.memory, sizes)
    _refuse([*encoded, *(_wrong_tensors("start", state, spec.state, sizes) or _wrong_starts(state, spec))])
    whole = model.inner(source, mask, tokens)
    _refuse(_wrong_logits("forward", whole, [batch, steps, spec.vocab_size]))
    for position in range(steps):
        output, state = model.called(tokens[:, position : position + 1], position, state, memory)
        logits = model.logits(output, memory)
        stepped = _wrong_tensors("step", state, spec.state, sizes)
        _refuse([*stepped, *_wrong_logits("step", logits, [batch, 1, spec.vocab_size])])
        _check_equal(position, logits[:, 0], whole[:, position])


def _drawn_example(spec: ModelSpec) -> tuple[Tensor, Tensor, Tensor]:
    lengths = np.minimum(LENGTHS, spec.max_source)
    draw = np.random.default_rng(0)
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    source = torch.from_numpy(draw.integers(0, spec.n_source_ids, mask.shape)).masked_fill(~mask, spec.pad_id)
    tokens = torch.from_numpy(draw.integers(0, spec.vocab_size, (len(lengths), min(STEPS, spec.max_target))))
    tokens[:, 0] = spec.bos_id
    return source, mask, tokens


def _refuse(reasons: list[str]) -> None:
    if reasons:
        raise ExportFailed(in_one_line("the model does not fit its spec", reasons))


def _wrong_logits(method: str, logits: Tensor, expected: list[int]) -> list[str]:
    shape = list(logits.shape)
    return [] if shape == expected else [f"{method} returned logits {shape}, expected {expected}"]


def _check_equal(position: int, stepped: Tensor, expected: Tensor) -> None:
    """Raise ExportFailed unless a step returned the logits of ``forward`` at its position."""
    bound = 1e-5 * max(1.0, float(expected.abs().max()))
    difference = float((stepped - expected).abs().max())
    if not difference <= bound:
        raise ExportFailed(
            f"step and forward disagree at position {position} by {difference:.1e} in logits, more than {bound:.1e}; "
            "the state must carry all that forward knows about earlier positions"
        )


def _wrong_starts(state: tuple[Tensor, ...], spec: ModelSpec) -> list[str]:
    return [
        f"start returned {expected.name} with values other than 0, the spec says that it starts at zero; give its "
        'StateSpec start="source" and it is computed with the memory'
        for tensor, expected in zip(state, spec.state, strict=True)
        if expected.start == "zero" and tensor.count_nonzero()
    ]


def _wrong_tensors(
    method: str, tensors: tuple[Tensor, ...], specs: tuple[TensorSpec, ...], sizes: dict[str, int]
) -> list[str]:
    if len(tensors) != len(specs):
        return [f"{method} returned {len(tensors)} tensors, the spec describes {len(specs)}"]
    reasons = []
    for tensor, spec in zip(tensors, specs, strict=True):
        actual = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        expected = f"{spec.dtype} {list(spec.sized(sizes))}"
        if actual != expected:
            reasons.append(f"{method} returned {spec.name} as {actual}, the spec says {expected}")
    return reasons
