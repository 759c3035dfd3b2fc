"""Element types of tensors by the names that specs and manifests use: the bytes of each, and how numpy stores it."""

from typing import Literal

HalfDtype = Literal["float16", "bfloat16"]

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int64": 8, "int8": 1, "bool": 1}

# numpy has no bfloat16: it is the first half of a float32, stored as the bits of an unsigned integer.
BFLOAT16_BITS = "uint16"


def stored_dtype(name: str) -> str:
    """Return the numpy dtype that stores elements of a type."""
    return BFLOAT16_BITS if name == "bfloat16" else name
