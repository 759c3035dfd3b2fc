"""Which ops of a graph may compute in half precision, and which must stay in float32.

A *matrix* op computes in half: its sums run in float32 inside the kernels. An *exact* op never does: it sums, grows
or divides, and half has only five bits of exponent or eight of mantissa. A *carrier* has no such needs and follows its
neighbours. An op that is not listed here is exact.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Literal

import onnx
from onnx import TensorProto

from fatdeploy.errors import ExportFailed

Role = Literal["matrix", "carrier", "exact"]

# fmt: off
MATRIX_OPS = frozenset([
    "MatMul", "FusedMatMul", "Gemm", "Conv", "Einsum", "Attention", "MultiHeadAttention", "GroupQueryAttention",
    "TensorScatter",
    "LayerNormalization", "RMSNormalization",  # keep their sums in float32 themselves (`stash_type`)
])
COMPARISONS = frozenset(["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
CARRIERS = COMPARISONS | frozenset([
    "Add", "Sub", "Mul", "Neg", "Abs", "Relu", "LeakyRelu", "Gelu", "Swish", "Erf", "Elu", "Sigmoid", "Tanh", "Clip",
    "Min", "Max", "ReduceMax", "ReduceMin", "Where", "Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze",
    "Flatten", "Expand", "Tile", "Concat", "Split", "Slice", "Gather", "GatherElements", "GatherND", "ScatterND",
    "ScatterElements", "Pad", "Trilu", "ConstantOfShape",
])
# fmt: on
# With two activations these may also sum what must not be rounded, such as a recurrent state.
PRODUCTS = frozenset(["MatMul", "Einsum"])
# Their results are of ordinary size again, whatever their inputs were.
NORMALISING = frozenset(["Softmax", "LogSoftmax", "Div"])
BLIND = frozenset(["Shape", "Size"])  # read no numbers, so any type will do
TO_BOOL = COMPARISONS | frozenset(["And", "Or", "Not", "Xor", "IsNaN", "IsInf"])
TO_INT64 = BLIND | frozenset(["ArgMax", "ArgMin", "NonZero"])
BODIES = frozenset(["Loop", "Scan", "SequenceMap"])
# The input that decides the type of the results, where it is not the first.
TYPED_BY = {"Where": 1, "OneHot": 2}


@dataclass(eq=False)
class Op:
    """A node, or one output of a condition, and the float32 values that it reads and makes."""

    node: onnx.NodeProto
    role: Role
    reads: list[str]
    makes: list[str]
    key: str  # the name of its first output, float or not


@dataclass
class Reading:
    """A graph and its branches, read once: types, constants, and who reads what."""

    types: dict[str, int] = field(default_factory=dict)  # of every value, in the codes of TensorProto
    constants: dict[str, TensorProto] = field(default_factory=dict)  # float32 only
    inputs: set[str] = field(default_factory=set)  # float32 only
    ops: list[Op] = field(default_factory=list)  # in order: an op follows those that make what it reads
    outputs: set[str] = field(default_factory=set)  # float32 only
    readers: dict[str, list[Op]] = field(default_factory=lambda: defaultdict(list))

    def activations(self, op: Op) -> list[str]:
        """Return the inputs of an op that are not constants."""
        return [name for name in op.reads if name not in self.constants]


def read(graph: onnx.GraphProto) -> Reading:
    """Return the types, constants and ops of a graph; bodies of loops are refused."""
    reading = Reading()
    for value in graph.input:
        reading.types[value.name] = value.type.tensor_type.elem_type
    reading.inputs = {value.name for value in graph.input if reading.types[value.name] == TensorProto.FLOAT}
    _read_nodes(graph, reading)
    reading.outputs = {value.name for value in graph.output if reading.types[value.name] == TensorProto.FLOAT}
    for op in reading.ops:
        for name in op.reads:
            reading.readers[name].append(op)
    return reading


def branches_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs inside a node."""
    for attribute in node.attribute:
        if attribute.type == onnx.AttributeProto.GRAPH:
            yield attribute.g


def _read_nodes(graph: onnx.GraphProto, reading: Reading) -> None:
    for tensor in graph.initializer:
        reading.types[tensor.name] = tensor.data_type
        if tensor.data_type == TensorProto.FLOAT:
            reading.constants[tensor.name] = tensor
    for node in graph.node:
        if node.op_type in BODIES:
            raise ExportFailed(
                f"{node.op_type} ({node.name}) cannot be converted to half precision: export in fp32 or int8, or "
                "unroll it in a model of your own"
            )
        for branch in branches_of(node):
            _read_nodes(branch, reading)
        if node.op_type == "If":
            _read_condition(node, reading)
            continue
        reading.types.update(zip(node.output, _types_made(node, reading.types), strict=True))
        if node.op_type not in BLIND:
            reads, makes = (
                [name for name in names if reading.types.get(name) == TensorProto.FLOAT]
                for names in (node.input, node.output)
            )
            if reads or makes:
                reading.ops.append(Op(node, _role(node, reading), reads, makes, node.output[0]))


