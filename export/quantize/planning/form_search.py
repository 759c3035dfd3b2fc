"""What each matrix of a model could become: its forms with their errors, from calibration, and their costs."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fatdeploy.export.graph_files import read_structure
from fatdeploy.export.models.exportable import Exportable
from fatdeploy.export.quantize.calibrate import Activation, CalibrationRow, activations_of
from fatdeploy.export.quantize.integers import Floats, WeightBits
from fatdeploy.export.quantize.matrices import OUTPUT, Product, matrix_of, products_of
from fatdeploy.export.quantize.planning.costs import ProductShape, cost_of
from fatdeploy.export.quantize.planning.forms import (
    Candidate,
    Sample,
    candidates_of,
    measured_form,
    restored_matrix,
    split_candidates,
)
from fatdeploy.export.quantize.planning.plan import NOISE, Option, worthwhile
from fatdeploy.export.quantize.planning.sensitivity import LOGITS, sensitivities_of
from fatdeploy.export.quantize.planning.vocabulary import Lookups, lookup_shares
from fatdeploy.export.quantize.precisions import Graphs, Matrix, tables_of
from fatdeploy.export.quantize.recipe import FLOATS, Form, MatrixPrecision, MatrixRecipe, stored_matrix
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.export.quantize.rewrite_qdq import symmetric_range
from fatdeploy.manifest import EMBEDDING, ENCODER

# Rows of an encoder's products to measure: the time of more grows in proportion.
MOST_ENCODER_ROWS = 128
# What a byte of a table costs in microseconds: looking rows up takes no time, but memory is not free.
TABLE_BYTE = 1e-6
# How many matrices are tried between two messages.
STAGE_EVERY = 20
# How much dearer a higher precision is than any form that was asked for, at least: its time may be as short. Its size
# never is, and says by itself what it costs.
HIGHER = 1.5
# Rows to judge a matrix with whose activations calibration never saw.
UNSEEN_ROWS = 64


class FormSearch:
    """Finds the options of every matrix; ``allowed`` are the precisions that each may have."""

    def __init__(
        self,
        model: Exportable,
        graphs: Graphs,
        matrices: Sequence[Matrix],
        request: QuantizeRequest,
        *,
        standard: bool,
        stage: Callable[[str], None],
    ) -> None:
        self._model, self._graphs, self._matrices, self._request = model, graphs, matrices, request
        self._standard, self._stage = standard, stage
        self._products = {
            (part, product.name): product
            for part, path in graphs.items()
            for product in products_of(read_structure(path).graph)
        }
        self._sensitivities: dict[str, Floats] = {}
        self._lookups: Lookups | None = None
        self._usual = 1.0  # what an error as large as the result itself costs, of the median matrix

    def options(
        self, rows: Sequence[CalibrationRow], allowed: Mapping[str, Sequence[MatrixPrecision]]
    ) -> dict[str, list[Option]]:
        """Return what every matrix could become, and the embedding if it is a table of its own."""
        self._stage(f"calibrating with {len(rows)} sources")
        activations = activations_of(dict(self._graphs), self._model.spec, rows, branches=not self._standard)
        self._stage("measuring how much each matrix matters")
        columns = {name: product.shape[1] for (_, name), product in self._products.items()}
        self._sensitivities = sensitivities_of(self._model, columns, rows)
        self._lookups = self._lookups_of(rows)
        samples = {matrix.name: self._sample(matrix, activations) for matrix in self._matrices}
        self._usual = self._usual_cost(samples)
        lengths = _mean([len(row.source) for row in rows]), _mean([len(row.target) for row in rows])
        found = {}
        for index, matrix in enumerate(self._matrices, 1):
            if index % STAGE_EVERY == 1:
                self._stage(f"trying the forms of matrix {index} of {len(self._matrices)}")
            sample, seen = samples.pop(matrix.name).weighed(self._usual), activations[matrix.part][matrix.activation]
            candidates = self._candidates(matrix, sample, seen, allowed[matrix.name])
            options = [self._option(matrix, candidate, lengths) for candidate in candidates]
            higher = 1.0 if self._counts_bytes else HIGHER
            raised = _raised_costs(options, allowed[matrix.name][0], higher)
            found[matrix.name] = worthwhile(raised, self._noise)
        if not any(matrix.tied for matrix in self._matrices):
            found[EMBEDDING] = self._table_options(allowed[EMBEDDING])
        return found

    # -- errors --------------------------------------------------------------------------------------------------------

    def _sample(self, matrix: Matrix, activations: Mapping[str, Mapping[str, Activation]]) -> Sample:
        product = self._products[matrix.part, matrix.name]
        values = activations[matrix.part][matrix.activation].values
        weights = matrix_of(product, self._graphs[matrix.part].parent)
        if not values.size:
            values = np.random.default_rng(0).standard_normal((UNSEEN_ROWS, product.shape[0]), np.float32)
        return Sample(
            values,
            np.ascontiguousarray(weights),
            self._weights_of(product),
            self._lookups if matrix.tied and self._has_tokens(product) else None,
        )

    def _has_tokens(self, product: Product) -> bool:
        """Whether a product has as many columns as there are tokens; one inside a layer may by chance."""
        return product.shape[1] == self._model.spec.vocab_size

    def _is_output(self, matrix: Matrix) -> bool:
        """Whether the columns of a matrix are tokens."""
        named = matrix.tied or matrix.name == OUTPUT
        return named and self._has_tokens(self._products[matrix.part, matrix.name])

    def _weights_of(self, product: Product) -> Floats | None:
        """Return what an error in each result of a product costs; None if no gradient reached it."""
        known = self._sensitivities.get(product.name)
        if known is None and self._has_tokens(product):
            known = self._sensitivities.get(LOGITS)
        return known

    def _usual_cost(self, samples: Mapping[str, Sample]) -> float:
        """Return the median over all matrices of what an error as large as the result would cost."""
        costs = [float(sample.powers() @ sample.weights) for sample in samples.values() if sample.weights is not None]
        return float(np.median(costs)) if costs else 1.0

    def _candidates(
        self, matrix: Matrix, sample: Sample, seen: Activation, precisions: Sequence[MatrixPrecision]
    ) -> list[Candidate]:
        bits = self._request.weight_bits
        if self._standard:
            return [measured_form(sample, recipe, bits) for recipe in self._standard_recipes(seen, precisions)]
        forms = [form for precision in precisions for form in self._forms(precision, seen)]
        candidates = candidates_of(sample, forms, bits, smoothed=bool(seen.values.size) and not matrix.shared)
        # Other products would read the parts of a split matrix in other forms; and its time is not measured.
        if matrix.shared or not self._counts_bytes or not self._is_output(matrix):
            return candidates
        return candidates + split_candidates(sample, candidates, bits)

    def _forms(self, precision: MatrixPrecision, seen: Activation) -> tuple[Form, ...]:
        """Return the forms of a precision: beside 4 bits, 8 bits are in blocks too."""
        if precision == "fp32":
            return ("fp32",)
        if precision == "int4":
            return ("blocks4",)
        if self._request.precision == "int4":
            return ("blocks8",)
        # A range needs activations that calibration saw.
        return ("static", "row", "blocks8") if seen.values.size else ("row", "blocks8")

    def _standard_recipes(self, seen: Activation, precisions: Sequence[MatrixPrecision]) -> list[MatrixRecipe]:
        """Return the recipes of graphs of standard ops: bytes around zero, and floats."""
        recipes = [FLOATS] if "fp32" in precisions else []
        if "int8" not in precisions:
            return recipes
        if self._request.activations == "float" or not seen.values.size:
            return [*recipes, MatrixRecipe("weights")]
        chosen = symmetric_range(seen.values, (seen.low, seen.high), self._request.ranges)
        return [*recipes, MatrixRecipe("static", chosen)]

    # -- tables --------------------------------------------------------------------------------------------------------

    def _table_options(self, precisions: Sequence[MatrixPrecision]) -> list[Option]:
        """Return what tables could become that are only looked up in."""
        forms: dict[MatrixPrecision, MatrixRecipe] = {
            "fp32": FLOATS,
            "int8": MatrixRecipe("weights"),
            "int4": MatrixRecipe("blocks4"),
        }
        tables = self._tables()
        options = []
        for recipe in (forms[precision] for precision in precisions):
            error = sum(self._table_error(recipe, table) for table in tables)
            size = sum(n_bytes(recipe, table.shape, self._request.weight_bits) for table in tables)
            options.append(Option(recipe, error, size if self._counts_bytes else TABLE_BYTE * size))
        return worthwhile(options, self._noise)

    def _tables(self) -> list[Floats]:
        """Return the tables [M, V] of both graphs, each once."""
        tables = [table for path in self._graphs.values() for table in tables_of(path, self._model.spec)]
        different = {hashlib.sha256(table.tobytes()).digest(): table for table in tables}
        return [np.ascontiguousarray(table.T) for table in different.values()]

    def _table_error(self, recipe: MatrixRecipe, table: Floats) -> float:
        """Return the error of looking rows up in a table [M, V] that is stored like this."""
        weights = self._sensitivities.get(EMBEDDING)
        if weights is None or len(weights) != len(table) or recipe.form == "fp32":
            return 0.0
        stored = recipe.integers(table, self._request.weight_bits)
        return float(np.square(restored_matrix(recipe, stored) - table).mean(1) @ weights)

    def _lookups_of(self, rows: Sequence[CalibrationRow]) -> Lookups | None:
        """Return what an error in a row of the tied table costs; None if no gradient reached it."""
        weights, spec = self._sensitivities.get(EMBEDDING), self._model.spec
        if weights is None:
            return None
        shared = spec.n_source_ids == spec.vocab_size
        ids = [tokens for row in rows for tokens in ((row.source, row.target) if shared else (row.target,))]
        return Lookups(lookup_shares(ids, spec.vocab_size), weights)

    # -- costs ---------------------------------------------------------------------------------------------------------

    @property
    def _counts_bytes(self) -> bool:
        """Whether small is asked for, and not fast: 4 bits, and graphs whose device is not this one."""
        return self._standard or self._request.precision == "int4"

    @property
    def _noise(self) -> float:
        """How far costs must differ to be different: sizes are not measured."""
        return 1.0 if self._counts_bytes else NOISE

    def _option(self, matrix: Matrix, candidate: Candidate, lengths: tuple[float, float]) -> Option:
        product, recipe = self._products[matrix.part, matrix.name], candidate.recipe
        if self._counts_bytes:
            size = n_bytes(recipe, product.shape, self._request.weight_bits)
            return Option(recipe, candidate.error, size)
        return Option(recipe, candidate.error, self._microseconds(matrix.part, recipe, product.shape, lengths))

    def _microseconds(
        self, part: str, recipe: MatrixRecipe, shape: tuple[int, int], lengths: tuple[float, float]
    ) -> float:
        """Return the time of a product per step of a decode, to which an encoder adds a part of its only call."""
        rows, share = self._request.n_rows, 1.0
        if part == ENCODER:
            source, target = lengths
            all_rows = rows * source
            rows = max(1, round(min(all_rows, MOST_ENCODER_ROWS)))
            share = all_rows / rows / max(1.0, target)
        measured = ProductShape(*shape, rows, self._request.threads)
        bits, smoothed = self._request.weight_bits, recipe.smoothing is not None
        return share * cost_of(recipe.form, measured, bits, smoothed=smoothed)


def n_bytes(recipe: MatrixRecipe, shape: tuple[int, int], bits: WeightBits) -> int:
    """Return the size of a matrix [K, N] as it is stored."""
    if recipe.form == "fp32":
        return 4 * shape[0] * shape[1]
    if recipe.stored is not None:
        return recipe.stored.nbytes
    return shape[1] * stored_matrix(np.ones((shape[0], 1), np.float32), recipe.form, bits).nbytes


def _raised_costs(options: Sequence[Option], precision: MatrixPrecision, higher: float) -> list[Option]:
    """Return options in which a higher precision than was asked for is always dearer: only the bar is a reason."""
    asked = max((option.cost for option in options if option.recipe.precision == precision), default=0.0)
    return [
        option if option.recipe.precision == precision else replace(option, cost=max(option.cost, higher * asked))
        for option in options
    ]


def _mean(numbers: Sequence[int]) -> float:
    return sum(numbers) / max(1, len(numbers))
