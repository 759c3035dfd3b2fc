"""The weights of a folder, tensor by tensor: safetensors or pickles without code, whole or in shards."""

import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fatdeploy.errors import CheckpointError, in_one_line
from fatdeploy.export.models.hugging_face.config_keys import read_json_object

SAFETENSORS, PICKLE = "model.safetensors", "pytorch_model.bin"
INDEX = ".index.json"
# In the order in which transformers looks for them.
FILES = (SAFETENSORS, SAFETENSORS + INDEX, PICKLE, PICKLE + INDEX)
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: described without reading it, and mapped into memory when it is read."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], Tensor]

    @property
    def is_weight(self) -> bool:
        """Whether the numbers are of a kind that weights are stored in."""
        return self.dtype in _DTYPES.values()


StoredTensors = Mapping[str, StoredTensor]


@contextmanager
def stored_weights(folder: Path) -> Iterator[StoredTensors]:
    """Give all tensors of a folder by name, while the block runs; files that cannot be read are one error."""
    paths, listed = _weight_files(folder)
    stored: dict[str, StoredTensor] = {}
    reasons = []
    with ExitStack() as files:
        for path in paths:
            try:
                tensors = _pickled(path) if path.suffix == ".bin" else _mapped(path, files)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            absent = [name for name, file in listed.items() if file == path.name and name not in tensors]
            reasons += [f"{path.name} lacks {name}, which the index says it has" for name in absent]
            stored.update(tensors)
        if reasons:
            raise CheckpointError(in_one_line(f"cannot read the weights of {folder}", reasons))
        yield stored


def _weight_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Return the files with weights and, for shards, which file holds which tensor."""
    name = next((name for name in FILES if (folder / name).is_file()), None)
    if name is None:
        others = sorted(path.name for path in folder.iterdir() if path.suffix in {".h5", ".msgpack", ".ot", ".gguf"})
        others += sorted(path.name for path in folder.glob("*.safetensors"))
        also = f"; {', '.join(others)} cannot be read: save the model with save_pretrained" if others else ""
        raise CheckpointError(f"{folder} has no weights: expected one of {', '.join(FILES)}{also}")
    if not name.endswith(INDEX):
        return [folder / name], {}
    listed = _listed(folder / name)
    return [folder / file for file in dict.fromkeys(listed.values())], listed


def _listed(index: Path) -> dict[str, str]:
    listed = read_json_object(index).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise CheckpointError(f"{index} has no weight_map of tensors and their files")
    files = list(dict.fromkeys(listed.values()))
    suffix = ".bin" if index.name.startswith(PICKLE) else ".safetensors"
    # A name is never a path: an index must not lead out of its folder.
    reasons = [
        f"{file!r} is not the name of a {suffix} file in the folder"
        for file in files
        if not (isinstance(file, str) and file.endswith(suffix)) or {"/", "\\", ":"} & set(file)
    ]
    reasons = reasons or [f"{file} is missing" for file in files if not (index.parent / file).is_file()]
    if reasons:
        raise CheckpointError(in_one_line(f"{index} cannot be followed", reasons))
    return listed


def _mapped(path: Path, files: ExitStack) -> dict[str, StoredTensor]:
    try:
        # safetensors has no types for what it returns.
        file: Any = files.enter_context(safe_open(path, framework="pt"))
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - it is not a mapping
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path.name}: {error}; is the file complete?") from error
    return {
        name: StoredTensor(
            tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), part.get_dtype()), _reader(file, name)
        )
        for name, part in slices.items()
    }


def _reader(file: Any, name: str) -> Callable[[], Tensor]:
    return lambda: file.get_tensor(name)


def _pickled(path: Path) -> dict[str, StoredTensor]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickles that other programs wrote: they are read, or refused below
            # Files written before torch 1.6 are no archives and cannot be mapped.
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except UnpicklingError as error:
        raise CheckpointError(
            f"{path.name} is damaged, or has code in it, which was not executed; save the model as safetensors"
        ) from error
    except (OSError, RuntimeError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        cause = str(error).partition("\n")[0]
        raise CheckpointError(f"{path.name}: {cause or type(error).__name__}; is the file complete?") from error
    if not isinstance(content, dict) or not all(isinstance(tensor, Tensor) for tensor in content.values()):
        raise CheckpointError(f"{path.name} is not a dictionary of tensors")
    return {name: _in_memory(tensor) for name, tensor in content.items()}


def _in_memory(tensor: Tensor) -> StoredTensor:
    return StoredTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), lambda: tensor)
