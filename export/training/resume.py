"""The state that a killed training continues from: one file with weights, optimiser and random state."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import AdamW

from fatdeploy.errors import CheckpointError
from fatdeploy.export.reference.checkpoint import stored_tensors
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.training.folder import GO_ON, replaced_file
from fatdeploy.folders import share

STATE = "state.safetensors"
_RECORD, _RANDOM, _CUDA_RANDOM = "record", "random", "random_cuda"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # the state of AdamW for each parameter


def save_state(
    path: Path, model: ReferenceModel, optimiser: AdamW, record: dict[str, Any], *, advice: str = GO_ON
) -> None:
    """Write everything the next step depends on; ``record`` is JSON, ``advice`` is what to do if writing fails."""
    tensors = {f"model.{name}": tensor.detach() for name, tensor in stored_tensors(model).items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for parameter, state in optimiser.state.items():
        tensors |= {f"{kind}.{names[id(parameter)]}": tensor for kind, tensor in state.items()}
    tensors[_RANDOM] = torch.get_rng_state()
    if _on_cuda(model):
        tensors[_CUDA_RANDOM] = torch.cuda.get_rng_state()
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}

    def write(new: Path) -> None:
        save_file(whole, new, metadata={_RECORD: json.dumps(record)})
        share(new)

    replaced_file(path, write, advice=advice)


def load_record(path: Path) -> dict[str, Any]:
    """Return the record of a saved state."""
    return _read(path)[1]


def load_state(path: Path, model: ReferenceModel, optimiser: AdamW) -> dict[str, Any]:
    """Load a saved state into model, optimiser and torch's random generator; return its record."""
    tensors, record = _read(path)
    try:
        with torch.no_grad():
            for name, tensor in stored_tensors(model).items():
                tensor.copy_(tensors[f"model.{name}"])
        for name, parameter in model.named_parameters():
            # A parameter that no batch has used has no moments yet.
            if f"step.{name}" in tensors:
                optimiser.state[parameter] = {kind: tensors[f"{kind}.{name}"].to(parameter.device) for kind in _MOMENTS}
        torch.set_rng_state(tensors[_RANDOM])
        if _on_cuda(model):
            torch.cuda.set_rng_state(tensors[_CUDA_RANDOM])
    except (KeyError, RuntimeError) as error:
        raise _foreign(path, str(error)) from error
    return record


def _on_cuda(model: ReferenceModel) -> bool:
    return model.source_embedding.weight.is_cuda


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        with safe_open(path, framework="pt") as file:
            record = json.loads((file.metadata() or {}).get(_RECORD, "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; start over with --force") from error
    if not isinstance(record, dict):
        raise _foreign(path, "it has no record")
    return tensors, record


def _foreign(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} is not the state of this training ({reason}); start over with --force")