def _read_condition(node: onnx.NodeProto, reading: Reading) -> None:
    branches = [branch.output for branch in branches_of(node)]
    for index, name in enumerate(node.output):
        inner = [outputs[index].name for outputs in branches]
        reading.types[name] = reading.types[inner[0]]
        if reading.types[name] == TensorProto.FLOAT:
            reading.ops.append(Op(node, "carrier", inner, [name], name))


def _role(node: onnx.NodeProto, reading: Reading) -> Role:
    if node.op_type in MATRIX_OPS:
        return "matrix"
    if node.op_type == "Cast":
        # Positions and counts are whole numbers that half may lack (bf16 has none between 256 and 258).
        return "carrier" if reading.types[node.input[0]] == TensorProto.BOOL else "exact"
    if node.op_type == "Div":
        return "carrier" if node.input[1] in reading.constants else "exact"
    return "carrier" if node.op_type in CARRIERS else "exact"


def _types_made(node: onnx.NodeProto, types: dict[str, int]) -> list[int]:
    """Return the types of a node's outputs; the checker refuses a graph with wrong types later."""
    if node.op_type in TO_BOOL:
        return [TensorProto.BOOL]
    if node.op_type in TO_INT64:
        return [TensorProto.INT64]
    attributes = {attribute.name: attribute for attribute in node.attribute}
    if node.op_type == "Cast":
        return [int(attributes["to"].i)]
    if node.op_type in ("Constant", "ConstantOfShape"):
        value = attributes.get("value")
        return [TensorProto.FLOAT if value is None else value.t.data_type]
    output_type = types[node.input[TYPED_BY.get(node.op_type, 0)]]
    if node.op_type == "TopK":
        return [output_type, TensorProto.INT64]
    return [output_type] * len(node.output)


def in_float32(
    reading: Reading, kept: Collection[str], too_large: Collection[str], too_small: Collection[str]
) -> set[str]:
    """Return the keys of the ops that stay in float32.

    ``kept`` are the inputs and outputs of the graph that stay float32; all others become half. Carriers that read a
    constant beyond the range of half are exact: hidden scores, for example, or what keeps a logarithm from zero.
    """
    pinned = _pinned(reading, {name for name in reading.inputs if name in kept})
    out_of_range = {*too_large, *too_small}
    full = {
        op.key
        for op in reading.ops
        if op in pinned or op.role == "exact" or (op.role == "carrier" and out_of_range & set(op.reads))
    }
    wide = {name for name in reading.inputs if name in kept}
    for op in reading.ops:
        if op.role == "carrier" and wide & set(op.reads):
            full.add(op.key)
        if op.key in full:
            wide.update(op.makes)
    for op in reversed(reading.ops):
        # What depends on weights only, such as rows of an embedding, is cast after it is gathered, not as stored.
        gathered = op.reads and not reading.activations(op)
        if op.role == "carrier" and not gathered and _only_read_by(op, reading, full, reading.outputs & set(kept)):
            full.add(op.key)
    return full


def _pinned(reading: Reading, inputs: set[str]) -> set[Op]:
    """Return the ops of recurrent states and of quotients: numerator, denominator, and all that they depend on.

    They sum over a whole sequence before a division makes them small again.
    """
    pinned = {op for op in reading.ops if op.node.op_type == "Div" and op.role == "exact"}
    wide = set(inputs)
    for op in reading.ops:
        if wide & set(op.reads) and _may_be_pinned(op, reading):
            pinned.add(op)
        if op in pinned and op.node.op_type not in NORMALISING:
            wide.update(op.makes)
    keys = {op.key for op in pinned}
    for op in reversed(reading.ops):
        if _may_be_pinned(op, reading) and _only_read_by(op, reading, keys, set()):
            pinned.add(op)
            keys.add(op.key)
    return pinned


def _may_be_pinned(op: Op, reading: Reading) -> bool:
    if op.role == "matrix":
        return op.node.op_type in PRODUCTS and len(reading.activations(op)) == len(op.reads)
    return True


def _only_read_by(op: Op, reading: Reading, keys: Collection[str], outputs: Collection[str]) -> bool:
    """Return whether an op's results are read, and only by these ops or as these outputs of the graph."""
    if not op.makes:
        return False
    readers = [reader.key for name in op.makes for reader in reading.readers[name]]
    results = [name for name in op.makes if name in reading.outputs]
    return bool(readers or results) and all(key in keys for key in readers) and all(name in outputs for name in results)


def spread(reading: Reading, names: Collection[str]) -> set[str]:
    """Return these values and all that carriers make from them."""
    reached = set(names)
    for op in reading.ops:
        if op.role == "carrier" and reached & set(op.reads):
            reached.update(op.makes)
    return reached
