"""Element types by the names of the contract: their size, and what ONNX, onnxruntime and TensorRT call them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class ElementType:
    """Bytes per element, the number in onnx.proto, and the names that onnxruntime and TensorRT use."""

    n_bytes: int
    onnx: int
    onnxruntime: str
    tensorrt: str


# Not numpy's own table: numpy knows bfloat16 only where ml_dtypes is imported.
ELEMENT_TYPES = {
    "float32": ElementType(4, 1, "float", "FLOAT"),
    "float16": ElementType(2, 10, "float16", "HALF"),
    "bfloat16": ElementType(2, 16, "bfloat16", "BF16"),
    "int64": ElementType(8, 7, "int64", "INT64"),
    "int8": ElementType(1, 3, "int8", "INT8"),
    "uint8": ElementType(1, 2, "uint8", "UINT8"),
    "bool": ElementType(1, 9, "bool", "BOOL"),
}

_FROM_ONNXRUNTIME = {element.onnxruntime: name for name, element in ELEMENT_TYPES.items()}
_FROM_TENSORRT = {element.tensorrt: name for name, element in ELEMENT_TYPES.items()}


def dtype_from_onnxruntime(name: str) -> str:
    """Return the contract's name of a type such as ``tensor(float)``; a type that no contract has keeps its name."""
    element = name.removeprefix("tensor(").removesuffix(")")
    return _FROM_ONNXRUNTIME.get(element, element)


def dtype_from_tensorrt(name: str) -> str:
    """Return the contract's name of a type such as ``HALF``; a type that no contract has keeps its name."""
    return _FROM_TENSORRT.get(name, name)
