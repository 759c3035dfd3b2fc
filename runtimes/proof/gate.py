"""How close a quantized bundle is to the reference, on sources that came with it; needs no torch."""

import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.certificate import CpuCheck, TokenAgreement, read_certificate, write_certificate
from fatdeploy.errors import BundleError, ParityFailed
from fatdeploy.folders import replaced_folder
from fatdeploy.machine import Machine, this_machine
from fatdeploy.manifest import GATE, PARITY, WEIGHTS_ALONE, Quantization
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Floats, State
from fatdeploy.runtimes.proof.certified import promise_of
from fatdeploy.runtimes.proof.fidelity import Fidelity
from fatdeploy.runtimes.proof.lockstep import step_logits
from fatdeploy.spec import Mask, ModelSpec, Tokens
from fatdeploy.targets import CpuClass

BATCH = 32
# Steps of all rows of a batch, the longest counted for each: their logits are in memory at once.
MOST_STEPS = BATCH * 64
# Sources whose logits in a batch are compared with those that they get alone.
ALONE = 8
# How far they may be apart, as a part of the largest logit. Integers are summed exactly; 4-bit blocks are not.
ROW_BOUNDS = {"int8": 0.0, "int4": 2e-6, WEIGHTS_ALONE: 2e-6, "fp16": 2e-3, "bf16": 2e-2}


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

    def said(self, spec: ModelSpec) -> list[list[int]]:
        """Return what the reference said, in reading order, EOS left out."""
        kept = [row[:length].tolist() for row, length in zip(self.tokens, self.lengths.tolist(), strict=True)]
        plain = [row[:-1] if row and row[-1] == spec.eos_id else row for row in kept]
        return [row[::-1] for row in plain] if spec.target_order == "right_to_left" else plain

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
            found = Material(**{name: file[name] for name in ("source", "mask", "tokens", "lengths")})
        _check_arrays(found)
    except Exception as error:  # zip, zlib and numpy each have errors of their own
        raise BundleError(f"cannot read {path}: {error}; export the bundle again") from error
    return found


def _check_arrays(found: Material) -> None:
    """Raise ValueError unless the arrays are sources and targets."""
    arrays = found.source, found.mask, found.tokens, found.lengths
    described = [f"{one.dtype} {list(one.shape)}" for one in arrays]
    kinds = [one.dtype for one in arrays] == [np.int64, np.bool_, np.int64, np.int64]
    axes = [one.ndim for one in arrays] == [2, 2, 2, 1] and found.source.shape == found.mask.shape
    if not kinds or not axes or not 0 < len(found.source) == len(found.tokens) == len(found.lengths):
        raise ValueError(f"no sources and targets: {', '.join(described)}")
    if found.lengths.min() < 1 or found.lengths.max() > found.tokens.shape[1]:
        raise ValueError(f"targets have 1…{found.tokens.shape[1]} tokens, found {found.lengths.tolist()}")


def forced_logits(engine: Engine[State], material: Material, *, step_by_step: bool = False) -> Floats:
    """Return the logits [n, T, V] of each step after the reference's own tokens, read in one call or one by one."""
    read = _read(material, engine.spec)
    each = 1 if step_by_step and engine.spec.decoding == "autoregressive" else read.shape[1]
    state = engine.encode(material.source, material.mask, Capacity(1, read.shape[1]))
    try:
        said = [
            step_logits(engine, np.ascontiguousarray(read[:, start : start + each]), state).copy()
            for start in range(0, read.shape[1], each)
        ]
        return np.concatenate(said, 1)[:, : material.tokens.shape[1]]
    finally:
        engine.release(state)


def _read(material: Material, spec: ModelSpec) -> Tokens:
    """Return what the decoder reads to say the targets: BOS and all but the last token, or BOS at every place."""
    if spec.decoding == "parallel" and spec.length == "eos":
        return np.full((len(material.tokens), spec.max_target), spec.bos_id)
    if spec.decoding == "parallel":
        return np.where(material.counts, spec.bos_id, spec.pad_id)
    read = np.full_like(material.tokens, spec.bos_id)
    read[:, 1:] = material.tokens[:, :-1]
    return read


def token_agreement(engine: Engine[State], material: Material) -> TokenAgreement:
    """Return how far an engine agrees with the reference's targets."""
    sequences = sum(_same_sequences(engine, batch) for batch in material.batches())
    forced = forced_fidelity(engine, material)
    return TokenAgreement(forced.tokens, forced.same, len(material.lengths), sequences)


def forced_fidelity(engine: Engine[State], material: Material) -> Fidelity:
    """Return how often an engine's token is the reference's after the reference's own tokens."""
    same = sum(
        int(((forced_logits(engine, batch).argmax(-1) == batch.tokens) & batch.counts).sum())
        for batch in material.batches()
    )
    return Fidelity(int(material.lengths.sum()), same)


