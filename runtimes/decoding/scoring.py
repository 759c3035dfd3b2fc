"""What rows may say next: the scores of the vocabulary or of a shortlist, changed by the controls."""

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError, SpecMismatch
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors import NEG_INF, processors_of
from fatdeploy.runtimes.engines.protocol import Engine, Floats, State, StepOut, Want
from fatdeploy.spec import Tokens

# Multiplications of one product that OpenBLAS, numpy's library, gives to one thread: 65536 * 4, its defaults.
IN_ONE_THREAD = 2**18


class Scorer:
    """Turns what an engine says into scores [R, n] of ``ids``; without them n is the vocabulary."""

    def __init__(self, engine: Engine[State], options: DecodeOptions) -> None:
        self.spec = engine.spec
        self.processors = processors_of(options, engine.spec)
        self._listed: NDArray[np.int64] | None = None
        self._matrix: Floats | None = None  # [n, M]
        if options.shortlist is not None:
            self._listed = np.unique([*options.shortlist, engine.spec.eos_id]).astype(np.int64)
            self._matrix = engine.output_rows(self._listed)
        self._scratch: dict[str, Floats] = {}

    @property
    def want(self) -> Want:
        """What it needs of a step; with a shortlist the product with the output matrix is made here."""
        return Want.LOGITS if self._matrix is None else Want.HIDDEN

    @property
    def ids(self) -> NDArray[np.int64] | None:
        """The token of each column; None if the column is the token."""
        return None if self.processors else self._listed

    def logits(self, out: StepOut) -> Floats:
        """Return the scores of a step's last position, before any control; they may be the engine's own."""
        if self._matrix is not None and out.hidden is not None:
            return self._product(out.hidden[:, -1], self._matrix)
        if out.logits is None:
            raise SpecMismatch("the engine returned no logits although they were wanted")
        return out.logits[:, -1] if self._listed is None else out.logits[:, -1, self._listed]

    def log_probs(self, scores: Floats) -> Floats:
        """Return log-probabilities of scores, in an array of its own that lives until the next call."""
        result = self._buffer("log_probs", scores.shape)
        np.subtract(scores, scores.max(-1, keepdims=True), out=result)
        np.subtract(result, self._log_sums(result), out=result)
        return result

    def log_probs_of(self, scores: Floats, columns: NDArray[np.int64]) -> Floats:
        """Return the log-probability of one column of each row."""
        shifted = self._buffer("log_probs", scores.shape)
        rows = np.arange(len(scores))
        # Controls may leave nothing to a row that is finished: it has no number, and nobody asks for it.
        with np.errstate(invalid="ignore", divide="ignore"):
            np.subtract(scores, scores.max(-1, keepdims=True), out=shifted)
            chosen: Floats = shifted[rows, columns] - self._log_sums(shifted)[:, 0]
        return chosen

    def controlled(self, scores: Floats, said: Tokens) -> Floats:
        """Return scores after every control, for rows that have said tokens [R, n]; the given ones stay as they are."""
        if not self.processors:
            return scores
        result = self._buffer("controlled", (len(scores), self.spec.vocab_size))
        if self._listed is None:
            np.copyto(result, scores)
        else:
            result[...] = NEG_INF
            result[:, self._listed] = scores
        for one in self.processors:
            result = one(said, result)
            if getattr(result, "shape", None) != (len(scores), self.spec.vocab_size):
                raise ConfigError(
                    f"processors refused: {one!r} must return scores of shape {(len(scores), self.spec.vocab_size)}, "
                    f"found {getattr(result, 'shape', type(result).__name__)}"
                )
        return result

    def _product(self, hidden: Floats, matrix: Floats) -> Floats:
        # Of one row numpy's library makes another product, with threads from a smaller size on: two rows are quicker.
        rows = hidden if len(hidden) > 1 else np.repeat(hidden, 2, 0)
        result = self._buffer("product", (len(rows), len(matrix)))
        multiply(rows, matrix, result)
        return result[: len(hidden)]

    def _log_sums(self, shifted: Floats) -> Floats:
        powers = self._buffer("powers", shifted.shape)
        # What nothing can say is -inf here, and 0 after exp.
        np.exp(shifted, out=powers)
        sums: Floats = np.log(powers.sum(-1, keepdims=True))
        return sums

    def _buffer(self, name: str, shape: tuple[int, ...]) -> Floats:
        """Return an array that is used from step to step: nothing that grows with the vocabulary is allocated."""
        found = self._scratch.get(name)
        if found is None or found.shape != shape:
            found = self._scratch[name] = np.empty(shape, np.float32)
        return found


def multiply(rows: Floats, matrix: Floats, out: Floats) -> None:
    """Write rows [R, M], two or more, times those of a matrix [n, M] into an array [R, n], in this thread alone.

    numpy's library would wake threads of its own, which wait for cores on which onnxruntime's threads spin: seen, 5 ms
    instead of 0.05. It does not for products below a size. The matrix is used as it was read: turning it round takes
    longer than a few steps.
    """
    width = max(1, IN_ONE_THREAD // rows.size)
    for start in range(0, len(matrix), width):
        part = slice(start, start + width)
        np.matmul(rows, matrix[part].T, out=out[:, part])


def check_numbers(scores: Floats) -> None:
    """Raise if some of the scores are no numbers."""
    if np.isnan(scores).any():
        raise SpecMismatch("the engine's scores are not numbers: fatdeploy verify finds where it begins")


def check_something_is_left(best: Floats, length: int) -> None:
    """Raise if the controls forbid every token, or the best is no number."""
    if np.isfinite(best).all():
        return
    check_numbers(best)
    raise ConfigError(f"the controls (bad_words, shortlist, processors …) leave no token to say after {length}")
