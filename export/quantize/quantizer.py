"""From fp32 graphs to a quantized bundle: calibration, recipe, integers, and the gate that it must pass."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.certificate import Certificate, GateResult
from fatdeploy.errors import ConfigError, ParityFailed, in_one_line
from fatdeploy.export.graph_files import op_histogram, read_structure
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.package import placed_integers, write_graphs
from fatdeploy.export.quantize.calibrate import CalibrationRow, Seen, activations_of
from fatdeploy.export.quantize.examples import Example
from fatdeploy.export.quantize.gate import Bar, Gate, Judgement, fewest_kept, material_of
from fatdeploy.export.quantize.integers import Floats, WeightBits, best_range, row_noise
from fatdeploy.export.quantize.matrices import OUTPUT, Scope, lookups_of, products_of
from fatdeploy.export.quantize.rewrite_ort import MatrixPrecision, MatrixRecipe, Recipe, quantized
from fatdeploy.export.quantize.rewrite_qdq import RangeMethod, symmetric_range, with_scales
from fatdeploy.export.quantize.saturation_probe import WEIGHT_BITS, check_cpu, write_saturation_probe
from fatdeploy.manifest import DECODER, EMBEDDING, SATURATION, WEIGHTS_ALONE, Manifest, OutputMatrix, Quantization
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.proof.cpu_checks import cpu_check
from fatdeploy.runtimes.proof.gate import check_rows, row_kind
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.spec import ModelSpec
from fatdeploy.tables import aligned
from fatdeploy.targets import CpuClass, TargetRecord

Integers = Literal["int8", "int4"]
Graphs = Mapping[str, Path]

# A range that adds so much noise, and so many times that of a scale for each row, does not serve a matrix.
MOST_NOISE, MOST_TIMES_ROWS = 1e-3, 10.0
HIGHER: dict[MatrixPrecision, MatrixPrecision] = {"int4": "int8", "int8": "fp32"}


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """What was asked of a quantization; ``of`` are precisions of single matrices, by name or pattern.

    ``activations`` and ``ranges`` are for graphs of standard ops: what integers are multiplied with, and how far.
    ``metric`` is one of ``METRICS``; None leaves the choice to the tokenizer.
    """

    precision: Integers
    activations: Literal["int8", "float"] = "int8"
    ranges: RangeMethod = "percentile"
    cpu: CpuClass = "any"
    of: Mapping[str, MatrixPrecision] = field(default_factory=dict)
    recover: bool = False
    bar: Bar = field(default_factory=Bar)
    metric: str | None = None


@dataclass(frozen=True)
class Matrix:
    """A matrix of one of the graphs: its name, what it is multiplied with, and whether tokens are looked up in it."""

    part: str
    name: str
    activation: str
    tied: bool


@dataclass(frozen=True)
class Judged:
    """A quantized bundle's judgement, and how each of its matrices is stored."""

    judgement: Judgement
    quantization: Quantization
    kept: tuple[str, ...]  # matrices that were kept in a higher precision to pass
    row_difference: float

    def certificate(self, plain: Certificate, asked: "QuantizeRequest") -> Certificate:
        """Return the certificate of the fp32 graphs with what the gate says of their integers."""
        judgement = self.judgement
        gate = GateResult(
            agreement=judgement.agreement,
            metric=judgement.metric,
            median_error_of_margin=judgement.median_error,
            steps_in_danger=judgement.steps_in_danger,
            bar=asked.bar.agreement,
            points=asked.bar.points,
            enforced=self.quantization.enforced,
            kept=self.kept,
            row_difference=self.row_difference,
        )
        return replace(plain, precision=asked.precision, gate=gate, checked_on=(cpu_check(judgement.agreement.share),))


@dataclass(frozen=True)
class Trial:
    """What is asked of a quantization, what it is calibrated with and what it is judged by.

    Without ``most_steps`` targets are judged to their end.
    """

    asked: QuantizeRequest
    calibration: Sequence[Example]
    probes: Sequence[Example]
    tokenizer: Tokenizer | None = None
    metric: str | None = None
    most_steps: int | None = None


def check_asked(asked: QuantizeRequest, target: TargetRecord) -> None:
    """Raise, with all reasons, for what a target's graphs cannot have, and for a CPU that is not here to prove it."""
    reasons = [
        refusal for precision in sorted({asked.precision, *asked.of.values()}) if (refusal := target.refusal(precision))
    ]
    if target.dialect == "ort":
        reasons += [
            f"{name} is for graphs of standard ops (--target tensorrt, tensorrt-rtx or onnx)"
            for name, given in (
                ("--activations float", asked.activations != "int8"),
                ("--ranges min-max", asked.ranges != QuantizeRequest.ranges),
            )
            if given
        ]
    if reasons:
        raise ConfigError(in_one_line("the model cannot be quantized so", reasons))
    if asked.activations == "int8":
        check_cpu(asked.cpu)


