"""From fp32 graphs to a quantized bundle: calibration, recipe, integers, and the gate the bundle must pass."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fatdeploy.bundle import write_manifest
from fatdeploy.certificate import Certificate, GateResult
from fatdeploy.errors import ConfigError, ParityFailed, in_one_line
from fatdeploy.export.graph_files import op_histogram
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.package import placed_integers, write_graphs
from fatdeploy.export.quantize.calibrate import Activation, CalibrationRow, activations_of
from fatdeploy.export.quantize.examples import Example
from fatdeploy.export.quantize.gate import Bar, Gate, Judgement, fewest_kept, material_of
from fatdeploy.export.quantize.integers import Floats, WeightBits, best_range, row_noise
from fatdeploy.export.quantize.matrices import OUTPUT
from fatdeploy.export.quantize.precisions import Graphs, Matrix, matrices_of, precisions_of, table_sizes
from fatdeploy.export.quantize.recipe import MatrixPrecision, MatrixRecipe, Recipe
from fatdeploy.export.quantize.rewrite_ort import quantized
from fatdeploy.export.quantize.rewrite_qdq import RangeMethod, symmetric_range, with_scales
from fatdeploy.export.quantize.saturation_probe import WEIGHT_BITS, check_cpu, write_saturation_probe
from fatdeploy.manifest import DECODER, EMBEDDING, SATURATION, WEIGHTS_ALONE, Manifest, OutputMatrix, Quantization
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.cpu_checks import cpu_check
from fatdeploy.runtimes.proof.gate import check_rows, row_kind
from fatdeploy.runtimes.text.tokenizer import Tokenizer
from fatdeploy.tables import aligned
from fatdeploy.targets import CpuClass, TargetRecord

Integers = Literal["int8", "int4"]

# A range is rejected if it adds more noise than this, and more than this many times the noise of per-row scales.
MOST_NOISE, MOST_TIMES_ROWS = 1e-3, 10.0
HIGHER: dict[MatrixPrecision, MatrixPrecision] = {"int4": "int8", "int8": "fp32"}


@dataclass(frozen=True, kw_only=True)
class QuantizeRequest:
    """How to quantize; ``of`` holds precisions of single matrices, by name or pattern.

    ``activations`` and ``ranges`` are for graphs of standard ops: what weights are multiplied with, and how ranges are
    chosen. ``metric`` is one of ``METRICS``; None leaves the choice to the tokenizer.
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
class Judged:
    """The judgement of a quantized bundle, and how each of its matrices is stored."""

    judgement: Judgement
    quantization: Quantization
    kept: tuple[str, ...]  # matrices kept in a higher precision to pass
    row_difference: float

    def certificate(self, plain: Certificate, request: QuantizeRequest) -> Certificate:
        """Return the certificate of the fp32 graphs with the gate's result for their integers."""
        judgement = self.judgement
        gate = GateResult(
            agreement=judgement.agreement,
            metric=judgement.metric,
            median_error_of_margin=judgement.median_error,
            steps_in_danger=judgement.steps_in_danger,
            bar=request.bar.agreement,
            points=request.bar.points,
            enforced=self.quantization.enforced,
            kept=self.kept,
            row_difference=self.row_difference,
        )
        return replace(
            plain, precision=request.precision, gate=gate, checked_on=(cpu_check(judgement.agreement.share),)
        )


@dataclass(frozen=True)
class Trial:
    """A request to quantize, and the examples to calibrate with and to judge by.

    Without ``most_steps`` targets are judged to their end.
    """

    request: QuantizeRequest
    calibration: Sequence[Example]
    probes: Sequence[Example]
    tokenizer: Tokenizer | None = None
    metric: str | None = None
    most_steps: int | None = None


def check_request(request: QuantizeRequest, target: TargetRecord) -> None:
    """Raise, with all reasons, if a target cannot run the request or this CPU cannot prove it."""
    reasons = [
        refusal
        for precision in sorted({request.precision, *request.of.values()})
        if (refusal := target.refusal(precision))
    ]
    if target.dialect == "ort":
        reasons += [
            f"{name} is for graphs of standard ops (--target tensorrt, tensorrt-rtx or onnx)"
            for name, is_set in (
                ("--activations float", request.activations != "int8"),
                ("--ranges min-max", request.ranges != QuantizeRequest.ranges),
            )
            if is_set
        ]
    if reasons:
        raise ConfigError(in_one_line("the model cannot be quantized like this", reasons))
    if request.activations == "int8":
        check_cpu(request.cpu)


