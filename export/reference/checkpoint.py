"""Checkpoints: a folder with ``config.json``, ``model.safetensors`` and optionally ``tokenizer.json``."""

import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fatdeploy.errors import CheckpointError, ConfigError, in_one_line
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.folders import replaced_folder, share

CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the model's own tensors that a checkpoint stores, tied ones once, under their first name."""
    named: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        named.setdefault(id(tensor), (name, tensor))
    return dict(named.values())


def save_checkpoint(
    model: ReferenceModel, folder: str | Path, *, tokenizer: str | Path | None = None, force: bool = False
) -> None:
    """Write a model; a crash leaves either the old folder or the new one. ``force`` replaces an old folder."""
    with replaced_folder(Path(folder), force=force) as new:
        (new / CONFIG).write_text(model.config.to_json())
        save_weights(model, new / WEIGHTS)
        if tokenizer is not None:
            shutil.copyfile(tokenizer, new / TOKENIZER)


def save_weights(model: ReferenceModel, path: Path, *, half: bool = False) -> None:
    """Write a model's tensors, each once; ``half`` stores them in half precision."""
    tensors = {name: tensor.detach().contiguous() for name, tensor in stored_tensors(model).items()}
    if half:
        tensors = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    save_file(tensors, path)
    share(path)


def load_checkpoint(folder: str | Path) -> ReferenceModel:
    """Return the model of a checkpoint, ready for inference; all tensors that do not fit are one error."""
    folder = Path(folder)
    model = ReferenceModel(_read_config(folder / CONFIG)).eval()
    stored, expected = _read_tensors(folder / WEIGHTS), stored_tensors(model)
    reasons = [f"missing {name} {list(tensor.shape)}" for name, tensor in expected.items() if name not in stored]
    reasons += [f"extra {name} {list(tensor.shape)}" for name, tensor in stored.items() if name not in expected]
    for name in expected.keys() & stored.keys():
        reasons += _wrong_tensor(name, stored[name], expected[name])
    if reasons:
        raise CheckpointError(in_one_line(f"{folder / WEIGHTS} does not fit its {CONFIG}", sorted(reasons)))
    with torch.no_grad():
        for name, tensor in expected.items():
            tensor.copy_(stored[name])
    return model


def _wrong_tensor(name: str, stored: Tensor, expected: Tensor) -> list[str]:
    if stored.shape != expected.shape:
        return [f"{name} has shape {list(stored.shape)}, expected {list(expected.shape)}"]
    # Half precision is fine, an integer in place of a weight is not.
    if stored.is_floating_point() != expected.is_floating_point():
        return [f"{name} is {stored.dtype}, expected {expected.dtype}"]
    if stored.is_floating_point() and not stored.isfinite().all():
        return [f"{name} contains NaN or infinity"]
    return []


def _read_config(path: Path) -> ModelConfig:
    try:
        return ModelConfig.from_json(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; a checkpoint is a folder with {CONFIG} and {WEIGHTS}"
        ) from error
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from error


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; is the file complete?") from error