def _same_sequences(engine: Engine[State], batch: Material) -> int:
    """Return how many sources get the reference's target when the engine goes on from its own tokens."""
    sources = [ids[real] for ids, real in zip(batch.source, batch.mask, strict=True)]
    parallel = engine.spec.decoding == "parallel"
    options = DecodeOptions() if parallel else DecodeOptions(max_new_tokens=batch.tokens.shape[1])
    found = decode(engine, sources, options)
    return sum(list(one.tokens) == said for one, said in zip(found, batch.said(engine.spec), strict=True))


def row_kind(precision: str, quantization: Quantization | None) -> str:
    """Return by which bound rows of a bundle are compared: that of how its matrices are stored, whatever it is called.

    Floats are not summed exactly, nor are blocks of 4 bits, of which one is enough.
    """
    if quantization is None:
        return precision
    if quantization.weights_alone:
        return WEIGHTS_ALONE
    return "int4" if "int4" in quantization.kinds else "int8"


def check_rows(engine: Engine[State], material: Material, precision: str) -> float:
    """Return how far a row of a batch is from the same row alone; more than its precision allows is ParityFailed."""
    bound, largest = ROW_BOUNDS[precision], 0.0
    together = material.rows(slice(0, ALONE))
    # As a decode does it: one query takes other kernels than many, and their sums may depend on the padding.
    logits = forced_logits(engine, together, step_by_step=True)
    for row in range(len(together.lengths)):
        alone = forced_logits(engine, together.rows(slice(row, row + 1)), step_by_step=True)[0]
        mine = logits[row, : len(alone)]
        apart = float(np.abs(alone - mine).max()) / max(1.0, float(np.abs(alone).max()))
        if not apart <= bound:
            raise ParityFailed(
                f"row {row} of a batch of {len(together.lengths)} gets logits that differ from those it gets alone by "
                f"{apart:.1e} of the largest (bound {bound:.0e} for {precision}): a row depends on its batch"
            )
        largest = max(largest, apart)
    again = forced_logits(engine, together, step_by_step=True)
    if again.tobytes() != logits.tobytes():
        raise ParityFailed("the same batch decoded twice gave two answers: something is kept from the first decode")
    return largest


def recorded_here(bundle: Bundle, share: float) -> None:
    """Add this machine's kind of CPU to a bundle's certificate, in the place of an earlier entry of the same kind."""
    certificate, here = read_certificate(bundle), checked_on(share)
    others = [check for check in certificate.checked_on if check.cpu_class != here.cpu_class]
    with replaced_folder(bundle.path, force=True) as new:
        for name in (name for name in bundle.manifest.files if name != PARITY):
            (new / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(bundle.file(name), new / name)
        write_certificate(new, replace(certificate, checked_on=(*others, here)))
        write_manifest(new, bundle.manifest)
        # Files that are none of the bundle's are somebody's: they stay, and stay unlisted.
        shutil.copytree(
            bundle.path,
            new,
            symlinks=True,
            dirs_exist_ok=True,
            ignore=lambda folder, names: [
                name for name in names if (new / Path(folder).relative_to(bundle.path) / name).is_file()
            ],
        )


def checked_on(share: float) -> CpuCheck:
    """Return the entry of a certificate that says on which kind of CPU a bundle was checked, and what came of it."""
    machine = this_machine()
    return CpuCheck(cpu_class(machine), share, machine)


def cpu_class(machine: Machine) -> CpuClass | None:
    """Return the class of a machine's CPU, as --cpu names them; None where it is unknown."""
    if machine.architecture.lower() in ("aarch64", "arm64"):
        return "arm64"
    features = machine.features or ()
    if any("vnni" in feature for feature in features):
        return "x86-vnni"
    return "x86-avx2" if "avx2" in features else None


def verified_quantized(engine: Engine[State], bundle: Bundle) -> dict[str, Any]:
    """Return how close a quantized bundle is to the reference here; below what its certificate says is ParityFailed."""
    gate = read_certificate(bundle).needed_gate(bundle.path / PARITY)
    promised = promise_of(bundle)
    material = read_material(bundle)
    apart = check_rows(engine, material, row_kind(bundle.manifest.precision, bundle.manifest.quantization))
    found = token_agreement(engine, material)
    if (reason := promised.lost(Fidelity(found.tokens, found.same_tokens))) is not None:
        raise ParityFailed(f"{reason}: this CPU computes something else; export again with --cpu any, or in fp32")
    recorded = {"recorded_share": gate.agreement.share, "bar": gate.bar, "enforced": gate.enforced}
    return {**asdict(found), **recorded, "row_difference": apart}
