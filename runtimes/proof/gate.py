"""How close a quantized bundle is to the reference, on the sources that came with it. Needs no torch."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.certificate import TokenAgreement
from fatdeploy.errors import BundleError, ParityFailed
from fatdeploy.manifest import GATE, WEIGHTS_ALONE, Quantization
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Engine, Floats, State
from fatdeploy.runtimes.proof.fidelity import Fidelity
from fatdeploy.runtimes.proof.forced import decoder_inputs, forced_logits
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import Mask, ModelSpec, Tokens

BATCH = 32
# Steps of all rows of a batch, each counted as long as the longest: their logits are in memory at once.
MOST_STEPS = BATCH * 64
# How many sources are also decoded alone, to compare their logits with those of the batch.
ALONE = 8
# How far the two may differ, relative to the largest logit. Integers are summed exactly; scaled blocks of them are not.
ROW_BOUNDS = {"int8": 0.0, "blocks": 2e-6, WEIGHTS_ALONE: 2e-6, "fp16": 2e-3, "bf16": 2e-2}


@dataclass(frozen=True)
class Material:
    """Sources, and the reference's greedy target of each: EOS is its last token unless the limit came first."""

    source: Tokens  # [n, S]
    mask: Mask  # [n, S]
    tokens: Tokens  # [n, T]
    lengths: NDArray[np.int64]  # [n], how many of the tokens count

    def batches(self, size: int = BATCH) -> Iterator["Material"]:
        """Yield some rows at a time, with no more padding than they need; fewer at a time where one is long."""
        start = 0
        while start < len(self.source):
            longest = np.maximum.accumulate(self.lengths[start : start + size])
            fitting = int((longest * np.arange(1, len(longest) + 1) <= MOST_STEPS).sum())
            yield self.rows(slice(start, start + max(1, fitting)))
            start += max(1, fitting)

    def rows(self, which: slice) -> "Material":
        """Return some rows, with no more padding than they need."""
        mask, lengths = self.mask[which], self.lengths[which]
        width, steps = int(mask.sum(1).max()), int(lengths.max())
        return Material(self.source[which, :width], mask[:, :width], self.tokens[which, :steps], lengths)

    def targets(self, spec: ModelSpec) -> list[list[int]]:
        """Return the reference's targets in reading order, without EOS."""
        kept = [row[:length].tolist() for row, length in zip(self.tokens, self.lengths.tolist(), strict=True)]
        plain = [row[:-1] if row and row[-1] == spec.eos_id else row for row in kept]
        return [row[::-1] for row in plain] if spec.target_order == "right_to_left" else plain

    def inputs(self, spec: ModelSpec) -> Tokens:
        """Return what the decoder reads to answer the targets."""
        if spec.decoding == "parallel" and spec.length == "eos":
            return np.full((len(self.tokens), spec.max_target), spec.bos_id)
        if spec.decoding == "parallel":
            return np.where(self.counts, spec.bos_id, spec.pad_id)
        return decoder_inputs(spec, self.tokens)

    @property
    def counts(self) -> NDArray[np.bool_]:
        """Which tokens count, [n, T]."""
        counts: NDArray[np.bool_] = np.arange(self.tokens.shape[1]) < self.lengths[:, None]
        return counts


def write_material(path: Path, material: Material) -> None:
    """Write sources and targets as plain arrays."""
    np.savez(path, allow_pickle=False, **asdict(material))


def read_material(bundle: Bundle) -> Material:
    """Return the sources and targets that a quantized bundle is judged by."""
    path = bundle.file(GATE)
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            material = Material(**{name: file[name] for name in ("source", "mask", "tokens", "lengths")})
        _check_arrays(material)
    except Exception as error:  # zip, zlib and numpy each have errors of their own
        raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error
    return material


def material_from_probe(probe: Probe) -> Material:
    """Return a probe's sources and tokens, all of which count."""
    rows, steps = probe.tokens.shape
    return Material(probe.source, probe.mask, probe.tokens, np.full(rows, steps))


