"""The manifest of a bundle: records of what it is, who made it and how. ``bundle.py`` reads and writes it."""

import math
from dataclasses import dataclass, field
from typing import Literal

from fatdeploy.plans import Part, PlanRecord
from fatdeploy.spec import ModelSpec
from fatdeploy.targets import CpuClass, Dialect, Precision, Target
from fatdeploy.text import TextRecord

FORMAT = (1, 8)  # a reader takes any minor of its own major
OUTPUT_MATRIX_SINCE = (1, 1)  # earlier manifests do not describe it
MANIFEST, ENCODER, DECODER, WEIGHTS = "manifest.json", "encoder.onnx", "decoder.onnx", "weights.bin"
GRAPHS: dict[Part, str] = {"encoder": ENCODER, "decoder": DECODER}
TOKENIZER, PARITY, PROBES = "tokenizer.json", "parity.json", "probes.npz"
# Quantized bundles only: the sources of the gate, and the graph that tests whether a CPU multiplies integers correctly.
GATE, SATURATION = "gate.npz", "saturation.onnx"
SHORTLIST = "shortlist.npz"  # which target tokens go with which source tokens, if somebody built that
# The name, among the matrices of a Quantization, of the embedding table, which may be one of the others.
EMBEDDING = "embedding"
WEIGHTS_ALONE = "int8 weights"  # an integer matrix that floats are multiplied with
REQUIRED = (ENCODER, DECODER, WEIGHTS)  # unless both parts have plans, which a device builds from these