class Quantizer:
    """Makes quantized bundles from one model's simplified graphs, and judges them.

    ``reference`` answers what the right tokens are. Graphs that were proved right do so several times faster than
    PyTorch.
    """

    def __init__(
        self,
        model: Exportable,
        graphs: Graphs,
        manifest: Manifest,
        trial: Trial,
        stage: Callable[[str], None],
        reference: Engine[Any],
    ) -> None:
        self._reference = reference
        self.model, self.graphs, self.manifest, self.request, self.stage = model, graphs, manifest, trial.request, stage
        self._standard = not manifest.branches
        self.matrices = matrices_of(graphs, model.spec)
        self.precisions = precisions_of(self.matrices, trial.request.precision, trial.request.of)
        self._trial = trial
        self._calibrated: dict[str, dict[str, Activation]] | None = None
        stage(f"asking the reference about {len(trial.probes)} probes")
        self.gate = Gate(reference, trial.probes, trial.tokenizer, metric=trial.metric, most_steps=trial.most_steps)

    def written(self, folder: Path, *, enforced: bool) -> Judged:
        """Write graphs, weights and manifest; below the bar, raise with what to keep, or keep it (``recover``)."""
        request = self.request
        kept: Sequence[str] = ()
        judged = self._tried(folder, self.precisions)
        if enforced and not judged.judgement.passes(request.bar):
            order = self._by_sensitivity()
            if not request.recover:
                raise self._refusal(judged.judgement, order)
            kept, judged = self._recovered(folder, [name for name, _ in order])
        return replace(judged, kept=tuple(kept), quantization=replace(judged.quantization, enforced=enforced))

    def placed_output(self, matrix: Floats, quantization: Quantization, folder: Path) -> OutputMatrix:
        """Return where the weights file of a folder holds the output matrix [V, M]."""
        names = {matrix.name for matrix in self.matrices}
        kind = quantization.matrices[OUTPUT] if OUTPUT in names else "fp32"
        precision: MatrixPrecision = "int4" if kind == "int4" else "int8" if kind.startswith("int8") else "fp32"
        placed = placed_integers(matrix, precision, quantization.weight_bits, folder)
        if kind != "int8 static":
            return placed
        [output] = [entry for entry in self.matrices if entry.name == OUTPUT]
        chosen = self._recipe(output, "int8").activations
        return placed if chosen is None else replace(placed, activation=(chosen.scale, chosen.zero))

    def _tried(self, folder: Path, precisions: Mapping[str, MatrixPrecision]) -> Judged:
        quantization = self._write(folder, precisions)
        with closing(_opened(folder, self.manifest, quantization)) as engine:
            difference = check_rows(engine, self.gate.material, row_kind(self.request.precision, quantization))
            return Judged(self.gate.judged(engine), quantization, (), difference)

    def _write(self, folder: Path, precisions: Mapping[str, MatrixPrecision]) -> Quantization:
        """Write the quantized graphs and their weights; return how each matrix is stored."""
        self.stage("quantizing")
        recipes = {matrix.name: self._recipe(matrix, precisions[matrix.name]) for matrix in self.matrices}
        # Weights that are multiplied with floats are never summed as integers.
        bits: WeightBits = 8 if self.request.activations == "float" else WEIGHT_BITS[self.request.cpu]
        rewritten = with_scales if self._standard else quantized
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            new = {
                part: rewritten(
                    path,
                    Path(work) / part,
                    Recipe(
                        {matrix.name: recipes[matrix.name] for matrix in self.matrices if matrix.part == part},
                        table_sizes(self.model.spec),
                        precisions[EMBEDDING],
                        bits,
                    ),
                )
                for part, path in self.graphs.items()
            }
            self.weights = write_graphs(new, folder)
            self.histograms = {part: op_histogram(path) for part, path in new.items()}
        write_saturation_probe(folder / SATURATION, bits)
        kinds = {name: self._described(recipe) for name, recipe in recipes.items()} | {EMBEDDING: precisions[EMBEDDING]}
        return Quantization(self.request.cpu, bits, kinds, enforced=False)

    def _recipe(self, matrix: Matrix, precision: MatrixPrecision) -> MatrixRecipe:
        if precision != "int8" or self.request.activations == "float":
            return MatrixRecipe(precision)
        activation = self._activations()[matrix.part][matrix.activation]
        values = activation.values
        if not values.size:  # a branch that calibration never took
            return MatrixRecipe("int8", None)
        if self._standard:
            return MatrixRecipe("int8", symmetric_range(values, (activation.low, activation.high), self.request.ranges))
        chosen, noise = best_range(values)
        serves = noise <= MOST_NOISE or noise <= MOST_TIMES_ROWS * row_noise(values)
        return MatrixRecipe("int8", chosen if serves else None)

    def _described(self, recipe: MatrixRecipe) -> str:
        if recipe.precision != "int8":
            return recipe.precision
        if recipe.activations is None:
            return WEIGHTS_ALONE if self._standard else "int8 by row"
        return "int8 static"

    def _activations(self) -> dict[str, dict[str, Activation]]:
        if self._calibrated is None:
            self.stage(f"calibrating with {len(self._trial.calibration)} sources")
            sources = [example.source for example in self._trial.calibration]
            material = material_of(self._reference, sources, self._trial.most_steps)
            rows = [
                CalibrationRow(ids[real], tokens[:length])
                for ids, real, tokens, length in zip(
                    material.source, material.mask, material.tokens, material.lengths, strict=True
                )
            ]
            self._calibrated = activations_of(dict(self.graphs), self.model.spec, rows, branches=not self._standard)
        return self._calibrated

    def _by_sensitivity(self) -> list[tuple[str, float]]:
        """Return each matrix with the error of logits that it causes alone, worst first."""
        units = [matrix.name for matrix in self.matrices]
        if not any(matrix.tied for matrix in self.matrices):
            units.append(EMBEDDING)  # a table of its own
        errors = []
        for index, name in enumerate(units, 1):
            self.stage(f"measuring matrix {index} of {len(units)} alone")
            alone: dict[str, MatrixPrecision] = dict.fromkeys([*units, EMBEDDING], "fp32")
            alone[name] = self.precisions[name]
            if self._is_tied(name):
                alone[EMBEDDING] = alone[name]
            if alone[name] != "fp32":
                errors.append((name, self._error(alone)))
        return sorted(errors, key=lambda entry: -entry[1])

    def _error(self, precisions: Mapping[str, MatrixPrecision]) -> float:
        with tempfile.TemporaryDirectory(dir=self.graphs[DECODER].parent.parent) as folder:
            stage, self.stage = self.stage, lambda _: None
            try:
                quantization = self._write(Path(folder), precisions)
            finally:
                self.stage = stage
            with closing(_opened(Path(folder), self.manifest, quantization)) as engine:
                return self.gate.error_of(engine)

    def _recovered(self, folder: Path, order: Sequence[str]) -> tuple[Sequence[str], Judged]:
        """Keep the worst matrices in the next higher precision, as few as the bar needs."""

        def passes(count: int) -> bool:
            return self._tried(folder, self._raised(order[:count])).judgement.passes(self.request.bar)

        count = fewest_kept(order, passes)
        last = self._tried(folder, self._raised(order[:count]))
        if not last.judgement.passes(self.request.bar):
            raise ParityFailed(
                f"even with every matrix in a higher precision {last.judgement.line()}: "
                f"export with --precision {HIGHER[self.request.precision]}"
            )
        return order[:count], last

    def _raised(self, names: Sequence[str]) -> dict[str, MatrixPrecision]:
        raised = dict(self.precisions)
        for name in names:
            raised[name] = HIGHER[raised[name]]
            if self._is_tied(name):
                raised[EMBEDDING] = raised[name]
        return raised

    def _is_tied(self, name: str) -> bool:
        return any(matrix.tied for matrix in self.matrices if matrix.name == name)

    def _refusal(self, judgement: Judgement, order: Sequence[tuple[str, float]]) -> ParityFailed:
        bar = self.request.bar
        worst = f"{order[0][0]}={HIGHER[self.precisions[order[0][0]]]}" if order else "NAME=PRECISION"
        return ParityFailed(
            f"the gate refuses this {self.request.precision} bundle: {judgement.line()}; the bar is "
            f"{bar.agreement:.2%} of tokens and {bar.points} points. Keep the worst matrices in a higher precision "
            f"(--recover does it, or --precision-of '{worst}'), or give better --calibration. The error of logits that "
            "each matrix causes alone, worst first:",
            table=aligned([(name, f"{error:.1e}") for name, error in order], indent=2),
        )


def _opened(folder: Path, manifest: Manifest, quantization: Quantization) -> OrtEngine:
    bundle = write_manifest(folder, replace(manifest, quantization=quantization, output_matrix=None))
    return OrtEngine(bundle, OrtOptions(spinning=False))
