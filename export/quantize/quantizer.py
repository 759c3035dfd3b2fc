"""From fp32 graphs to a quantized bundle: options from calibration, a plan, integers, and the gate they must pass."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fatdeploy.bundle import write_manifest
from fatdeploy.certificate import Certificate, GateResult, MatrixPlan
from fatdeploy.errors import ParityFailed
from fatdeploy.export.graph_files import op_histogram
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.package import placed_integers, write_graphs
from fatdeploy.export.quantize.calibrate import CalibrationRow
from fatdeploy.export.quantize.gate import Gate, Judgement, material_of
from fatdeploy.export.quantize.integers import Floats
from fatdeploy.export.quantize.matrices import OUTPUT
from fatdeploy.export.quantize.planning.form_search import FormSearch
from fatdeploy.export.quantize.planning.plan import Option, Plan, planned, refined
from fatdeploy.export.quantize.precisions import (
    Graphs,
    matrices_of,
    pinned_names,
    precisions_of,
    table_sizes,
    tables_of,
)
from fatdeploy.export.quantize.recipe import FLOATS, MatrixPrecision, MatrixRecipe, Recipe
from fatdeploy.export.quantize.request import QuantizeRequest, Trial
from fatdeploy.export.quantize.rewrite_ort import quantized
from fatdeploy.export.quantize.rewrite_qdq import with_scales
from fatdeploy.export.quantize.saturation_probe import write_saturation_probe
from fatdeploy.manifest import EMBEDDING, SATURATION, Manifest, OutputMatrix, Quantization
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.cpu_checks import cpu_check
from fatdeploy.runtimes.proof.gate import check_rows, row_kind
from fatdeploy.runtimes.proof.promise import ROUNDED_SHARE
from fatdeploy.tables import aligned

# The precisions that a matrix may be raised to where the bar needs it, the cheapest first.
RAISED: dict[MatrixPrecision, tuple[MatrixPrecision, ...]] = {
    "int4": ("int4", "int8", "fp32"),
    "int8": ("int8", "fp32"),
    "fp32": ("fp32",),
}
# Of the share of tokens that may differ, what a new plan is meant to use: the probes are only a sample, and other
# sources should reach the bar too. The first leaves more room, which may make a plan dearer by no more than WORTH_ROOM.
AIMS, WORTH_ROOM = (0.65, 0.8), 1.05
# What a plan may use while a more exact one is not much dearer.
MOST_USED = 0.8
# How much smaller each budget is at least, and how many are tried before the most exact plan.
LEAST_STEP, ATTEMPTS = 0.7, 8


@dataclass(frozen=True)
class Judged:
    """The judgement of a quantized bundle, and how each of its matrices is stored."""

    judgement: Judgement
    quantization: Quantization
    plan: tuple[MatrixPlan, ...]
    kept: tuple[str, ...]  # matrices in a higher precision than was asked for
    row_difference: float

    def certificate(self, plain: Certificate, request: QuantizeRequest) -> Certificate:
        """Return the certificate of the fp32 graphs with the gate's result for their integers."""
        judgement, share = self.judgement, self.judgement.agreement.share
        by_metric = judgement.metric is not None and request.bar.agreement is None
        gate = GateResult(
            agreement=judgement.agreement,
            metric=judgement.metric,
            median_error_of_margin=judgement.median_error,
            steps_in_danger=judgement.steps_in_danger,
            # Where the metric decided, a device must keep what was reported, up to its rounding.
            bar=max(0.0, share - ROUNDED_SHARE) if by_metric else request.least_agreement,
            points=request.bar.points,
            enforced=self.quantization.enforced,
            kept=self.kept,
            row_difference=self.row_difference,
            by_metric=by_metric,
            rows=request.n_rows,
            plan=self.plan,
        )
        return replace(plain, precision=request.precision, gate=gate, checked_on=(cpu_check(share),))


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
        self._reference, self._trial = reference, trial
        self.model, self.graphs, self.manifest, self.request, self.stage = model, graphs, manifest, trial.request, stage
        self._standard = not manifest.branches
        self._written: tuple[Plan, Quantization] | None = None  # what is in the folder
        self.matrices = matrices_of(graphs, model.spec)
        self.precisions = precisions_of(self.matrices, trial.request.precision, trial.request.of)
        stage(f"asking the reference about {len(trial.probes)} probes")
        self.gate = Gate(reference, trial.probes, trial.tokenizer, metric=trial.metric, most_steps=trial.most_steps)

    def written(self, folder: Path, *, enforced: bool) -> Judged:
        """Write graphs, weights and manifest of the cheapest plan that passes; if none does, raise with the reasons.

        Matrices are raised to a higher precision only if the one that was asked for cannot reach the bar.
        """
        asked = {name: self._asked(name, choices) for name, choices in self.options.items()}
        if not enforced:
            return self._judged(folder, planned(asked, np.inf))
        plan, coarser = planned(asked, np.inf), None
        for left in reversed(range(ATTEMPTS)):
            share = self._share(folder, plan)
            following = self._following(asked, plan, share, is_last=left == 1) if left else None
            if following is not None and not self._has_room(share) and not self._is_enough(share, plan, following):
                self.stage(f"{share:.2%} of the tokens are the reference's: planning again")
                coarser, plan = plan, following
                continue
            if coarser is not None and self._has_room(share):
                plan = refined(asked, plan, coarser, lambda middle: self._is_safe(folder, middle))
            judged = self._judged(folder, plan)
            if judged.judgement.passes(self.request.bar, self.request.least_agreement):
                return replace(judged, quantization=replace(judged.quantization, enforced=True))
            if following is None:
                break
            coarser, plan = None, following
        raise self._refusal(judged)

    def _share(self, folder: Path, plan: Plan) -> float:
        """Return how many of the reference's tokens the bundle of a plan chooses."""
        with closing(_opened(folder, self.manifest, self._write(folder, plan))) as engine:
            return self.gate.forced_share(engine)

    def _is_safe(self, folder: Path, plan: Plan) -> bool:
        share = self._share(folder, plan)
        self.stage(f"{share:.2%} of the tokens are the reference's in a cheaper plan")
        return self._has_room(share)

    @property
    def _counts_bytes(self) -> bool:
        """Whether the cost of a plan is its size."""
        return self._standard or self.request.precision == "int4"

    def _has_room(self, share: float) -> bool:
        """Whether a share of the tokens is safely above the bar, or something else decides."""
        if self._trial.metric is not None and self.request.bar.agreement is None:
            return True
        return 1 - share <= MOST_USED * (1 - self.request.least_agreement)

    def _is_enough(self, share: float, plan: Plan, following: Plan) -> bool:
        """Whether a share reaches the bar, and a more exact plan would cost too much for being safely above it."""
        return share >= self.request.least_agreement and following.cost > WORTH_ROOM * plan.cost

    def _following(
        self, asked: Mapping[str, Sequence[Option]], plan: Plan, share: float, *, is_last: bool
    ) -> Plan | None:
        """Return a more exact plan, in the precision that was asked for if there is one; None if there is none."""
        following = self._next(asked, plan, share) or self._next(self.options, plan, share)
        return planned(self.options, 0.0) if is_last and following is not None else following

    def _asked(self, name: str, choices: Sequence[Option]) -> list[Option]:
        return [option for option in choices if option.recipe.precision == self.precisions[name]]

    def _next(self, options: Mapping[str, Sequence[Option]], plan: Plan, share: float) -> Plan | None:
        """Return a more exact plan than one that has this share of the tokens; None if there is none."""
        exact = planned(options, 0.0)
        if plan.error <= exact.error:
            return None
        allowed, lost = 1 - self.request.least_agreement, 1 - share
        # Errors of logits grow with the root of the divergence, and so does the share of tokens that change.
        steps = [(aim * allowed / lost) ** 2 if lost > 0 else LEAST_STEP for aim in AIMS]
        roomy, tight = (planned(options, max(min(LEAST_STEP, step) * plan.error, exact.error)) for step in steps)
        return roomy if roomy.cost <= WORTH_ROOM * tight.cost else tight

    def placed_output(self, matrix: Floats, quantization: Quantization, folder: Path) -> OutputMatrix:
        """Return where the weights file of a folder holds the output matrix [V, M]."""
        recipe = self._written_recipes.get(OUTPUT, FLOATS)
        placed = placed_integers(matrix, recipe, quantization.weight_bits, folder)
        chosen = recipe.activations
        return placed if chosen is None else replace(placed, activation=(chosen.scale, chosen.zero))

    def corrected_bias(self, bias: Floats | None) -> Floats | None:
        """Return what is added to the product with the output matrix, [V], including what its integers lose."""
        correction = self._written_recipes.get(OUTPUT, FLOATS).correction
        # Graphs of standard ops are not corrected.
        if correction is None or self._standard:
            return bias
        return (correction if bias is None else bias + correction).astype(np.float32)

    @cached_property
    def options(self) -> dict[str, list[Option]]:
        """What every matrix could become, in the precision that was asked for and in higher ones."""
        search = FormSearch(
            self.model, self.graphs, self.matrices, self.request, standard=self._standard, stage=self.stage
        )
        pinned = pinned_names(self.precisions, self.request.of)
        allowed = {
            name: (precision,) if name in pinned else self._raised(precision)
            for name, precision in self.precisions.items()
        }
        return search.options(self._calibration_rows(), allowed)

    def _raised(self, precision: MatrixPrecision) -> tuple[MatrixPrecision, ...]:
        return tuple(higher for higher in RAISED[precision] if not self._standard or higher != "int4")

    def _calibration_rows(self) -> list[CalibrationRow]:
        sources = [example.source for example in self._trial.calibration]
        material = material_of(self._reference, sources, self._trial.most_steps)
        arrays = material.source, material.mask, material.tokens, material.lengths
        return [CalibrationRow(ids[real], tokens[:length]) for ids, real, tokens, length in zip(*arrays, strict=True)]

    def _judged(self, folder: Path, plan: Plan) -> Judged:
        quantization = self._write(folder, plan)
        with closing(_opened(folder, self.manifest, quantization)) as engine:
            return self._judgement(engine, plan, quantization)

    def _judgement(self, engine: Engine[Any], plan: Plan, quantization: Quantization) -> Judged:
        self.stage("judging")
        difference = check_rows(engine, self.gate.material, row_kind(self.request.precision, quantization))
        rows = tuple(
            MatrixPlan(name, option.recipe.kind, option.error, option.cost, self._counts_bytes)
            for name, option in plan.choices.items()
        )
        kept = [name for name, option in plan.choices.items() if option.recipe.precision != self.precisions[name]]
        return Judged(self.gate.judged(engine), quantization, rows, tuple(kept), difference)

    def _write(self, folder: Path, plan: Plan) -> Quantization:
        """Write the quantized graphs and their weights, unless they are there; return how each matrix is stored."""
        if self._written is not None and self._written[0] is plan:
            return self._written[1]
        self.stage("quantizing")
        recipes = {name: option.recipe for name, option in plan.choices.items()}
        tied = next((matrix.name for matrix in self.matrices if matrix.tied), None)
        embedding = recipes[EMBEDDING if tied is None else tied]
        bits = self.request.weight_bits
        rewritten = with_scales if self._standard else quantized
        with tempfile.TemporaryDirectory(dir=folder.parent) as work:
            new = {
                part: rewritten(
                    path,
                    Path(work) / part,
                    Recipe(
                        {matrix.name: recipes[matrix.name] for matrix in self.matrices if matrix.part == part},
                        table_sizes(self.model.spec),
                        self._table_recipe(part, embedding),
                        bits,
                    ),
                )
                for part, path in self.graphs.items()
            }
            self.weights = write_graphs(new, folder)
            self.histograms = {part: op_histogram(path) for part, path in new.items()}
        self._written_recipes = recipes
        write_saturation_probe(folder / SATURATION, bits)
        kinds = {matrix.name: recipes[matrix.name].kind for matrix in self.matrices}
        quantization = Quantization(self.request.cpu, bits, {**kinds, EMBEDDING: embedding.precision}, enforced=False)
        self._written = plan, quantization
        return quantization

    def _table_recipe(self, part: str, recipe: MatrixRecipe) -> MatrixRecipe:
        """Return how a graph's tables are stored: like the tied matrix if they are that matrix."""
        if recipe.smoothing is None and recipe.stored is None:
            return recipe
        if part in self._parts_of_tied:
            return recipe
        # Another table has other integers, and where to split it nobody has judged.
        return MatrixRecipe("blocks4" if recipe.form == "split" else recipe.form)

    @cached_property
    def _parts_of_tied(self) -> frozenset[str]:
        """The graphs whose tables all equal the output matrix."""
        matrix = self.model.output_matrix()
        if matrix is None:
            return frozenset()
        expected = matrix.detach().numpy()
        spec = self.model.spec
        return frozenset(
            part
            for part, path in self.graphs.items()
            if all(np.array_equal(table, expected) for table in tables_of(path, spec))
        )

    def _refusal(self, judged: Judged) -> ParityFailed:
        request, bar = self.request, self.request.bar
        rows = [(row.name, row.kind, f"{row.error:.1e}") for row in sorted(judged.plan, key=lambda row: -row.error)]
        needed = f"{request.least_agreement:.2%} of tokens" if self._trial.metric is None else f"{bar.points} points"
        pinned = pinned_names(self.precisions, request.of)
        advice = "allow higher precisions (leave out --precision-of), or " if pinned else ""
        return ParityFailed(
            f"the gate refuses this {request.precision} bundle: {judged.judgement.line()}; the bar is {needed}, and no "
            f"plan reaches it: {advice}give better --calibration, or lower the bar (--min-agreement, --max-loss). The "
            "most exact form of each matrix and the error that it causes, worst first:",
            table=aligned(rows, indent=2),
        )


def _opened(folder: Path, manifest: Manifest, quantization: Quantization) -> OrtEngine:
    bundle = write_manifest(folder, replace(manifest, quantization=quantization, output_matrix=None))
    return OrtEngine(bundle, OrtOptions(spinning=False))