def _check_arrays(material: Material) -> None:
    """Raise ValueError unless the arrays are sources and targets."""
    arrays = material.source, material.mask, material.tokens, material.lengths
    described = [f"{array.dtype} {list(array.shape)}" for array in arrays]
    kinds = [array.dtype for array in arrays] == [np.int64, np.bool_, np.int64, np.int64]
    axes = [array.ndim for array in arrays] == [2, 2, 2, 1] and material.source.shape == material.mask.shape
    if not kinds or not axes or not 0 < len(material.source) == len(material.tokens) == len(material.lengths):
        raise ValueError(f"no sources and targets: {', '.join(described)}")
    if material.lengths.min() < 1 or material.lengths.max() > material.tokens.shape[1]:
        raise ValueError(f"targets have 1…{material.tokens.shape[1]} tokens, found {material.lengths.tolist()}")


def material_logits(engine: Engine[State], material: Material, *, step_by_step: bool = False) -> Floats:
    """Return the logits [n, T, V] of each step after the reference's own tokens."""
    inputs = material.inputs(engine.spec)
    logits = forced_logits(engine, material.source, material.mask, inputs, step_by_step=step_by_step)
    return logits[:, : material.tokens.shape[1]]


def token_agreement(engine: Engine[State], material: Material) -> TokenAgreement:
    """Return how far an engine agrees with the reference's targets."""
    sequences = sum(_same_sequences(engine, batch) for batch in material.batches())
    forced = forced_fidelity(engine, material)
    return TokenAgreement(forced.tokens, forced.same, len(material.lengths), sequences)


def forced_fidelity(engine: Engine[State], material: Material) -> Fidelity:
    """Return how often an engine's token is the reference's after the reference's own tokens."""
    same = sum(
        int(((material_logits(engine, batch).argmax(-1) == batch.tokens) & batch.counts).sum())
        for batch in material.batches()
    )
    return Fidelity(int(material.lengths.sum()), same)


def _same_sequences(engine: Engine[State], batch: Material) -> int:
    """Return how many sources get the reference's target when the engine continues from its own tokens."""
    sources = [ids[real] for ids, real in zip(batch.source, batch.mask, strict=True)]
    silent = engine.spec.silent_ids
    parallel = engine.spec.decoding == "parallel"
    most = None if parallel else batch.tokens.shape[1]
    options = DecodeOptions(max_new_tokens=most, suppress_tokens=silent)
    hypotheses = decode(engine, sources, options)
    targets = batch.targets(engine.spec)
    return sum(list(hypothesis.tokens) == target for hypothesis, target in zip(hypotheses, targets, strict=True))


def row_kind(precision: str, quantization: Quantization | None) -> str:
    """Return the key of the bound for rows of a bundle: how its matrices are stored, whatever its precision is called.

    Scaled blocks of integers are not summed exactly; one matrix of them is enough.
    """
    if quantization is None:
        return precision
    if quantization.weights_alone:
        return WEIGHTS_ALONE
    return "blocks" if any("int4" in kind or "blocks" in kind for kind in quantization.kinds) else "int8"


def check_rows(engine: Engine[State], material: Material, precision: str) -> float:
    """Return how far a row of a batch is from the same row alone; more than its precision allows is ParityFailed."""
    bound, largest = ROW_BOUNDS[precision], 0.0
    together = material.rows(slice(0, ALONE))
    # As a decode does it: one query takes other kernels than many, and their sums may depend on the padding.
    logits = material_logits(engine, together, step_by_step=True)
    for row in range(len(together.lengths)):
        alone = material_logits(engine, together.rows(slice(row, row + 1)), step_by_step=True)[0]
        batched = logits[row, : len(alone)]
        difference = float(np.abs(alone - batched).max()) / max(1.0, float(np.abs(alone).max()))
        if not difference <= bound:
            raise ParityFailed(
                f"row {row} of a batch of {len(together.lengths)} gets logits that differ from those it gets alone by "
                f"{difference:.1e} of the largest (bound {bound:.0e} for {precision}): a row depends on its batch"
            )
        largest = max(largest, difference)
    again = material_logits(engine, together, step_by_step=True)
    if again.tobytes() != logits.tobytes():
        raise ParityFailed("the same batch decoded twice gave two answers: something is kept from the first decode")
    return largest
