"""Products with matrices in blocks of integers: the ops of onnxruntime that replace a MatMul."""

import onnx
from onnx import helper

from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.integers import Blocks
from fatdeploy.export.quantize.lookups import CONTRIB, AddConstant, wide_name

# int8 activations times the weights of blocks, summed in int32. Any other level restores float weights in every call.
ACCURACY_LEVEL = 4


def block_node(
    constant: AddConstant, name: str, stored: Blocks, activation: str, bias: str, output: str
) -> onnx.NodeProto:
    """Return the product with a matrix in blocks; the kernel quantizes each block of a row on its own."""
    inputs = [activation, constant(f"{name}/blocks", stored.values), constant(f"{name}/scales", stored.scales)]
    inputs.append("" if stored.zeros is None else constant(f"{name}/zeros", stored.zeros))
    return helper.make_node(
        "MatMulNBits",
        [*inputs, "", bias] if bias else inputs,
        [output],
        domain=CONTRIB,
        K=stored.n_rows,
        N=len(stored.scales),
        bits=stored.bits,
        block_size=stored.size,
        accuracy_level=ACCURACY_LEVEL,
    )


def split_nodes(
    constant: AddConstant, name: str, stored: SplitBlocks, activation: str, biases: tuple[str, str], output: str
) -> list[onnx.NodeProto]:
    """Return the products with both parts of a split matrix, and the node that joins them."""
    parts = {wide_name(name): stored.wide, name: stored.narrow}
    products = [
        block_node(constant, part, blocks, activation, bias, f"{output}/{blocks.bits}_bits")
        for (part, blocks), bias in zip(parts.items(), biases, strict=True)
    ]
    return [*products, helper.make_node("Concat", [product.output[0] for product in products], [output], axis=-1)]
