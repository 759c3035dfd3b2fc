"""Reads CTranslate2's model.bin (version 6) without running it; int8 matrices become the floats they stand for."""

import io
import struct
from typing import Any

import numpy as np

from fatdeploy.errors import DataError

VERSION = 6
TYPES = (np.float32, np.int8, np.int16, np.int32, np.float16)


def read_weights(data: bytes) -> dict[str, np.ndarray]:
    """Return all variables by name, aliases included."""
    stream = io.BytesIO(data)
    [version] = _numbers(stream, "I")
    if version != VERSION:
        raise DataError(f"model.bin has version {version}, expected {VERSION}")
    _text(stream)
    _, count = _numbers(stream, "II")  # the first is the revision of the specification
    stored = dict(_variable(stream) for _ in range(count))
    weights = {name: _floats(stored, name) for name in stored}
    [n_aliases] = _numbers(stream, "I")
    for _ in range(n_aliases):
        alias, name = _text(stream), _text(stream)
        weights[alias] = weights[name]
    return weights


def _numbers(stream: io.BytesIO, form: str) -> tuple[Any, ...]:
    return struct.unpack(f"<{form}", stream.read(struct.calcsize(f"<{form}")))


def _text(stream: io.BytesIO) -> str:
    """Return a string; its length includes a terminating zero."""
    [length] = _numbers(stream, "H")
    return stream.read(length)[:-1].decode()


def _variable(stream: io.BytesIO) -> tuple[str, np.ndarray]:
    name = _text(stream)
    [rank] = _numbers(stream, "B")
    shape = _numbers(stream, f"{rank}I")
    kind, size = _numbers(stream, "BI")
    return name, np.frombuffer(stream.read(size), TYPES[kind]).reshape(shape)


def _floats(stored: dict[str, np.ndarray], name: str) -> np.ndarray:
    """Return a variable; an int8 matrix has a scale per row."""
    array, scale = stored[name], stored.get(f"{name}_scale")
    return array if scale is None or array.dtype != np.int8 else array.astype(np.float32) / scale[:, None]