def matrices_of(graphs: Graphs, spec: ModelSpec) -> list[Matrix]:
    """Return the matrices of both graphs, in the order in which they are computed."""
    found = []
    for part, path in graphs.items():
        graph = read_structure(path).graph
        tables = {node.input[0] for scope in Scope(graph).inner() for node in lookups_of(scope, spec.vocab_size)}
        found += [Matrix(part, one.name, one.activation, one.weight.name in tables) for one in products_of(graph)]
    return found


def precisions_of(matrices: Sequence[Matrix], asked: QuantizeRequest) -> dict[str, MatrixPrecision]:
    """Return the precision of every matrix and of the embedding; a name that means nothing is refused."""
    names = [*(one.name for one in matrices), EMBEDDING]
    found: dict[str, MatrixPrecision] = dict.fromkeys(names, asked.precision)
    tied = next((one.name for one in matrices if one.tied), None)
    said: set[str] = set()
    unknown = []
    for pattern, precision in asked.of.items():
        hit = [name for name in names if fnmatchcase(name, pattern)]
        if not hit:
            unknown.append(pattern)
        found |= dict.fromkeys(hit, precision)
        said |= set(hit)
    if unknown:
        raise ConfigError(
            f"--precision-of names nothing of this model: {', '.join(unknown)}. There are {', '.join(names)}"
        )
    if tied is not None:
        if EMBEDDING in said and found[EMBEDDING] != found[tied]:
            raise ConfigError(
                f"the embedding is the matrix {tied}, which is stored once: give both the same precision, "
                f"found {found[EMBEDDING]} and {found[tied]}"
            )
        found[EMBEDDING] = found[tied]
    return found


