"""``--target ort-cuda``: which precisions it takes, how its decoder is traced, and what its certificate adds."""

from collections.abc import Mapping
from pathlib import Path

from fatdeploy.certificate import CudaRecord
from fatdeploy.export.graph_files import graphs_of, read_structure
from fatdeploy.export.reference.seams import Seams
from fatdeploy.export.tracing.dialect_ort_cuda import CudaHalfSeams
from fatdeploy.targets import FloatPrecision, TargetRecord

# What the certificate says, in words, because it is easy to believe more.
EXECUTED = (
    "no GPU ran anything: the graphs were executed on onnxruntime's CPU provider, which has the same ops with kernels "
    "of its own. What CUDA's say is not known here: fatdeploy verify (fp32) or fatdeploy bench on the device tells"
)
# fmt: off
# Ops with kernels of the CUDA provider (onnxruntime's docs/OperatorKernels.md, August 2026), of those in a graph of
# ours; a Constant, and a Swish, which is written as two others, need none.
CUDA_OPS = frozenset([
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "Ceil", "Clip", "Concat", "ConstantOfShape", "Conv", "Cos",
    "CumSum", "Div", "Einsum", "Elu", "Equal", "Erf", "Exp", "Expand", "Flatten", "Floor", "FusedMatMul", "Gather",
    "GatherElements",
    "GatherND", "Gelu", "Gemm", "Greater", "GreaterOrEqual", "GroupQueryAttention", "Identity", "If", "IsInf", "IsNaN",
    "LayerNormalization", "LeakyRelu", "Less", "LessOrEqual", "LinearAttention", "Log", "LogSoftmax", "MatMul", "Max",
    "Min", "Mod", "Mul", "MultiHeadAttention", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "Pow",
    "RMSNormalization", "Range", "Reciprocal", "ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean",
    "ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "RotaryEmbedding", "Round",
    "ScatterElements", "ScatterND", "Shape", "Sigmoid", "Sign", "Sin", "Size", "Slice", "Softmax", "Softplus", "Split",
    "Sqrt", "Squeeze", "Sub", "Sum", "Tanh", "TensorScatter", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze",
    "Where", "Xor", "Constant", "Swish",
])
# fmt: on


def runs_on_cuda(record: TargetRecord) -> bool:
    """Whether onnxruntime's CUDA provider runs a target's graphs."""
    return "cuda" in record.providers


def decoder_seams(record: TargetRecord, precision: FloatPrecision) -> Seams | None:
    """Return the seams that a target's decoder is traced with; None for those of its dialect."""
    return CudaHalfSeams() if runs_on_cuda(record) and precision == "fp16" else None


def cuda_record(graphs: Mapping[str, Path]) -> CudaRecord:
    """Return what a certificate says of CUDA: that nothing ran there, and which ops would go back to the CPU."""
    missing = {
        part: tuple(
            sorted({node.op_type for graph in graphs_of(read_structure(path).graph) for node in graph.node} - CUDA_OPS)
        )
        for part, path in graphs.items()
    }
    return CudaRecord(EXECUTED, missing)
