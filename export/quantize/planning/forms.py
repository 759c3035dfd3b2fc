"""The forms that one matrix could have, each with its best factors and range, and the error that it makes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fatdeploy.export.quantize.blocks.split import SplitBlocks
from fatdeploy.export.quantize.integers import (
    Blocks,
    Floats,
    WeightBits,
    best_blocks,
    best_range,
    joined_blocks,
    restored_row_blocks,
    restored_rows,
    smoothing_factors,
)
from fatdeploy.export.quantize.planning.gptq import blocks_by_hessian, hessian_of
from fatdeploy.export.quantize.planning.vocabulary import Lookups, split_recipes, tied_hessians
from fatdeploy.export.quantize.recipe import FLOATS, Form, MatrixRecipe, Stored, smoothed_matrix

# How much of a channel's size moves from activations into weights. A single range for all activations gains most.
ALPHAS: dict[Form, tuple[float, ...]] = {
    "static": (0.3, 0.5, 0.7, 0.9),
    "row": (0.5, 0.7),
    "blocks8": (0.3, 0.5),
    "blocks4": (0.3, 0.5, 0.7),
}
# A correction of the bias must take away this share of the error, or it is only noise of calibration.
WORTH_CORRECTING = 0.05
# Results that are compared, in numbers: rows of activations times columns of the matrix.
MOST_RESULTS, FEWEST_ROWS = 2**21, 64


@dataclass(frozen=True, eq=False)
class Candidate:
    """One form of a matrix, and the error of its results: their weighted mean square."""

    recipe: MatrixRecipe
    error: float


@dataclass(frozen=True, eq=False)
class Sample:
    """Activations [n, K] of a matrix [K, N], and what an error in each column of its results costs [N].

    ``weights`` are None where that is unknown. ``lookups`` are those in the same matrix, if it has any.
    """

    rows: Floats
    matrix: Floats
    weights: Floats | None
    lookups: Lookups | None = None

    def few(self) -> "Sample":
        """Return fewer rows, evenly from all, so that forms can be compared quickly."""
        most = max(FEWEST_ROWS, MOST_RESULTS // self.matrix.shape[1])
        return self if len(self.rows) <= most else replace(self, rows=self.rows[:: -(-len(self.rows) // most)])

    def powers(self) -> Floats:
        """Return the mean square of each column of results."""
        powers: Floats = np.square(self.few().rows @ self.matrix).mean(0)
        return powers

    def weighed(self, cost: float) -> "Sample":
        """Return the same with known weights: where they are not, an error as large as the results has this cost."""
        if self.weights is not None:
            return self
        power = float(self.powers().sum())
        return replace(self, weights=np.full(self.matrix.shape[1], cost / power if power else 0.0, np.float32))


def candidates_of(sample: Sample, forms: Sequence[Form], bits: WeightBits, *, smoothed: bool) -> list[Candidate]:
    """Return some forms of a matrix, plain and with factors per channel (``smoothed``), each as good as it can be."""
    judge = _Judge(sample.few(), bits)
    largest = np.abs(sample.rows).max(0)
    candidates = []
    for form in forms:
        found = [Candidate(FLOATS, 0.0)] if form == "fp32" else list(_of_form(form, judge, largest, smoothed=smoothed))
        candidates += [_rounded(one, sample, judge) if form == "blocks4" else one for one in found]
    return candidates


def split_candidates(sample: Sample, candidates: Sequence[Candidate], bits: WeightBits) -> list[Candidate]:
    """Return candidates of 4 bits again with more and more of their first columns in 8 bits."""
    judge = _Judge(sample.few(), bits)
    narrow = [candidate.recipe for candidate in candidates if candidate.recipe.form == "blocks4"]
    return [judge.measured(split) for recipe in narrow for split in split_recipes(sample.matrix, recipe, bits)]


def measured_form(sample: Sample, recipe: MatrixRecipe, bits: WeightBits) -> Candidate:
    """Return one recipe with its error."""
    return _Judge(sample.few(), bits).measured(recipe)


def _of_form(form: Form, judge: "_Judge", largest: Floats, *, smoothed: bool) -> Iterator[Candidate]:
    """Yield a form without factors, and with the best factors if they help."""
    plain = judge.best(form, None)
    yield plain
    if not smoothed:
        return
    best = min(
        (judge.best(form, smoothing_factors(largest, judge.sample.matrix, alpha)) for alpha in ALPHAS[form]),
        key=lambda candidate: candidate.error,
    )
    if best.error < plain.error:
        yield best


def _rounded(candidate: Candidate, sample: Sample, judge: "_Judge") -> Candidate:
    """Return 4-bit blocks whose rounding minimises the error of results, if that is better."""
    recipe = candidate.recipe
    careful = judge.measured(replace(recipe, stored=_careful_blocks(sample, recipe.smoothing)))
    return careful if careful.error < candidate.error else candidate


def _careful_blocks(sample: Sample, smoothing: Floats | None) -> Blocks:
    """Return a matrix in 4-bit blocks, rounded for its activations and for the rows that are looked up in it."""
    matrix = smoothed_matrix(sample.matrix, smoothing)
    hessian = hessian_of(sample.rows if smoothing is None else sample.rows / smoothing)
    if sample.lookups is None or sample.weights is None:
        return blocks_by_hessian(matrix, hessian)
    layout = best_blocks(matrix)
    parts = tied_hessians(hessian, sample.weights, sample.lookups, smoothing)
    return joined_blocks([blocks_by_hessian(matrix[:, span], both, layout) for span, both in parts])


class _Judge:
    """Computes results as the kernels do, and compares them with those of floats."""

    def __init__(self, sample: Sample, bits: WeightBits) -> None:
        self.sample, self._bits = sample.weighed(1.0), bits
        self._expected = sample.rows @ sample.matrix

    def best(self, form: Form, smoothing: Floats | None) -> Candidate:
        """Return a form with these factors, and with a correction of the bias where that helps."""
        rows = self.sample.rows if smoothing is None else self.sample.rows / smoothing
        activations = best_range(rows)[0] if form == "static" else None
        return self.measured(MatrixRecipe(form, activations, smoothing))

    def measured(self, recipe: MatrixRecipe) -> Candidate:
        """Return the error of a recipe, with a correction of its bias where that helps."""
        stored = self._stored(recipe)
        lost = self._results(recipe, stored) - self._expected
        mean = lost.mean(0)
        squares = np.square(lost, dtype=np.float32).mean(0)
        error, corrected = (float(part @ self.sample.weights) for part in (squares, squares - np.square(mean)))
        if recipe.form == "static" and corrected < (1 - WORTH_CORRECTING) * error:
            recipe, error = replace(recipe, correction=-mean), corrected
        return Candidate(recipe, error + self._lookup_error(recipe, stored))

    def _stored(self, recipe: MatrixRecipe) -> Stored:
        return recipe.integers(self.sample.matrix, self._bits)

    def _lookup_error(self, recipe: MatrixRecipe, stored: Stored) -> float:
        if self.sample.lookups is None:
            return 0.0
        return self.sample.lookups.error(restored_matrix(recipe, stored) - self.sample.matrix)

    def _results(self, recipe: MatrixRecipe, stored: Stored) -> Floats:
        rows: Floats = self.sample.rows if recipe.smoothing is None else self.sample.rows / recipe.smoothing
        if isinstance(stored, SplitBlocks):
            return np.concatenate([_block_results(rows, part) for part in (stored.wide, stored.narrow)], 1)
        if isinstance(stored, Blocks):
            return _block_results(rows, stored)
        if recipe.form == "row":
            rows = restored_rows(rows)
        elif recipe.activations is not None:
            rows = recipe.activations.restored(rows)
        results: Floats = rows @ stored.restored()
        return results


def _block_results(rows: Floats, stored: Blocks) -> Floats:
    results: Floats = restored_row_blocks(rows, stored.size) @ stored.restored()
    return results


def restored_matrix(recipe: MatrixRecipe, stored: Stored) -> Floats:
    """Return the matrix that integers stand for, without the factors of its channels."""
    restored = stored.restored()
    return restored if recipe.smoothing is None else restored / recipe.smoothing[:, None]