@dataclass(frozen=True)
class FileRecord:
    """What a file of a bundle must be."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Provenance:
    """Where the weights come from."""

    name: str
    sha256: str
    licence: str | None


@dataclass(frozen=True)
class WeightGroup:
    """The weights of one part of the model; weights that parts share are counted once."""

    tensors: int
    parameters: int
    bytes: int


@dataclass(frozen=True)
class WideRows:
    """Where in the weights the first ``rows`` of a matrix in 8-bit blocks are, each symmetric and with one scale."""

    rows: int
    offset: int
    scales: int
    block_size: int

    def __post_init__(self) -> None:
        for name, least in {"rows": 1, "offset": 0, "scales": 0, "block_size": 2}.items():
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be {least} or more, found {getattr(self, name)}")


@dataclass(frozen=True)
class OutputMatrix:
    """Where in the weights the matrix [V, M] is that turns a hidden state into logits; ``transposed`` means [M, V].

    Integers have float32 scales at their own offset: one per row of V, or one per ``block_size`` numbers of a row;
    ``int4`` always has blocks. ``zeros`` belong to asymmetric blocks of ``int4``, two per byte. ``bias`` is the offset
    of float32 numbers [V] that are added to the product, if any. The columns of integers are multiplied with the
    float32 numbers [M] at ``smoothing``, if any, which a reader divides by. ``activation`` is the scale and the zero of
    the unsigned bytes that hidden states become before they are multiplied with rows of bytes that have one scale each;
    None gives each hidden state a scale of its own. ``wide`` are the first rows of an ``int4`` matrix if they have 8
    bits: everything else but the bias and the smoothing is then about the rows after them.
    """

    offset: int
    dtype: Literal["float32", "float16", "bfloat16", "int8", "int4"]
    transposed: bool
    scales: int | None = None
    zeros: int | None = None
    block_size: int | None = None
    bias: int | None = None
    smoothing: int | None = None
    activation: tuple[float, int] | None = None
    wide: WideRows | None = None

    def __post_init__(self) -> None:
        for name in ("offset", "scales", "zeros", "bias", "smoothing"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name} must be 0 or more, found {value}")
        if (self.scales is None) == self.dtype.startswith("int"):
            raise ValueError(f"only integers have scales, found {self.dtype} and scales at {self.scales}")
        blocks = {"int4": (False,), "int8": (False, True)}.get(self.dtype, (True,))
        if (self.block_size is None) not in blocks or (self.block_size or 2) < 2:
            found = f"{self.dtype} with {self.block_size}"
            raise ValueError(f"int4 has blocks of 2 or more, int8 may have them, floats have none: found {found}")
        if self.smoothing is not None and self.scales is None:
            raise ValueError(f"only integers are smoothed, found {self.dtype}")
        if self.wide is not None and self.dtype != "int4":
            raise ValueError(f"only int4 has wide rows, found {self.dtype}")
        if self.activation is not None:
            scale, zero = self.activation
            whole = self.dtype == "int8" and self.block_size is None
            if not whole or not 0 < scale < math.inf or not 0 <= zero <= 255:
                raise ValueError(f"activation of int8 is a scale above 0 and a zero in 0…255, found {scale} and {zero}")


@dataclass(frozen=True)
class Quantization:
    """How the matrices of a bundle became integers.

    ``matrices`` has the kind of each: ``int8 static``, ``int8 by row``, ``int8 blocks``, ``int8 weights`` (activations
    stay floats), ``int4``, ``int4 split at N`` (the first N columns are in ``int8 blocks``), ``fp32``; ``smoothed``
    after it means factors per channel. ``weight_bits`` is how many bits of 8-bit weights are used: 7 cannot saturate on
    any CPU. ``enforced`` says whether a bar had to be met.
    """

    cpu: CpuClass
    weight_bits: Literal[7, 8]
    matrices: dict[str, str]
    enforced: bool

    @property
    def kinds(self) -> set[str]:
        """The kinds of all matrices that take part in a product."""
        return {kind for name, kind in self.matrices.items() if name != EMBEDDING}

    @property
    def weights_alone(self) -> bool:
        """Whether all activations stay floats, so that no integers are multiplied."""
        kinds = self.kinds
        return WEIGHTS_ALONE in kinds and kinds <= {WEIGHTS_ALONE, "fp32"}


@dataclass(frozen=True)
class GenerationRecord:
    """How the model's authors decode: fields of ``DecodeOptions`` with JSON values, which are a bundle's defaults.

    ``ignored`` are settings of the original that have no counterpart here, with their values.
    """

    options: dict[str, object] = field(default_factory=dict)
    ignored: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ShortlistRecord:
    """What a bundle's shortlist was built from, its size, and how far decoding with it agrees with decoding without.

    Agreement was measured on ``held_out`` lines that are not part of it: how many greedy targets stay the same, and how
    many tokens of the targets without a shortlist are in the list of their source, ``mean_length`` tokens long.
    """

    aligned_by: Literal["attention", "co-occurrence"]
    lines: int
    frequent: int
    per_token: int
    source_tokens: int
    entries: int
    held_out: int
    same_targets: int
    tokens: int
    listed_tokens: int
    mean_length: float

    def line(self) -> str:
        """Return size and agreement in one line."""
        share = self.listed_tokens / max(1, self.tokens)
        return (
            f"{self.mean_length:.0f} tokens per source on average; {self.same_targets} of {self.held_out} held-out "
            f"targets unchanged, {share:.2%} of {self.tokens} tokens listed"
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a bundle is, who made it and how; ``write_manifest`` fills in ``files``.

    ``onnxruntime`` is the range of versions that it was verified with, ``settings`` are choices of the exporter,
    ``histograms`` count operators by graph, stage of the export and name. ``output_matrix`` is None if logits are not a
    hidden state times a matrix, ``quantization`` is None for fp32, fp16 and bf16, ``plans`` are the TensorRT engines
    among the files. ``text`` says how text becomes tokens; without it, a tokenizer.json among the files does.
    ``generation`` is None if the model came without settings for decoding, ``shortlist`` if nobody built one.
    """

    spec: ModelSpec
    target: Target
    precision: Precision
    dialect: Dialect
    opset: int
    versions: dict[str, str]
    source: Provenance
    onnxruntime: tuple[str, str] | None = None
    settings: dict[str, object] = field(default_factory=dict)
    histograms: dict[str, dict[str, dict[str, int]]] = field(default_factory=dict)
    weights: dict[str, WeightGroup] = field(default_factory=dict)
    output_matrix: OutputMatrix | None = None
    quantization: Quantization | None = None
    plans: tuple[PlanRecord, ...] = ()
    text: TextRecord | None = None
    generation: GenerationRecord | None = None
    shortlist: ShortlistRecord | None = None
    files: dict[str, FileRecord] = field(default_factory=dict)
    format: tuple[int, int] = FORMAT

    @property
    def branches(self) -> bool:
        """Whether an input of the decoder graph says what to compute: only onnxruntime's dialect has branches."""
        return self.dialect == "ort"
