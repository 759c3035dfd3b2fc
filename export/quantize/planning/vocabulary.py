"""What is special about a matrix whose columns are the tokens of a vocabulary: some are used far more than others."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fatdeploy.export.quantize.blocks.split import split_blocks
from fatdeploy.export.quantize.integers import Blocks, Floats, WeightBits, wide_blocks
from fatdeploy.export.quantize.planning.gptq import Hessian
from fatdeploy.export.quantize.recipe import MatrixRecipe, smoothed_matrix
from fatdeploy.spec import Tokens

# How many of the first tokens may have 8 bits where the others have 4, as shares of the vocabulary.
SHARES = (1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2)
# Kernels compute so many columns at once.
MULTIPLE = 16


@dataclass(frozen=True, eq=False)
class Lookups:
    """What an error in a row costs that is looked up in a matrix [K, N]: by token, and by channel.

    ``shares`` [N] says how often each token is looked up, ``weights`` [K] what a squared error in each channel costs.
    """

    shares: Floats
    weights: Floats

    def error(self, lost: Floats) -> float:
        """Return what the errors [K, N] of a matrix cost."""
        return float(self.weights @ (np.square(lost) @ self.shares))


def split_places(vocab_size: int) -> list[int]:
    """Return the numbers of first tokens that may have 8 bits."""
    places = {int(share * vocab_size) // MULTIPLE * MULTIPLE for share in SHARES}
    return sorted(places - {0})


def lookup_shares(ids: Sequence[Tokens], vocab_size: int) -> Floats:
    """Return how often each token is looked up, [V], of all lookups.

    Calibration sees few of the tokens, so neighbours share their numbers: those between two places to split at.
    """
    counts = np.bincount(np.concatenate(ids), minlength=vocab_size)[:vocab_size]
    shares = np.empty(vocab_size, np.float32)
    for span in spans_of(vocab_size):
        shares[span] = counts[span].mean() / max(1, counts.sum())
    return shares


def spans_of(vocab_size: int) -> Iterator[slice]:
    """Yield the tokens between two places to split at, all of them together."""
    ends = [*split_places(vocab_size), vocab_size]
    yield from (slice(start, end) for start, end in zip([0, *ends], ends, strict=False))


def tied_hessians(
    hessian: Hessian, weights: Floats, lookups: Lookups, smoothing: Floats | None
) -> Iterator[tuple[slice, Hessian]]:
    """Yield spans of columns, and the Hessian of each: of the product, and of looking its rows up.

    A token that is hardly ever chosen may still be read often. Rounding for the product alone would make its row worse.
    """
    channels = lookups.weights.astype(np.float64)
    if smoothing is not None:
        channels = channels / np.square(smoothing, dtype=np.float64)
    for span in spans_of(len(weights)):
        product, table = float(weights[span].mean()), float(lookups.shares[span].mean())
        yield span, product * hessian + table * np.diag(channels)


def split_recipes(matrix: Floats, recipe: MatrixRecipe, bits: WeightBits) -> Iterator[MatrixRecipe]:
    """Yield a recipe of 4-bit blocks with more and more of the first columns of a matrix [K, N] in 8 bits."""
    narrow = recipe.integers(matrix, bits)
    assert isinstance(narrow, Blocks)  # noqa: S101 - 4 bits are always in blocks
    wide = wide_blocks(smoothed_matrix(matrix, recipe.smoothing))
    for place in split_places(matrix.shape[1]):
        yield replace(recipe, form="split", stored=split_blocks(wide, narrow, place))
