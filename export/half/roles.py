"""Which ops of a graph may compute in half precision, and which must stay in float32.

A *matrix* op computes in half: its sums run in float32 inside of the kernels. An *exact* op never does: it adds up,
grows or divides, and half has five bits of exponent or eight of mantissa. A *carrier* has no numbers of its own and
goes with its neighbours. An op that nobody thought of is exact.
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
# Of two activations these may as well add up what must not be rounded, such as a recurrent state.
PRODUCTS = frozenset(["MatMul", "Einsum"])
# What comes out of these is of the size of ordinary numbers again, whatever went in.
NORMALISING = frozenset(["Softmax", "LogSoftmax", "Div"])
BLIND = frozenset(["Shape", "Size"])  # read no numbers, so no type suits them better
TO_BOOL = COMPARISONS | frozenset(["And", "Or", "Not", "Xor", "IsNaN", "IsInf"])
TO_INT64 = BLIND | frozenset(["ArgMax", "ArgMin", "NonZero"])
BODIES = frozenset(["Loop", "Scan", "SequenceMap"])
# Which input an op's results have the type of, where it is not the first.
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

    types: dict[str, int] = field(default_factory=dict)  # of every value, as TensorProto counts them
    constants: dict[str, TensorProto] = field(default_factory=dict)  # those of float32
    inputs: set[str] = field(default_factory=set)  # of float32
    ops: list[Op] = field(default_factory=list)  # an op stands behind those that make what it reads
    outputs: set[str] = field(default_factory=set)  # of float32
    readers: dict[str, list[Op]] = field(default_factory=lambda: defaultdict(list))

    def activations(self, op: Op) -> list[str]:
        """Return what an op reads that is not a constant."""
        return [name for name in op.reads if name not in self.constants]


def read(graph: onnx.GraphProto) -> Reading:
    """Return what there is to know of a graph; bodies of loops are refused."""
    reading = Reading()
    for one in graph.input:
        reading.types[one.name] = one.type.tensor_type.elem_type
    reading.inputs = {one.name for one in graph.input if reading.types[one.name] == TensorProto.FLOAT}
    _read_nodes(graph, reading)
    reading.outputs = {one.name for one in graph.output if reading.types[one.name] == TensorProto.FLOAT}
    for op in reading.ops:
        for name in op.reads:
            reading.readers[name].append(op)
    return reading


def branches_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """Yield the graphs inside of a node."""
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
                f"{node.op_type} ({node.name}) cannot be turned into half precision: unroll it in the model"
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
        # Positions and counts are whole numbers that half may not have (bf16 has none between 256 and 258).
        return "carrier" if reading.types[node.input[0]] == TensorProto.BOOL else "exact"
    if node.op_type == "Div":
        return "carrier" if node.input[1] in reading.constants else "exact"
    return "carrier" if node.op_type in CARRIERS else "exact"


def _types_made(node: onnx.NodeProto, types: dict[str, int]) -> list[int]:
    """Return the types of what a node makes; a graph whose types are wrong is refused by the checker later."""
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
    made = types[node.input[TYPED_BY.get(node.op_type, 0)]]
    if node.op_type == "TopK":
        return [made, TensorProto.INT64]
    return [made] * len(node.output)


def in_float32(
    reading: Reading, kept: Collection[str], too_large: Collection[str], too_small: Collection[str]
) -> set[str]:
    """Return the keys of the ops that stay in float32.

    ``kept`` are inputs and outputs of the graph that stay so, the others float32 ones become half. Constants that half
    cannot hold make carriers that read them exact: hidden scores, say, or what keeps a logarithm from zero.
    """
    pinned = _pinned(reading, {name for name in reading.inputs if name in kept})
    awkward = {*too_large, *too_small}
    full = {
        op.key
        for op in reading.ops
        if op in pinned or op.role == "exact" or (op.role == "carrier" and awkward & set(op.reads))
    }
    wide = {name for name in reading.inputs if name in kept}
    for op in reading.ops:
        if op.role == "carrier" and wide & set(op.reads):
            full.add(op.key)
        if op.key in full:
            wide.update(op.makes)
    for op in reversed(reading.ops):
        # What is made of weights alone, such as an embedding's rows, is cast when it is small, not as it is stored.
        gathered = op.reads and not reading.activations(op)
        if op.role == "carrier" and not gathered and _only_read_by(op, reading, full, reading.outputs & set(kept)):
            full.add(op.key)
    return full


def _pinned(reading: Reading, inputs: set[str]) -> set[Op]:
    """Return the ops of recurrent states and of quotients: numerator and denominator, and all that goes into them.

    They add up over a whole sequence before anything makes them small again.
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
    """Return whether all that an op makes is read, by these ops and as these outputs of the graph alone."""
    if not op.makes:
        return False
    readers = [reader.key for name in op.makes for reader in reading.readers[name]]
    said = [name for name in op.makes if name in reading.outputs]
    return bool(readers or said) and all(key in keys for key in readers) and all(name in outputs for name in said)


def spread(reading: Reading, names: Collection[str]) -> set[str]:
    """Return the values that carriers make of some values, and these themselves."""
    found = set(names)
    for op in reading.ops:
        if op.role == "carrier" and found & set(op.reads):
            found.update(op.makes)
    return found