class Quantizer:
    """Makes quantized bundles of one model's simplified graphs, and judges them."""

    def __init__(
        self,
        model: Exportable,
        graphs: Graphs,
        manifest: Manifest,
        trial: Trial,
        stage: Callable[[str], None],
    ) -> None:
        self.model, self.graphs, self.manifest, self.asked, self.stage = model, graphs, manifest, trial.asked, stage
        self._standard = not manifest.branches
        self.matrices = matrices_of(graphs, model.spec)
        self.precisions = precisions_of(self.matrices, trial.asked)
        self._trial = trial
        self._seen: dict[str, dict[str, Seen]] | None = None
        stage(f"asking the reference about {len(trial.probes)} probes")
        self.gate = Gate(
            EagerEngine(model), trial.probes, trial.tokenizer, metric=trial.metric, most_steps=trial.most_steps
        )

    def written(self, folder: Path, *, enforced: bool) -> Judged:
        """Write graphs, weights and manifest; below the bar it fails with what to keep, or keeps it (``recover``)."""
        asked = self.asked
        kept: Sequence[str] = ()
        judged = self._tried(folder, self.precisions)
        if enforced and not judged.judgement.passes(asked.bar):
            order = self._by_sensitivity()
            if not asked.recover:
                raise self._refusal(judged.judgement, order)
            kept, judged = self._recovered(folder, [name for name, _ in order])
        return replace(judged, kept=tuple(kept), quantization=replace(judged.quantization, enforced=enforced))

    def placed_output(self, matrix: Floats, quantization: Quantization, folder: Path) -> OutputMatrix:
        """Return where the weights of a folder hold the output matrix [V, M]."""
        said = next((quantization.matrices[one.name] for one in self.matrices if one.name == OUTPUT), "fp32")
        precision: MatrixPrecision = "int4" if said == "int4" else "int8" if said.startswith("int8") else "fp32"
        return placed_integers(matrix, precision, quantization.weight_bits, folder)

    def _tried(self, folder: Path, precisions: Mapping[str, MatrixPrecision]) -> Judged:
        quantization = self._write(folder, precisions)
        engine = OrtEngine(_as_bundle(folder, self.manifest, quantization), OrtOptions(spinning=False))
        try:
            apart = check_rows(engine, self.gate.material, row_kind(self.asked.precision, quantization))
            return Judged(self.gate.judged(engine), quantization, (), apart)
        finally:
            engine.close()

    def _write(self, folder: Path, precisions: Mapping[str, MatrixPrecision]) -> Quantization:
        """Write the quantized graphs and their weights, and say how."""
        self.stage("quantizing")
        recipes = {one.name: self._recipe(one, precisions[one.name]) for one in self.matrices}
        # Weights that floats are multiplied with are never added up as integers.
        bits: WeightBits = 8 if self.asked.activations == "float" else WEIGHT_BITS[self.asked.cpu]
        rewritten = with_scales if self._standard else quantized
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            new = {
                part: rewritten(
                    path,
                    Path(work) / part,
                    Recipe(
                        {one.name: recipes[one.name] for one in self.matrices if one.part == part},
                        self.model.spec.vocab_size,
                        precisions[EMBEDDING],
                        bits,
                    ),
                )
                for part, path in self.graphs.items()
            }
            self.weights = write_graphs(new, folder)
            self.histograms = {part: op_histogram(path) for part, path in new.items()}
        write_saturation_probe(folder / SATURATION, bits)
        said = {name: self._described(recipe) for name, recipe in recipes.items()} | {EMBEDDING: precisions[EMBEDDING]}
        return Quantization(self.asked.cpu, bits, said, enforced=False)

    def _recipe(self, matrix: Matrix, precision: MatrixPrecision) -> MatrixRecipe:
        if precision != "int8" or self.asked.activations == "float":
            return MatrixRecipe(precision)
        seen = self._activations()[matrix.part][matrix.activation]
        values = seen.values
        if not values.size:  # a branch that calibration never took
            return MatrixRecipe("int8", None)
        if self._standard:
            return MatrixRecipe("int8", symmetric_range(values, (seen.low, seen.high), self.asked.ranges))
        chosen, noise = best_range(values)
        serves = noise <= MOST_NOISE or noise <= MOST_TIMES_ROWS * row_noise(values)
        return MatrixRecipe("int8", chosen if serves else None)

    def _described(self, recipe: MatrixRecipe) -> str:
        if recipe.precision != "int8":
            return recipe.precision
        if recipe.activations is None:
            return WEIGHTS_ALONE if self._standard else "int8 by row"
        return "int8 static"

    def _activations(self) -> dict[str, dict[str, Seen]]:
        if self._seen is None:
            self.stage(f"calibrating with {len(self._trial.calibration)} sources")
            sources = [one.source for one in self._trial.calibration]
            material = material_of(EagerEngine(self.model), sources, self._trial.most_steps)
            said = [
                CalibrationRow(ids[real], tokens[:length])
                for ids, real, tokens, length in zip(
                    material.source, material.mask, material.tokens, material.lengths, strict=True
                )
            ]
            self._seen = activations_of(dict(self.graphs), self.model.spec, said, branches=not self._standard)
        return self._seen

    def _by_sensitivity(self) -> list[tuple[str, float]]:
        """Return the matrices with the error of logits that each alone brings about, worst first."""
        units = [one.name for one in self.matrices]
        if not any(one.tied for one in self.matrices):
            units.append(EMBEDDING)  # a table of its own
        found = []
        for index, name in enumerate(units, 1):
            self.stage(f"looking at matrix {index} of {len(units)}")
            alone: dict[str, MatrixPrecision] = dict.fromkeys([*units, EMBEDDING], "fp32")
            alone[name] = self.precisions[name]
            if any(one.tied for one in self.matrices if one.name == name):
                alone[EMBEDDING] = alone[name]
            if alone[name] != "fp32":
                found.append((name, self._error(alone)))
        return sorted(found, key=lambda entry: -entry[1])

    def _error(self, precisions: Mapping[str, MatrixPrecision]) -> float:
        with tempfile.TemporaryDirectory(dir=self.graphs[DECODER].parent.parent) as folder:
            stage, self.stage = self.stage, lambda _: None
            try:
                quantization = self._write(Path(folder), precisions)
            finally:
                self.stage = stage
            engine = OrtEngine(_as_bundle(Path(folder), self.manifest, quantization), OrtOptions(spinning=False))
            try:
                return self.gate.error_of(engine)
            finally:
                engine.close()

    def _recovered(self, folder: Path, order: Sequence[str]) -> tuple[Sequence[str], Judged]:
        """Keep the worst matrices in the next higher precision, as few as reach the bar."""

        def passes(count: int) -> bool:
            return self._tried(folder, self._raised(order[:count])).judgement.passes(self.asked.bar)

        count = fewest_kept(order, passes)
        last = self._tried(folder, self._raised(order[:count]))
        if not last.judgement.passes(self.asked.bar):
            raise ParityFailed(
                f"even with every matrix in a higher precision {last.judgement.line()}: "
                f"export with --precision {HIGHER[self.asked.precision]}"
            )
        return order[:count], last

    def _raised(self, names: Sequence[str]) -> dict[str, MatrixPrecision]:
        raised = dict(self.precisions)
        for name in names:
            raised[name] = HIGHER[raised[name]]
            if any(one.tied for one in self.matrices if one.name == name):
                raised[EMBEDDING] = raised[name]
        return raised

    def _refusal(self, judgement: Judgement, order: Sequence[tuple[str, float]]) -> ParityFailed:
        bar = self.asked.bar
        worst = f"{order[0][0]}={HIGHER[self.precisions[order[0][0]]]}" if order else "NAME=PRECISION"
        return ParityFailed(
            f"the gate refuses this {self.asked.precision} bundle: {judgement.line()}; the bar is {bar.agreement:.2%} "
            f"of tokens and {bar.points} points. Keep the worst matrices in a higher precision (--recover does it, or "
            f"--precision-of '{worst}'), or give better --calibration. Each matrix alone, and the error of logits that "
            "it brings, worst first:",
            table=aligned([(name, f"{error:.1e}") for name, error in order], indent=2),
        )


def _as_bundle(folder: Path, manifest: Manifest, quantization: Quantization) -> Bundle:
    return write_manifest(folder, replace(manifest, quantization=quantization, output_matrix=None))
