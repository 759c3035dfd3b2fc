"""Hidden states times chosen rows of a bundle's output matrix, in the caller's thread: what a shortlist needs.

The rows are an input of a tiny graph, so that other rows need no new session. onnxruntime multiplies integers, and it
does not wake numpy's threads, which would wait for the cores on which its own threads spin.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.runtimes.engines.ort.graph_bytes import CONTRIB, model_bytes, node_bytes, number, part, value_bytes
from fatdeploy.runtimes.engines.output_matrix import StoredMatrix, stored_matrix
from fatdeploy.runtimes.engines.protocol import Floats, Ids, OutputProduct

HIDDEN, ROWS, SCORES = "hidden", "rows", "scores"
UNIT, SCALES, ZERO, BIAS = "unit", "scales", "zero", "bias"
_INT = 2  # the type number of an integer attribute in onnx.proto
# Where each row has a scale of its own: levels of each sign, and the byte that stands for zero.
LEVELS, MIDDLE, HIGHEST = 127, 128, 255
TINY, STEP = np.finfo(np.float32).tiny * np.float32(LEVELS), np.float32(1 / LEVELS)
# numpy transposes a matrix of bytes five times faster in strips.
STRIP = 64


def multiplies_bytes(bundle: Bundle) -> bool:
    """Whether a bundle's output matrix is multiplied as integers, as its other matrices are."""
    quantization, matrix = bundle.manifest.quantization, bundle.manifest.output_matrix
    whole = matrix is not None and matrix.dtype == "int8" and matrix.block_size is None
    return whole and quantization is not None and not quantization.weights_alone


def product_graph(*, integers: bool) -> bytes:
    """Return the graph of a product with rows that are its input: bytes [M, n], or floats [n, M]."""
    scores = value_bytes(SCORES, "float32", ("r", "n"))
    if not integers:
        node = node_bytes("Gemm", [HIDDEN, ROWS], SCORES, part(1, b"transB") + number(3, 1) + number(20, _INT))
        inputs = [value_bytes(HIDDEN, "float32", ("r", "m")), value_bytes(ROWS, "float32", ("n", "m"))]
        return model_bytes([node], inputs, [scores])
    node = node_bytes("MatMulIntegerToFloat", [HIDDEN, ROWS, UNIT, SCALES, ZERO, "", BIAS], SCORES, domain=CONTRIB)
    inputs = [
        value_bytes(HIDDEN, "uint8", ("r", "m")),
        value_bytes(ROWS, "int8", ("m", "n")),
        value_bytes(UNIT, "float32", ()),
        value_bytes(SCALES, "float32", ("n",)),
        value_bytes(ZERO, "uint8", ()),
        value_bytes(BIAS, "float32", ("n",)),
    ]
    return model_bytes([node], inputs, [scores])


def output_product(bundle: Bundle, session: Any) -> OutputProduct | None:
    """Return the product with a bundle's output matrix; None if it has none. The session is of ``product_graph``."""
    matrix = stored_matrix(bundle)
    if matrix is None:
        return None
    return ByteProduct(matrix, session) if multiplies_bytes(bundle) else FloatProduct(matrix, session)


class FloatProduct:
    """A product of floats."""

    def __init__(self, matrix: StoredMatrix, session: Any) -> None:
        self._matrix, self._session = matrix, session
        self._feeds: dict[str, Any] = {}
        self._bias: Floats | None = None

    def choose(self, ids: Ids) -> None:
        """Multiply with the rows of these ids from now on."""
        self._feeds, self._bias = {ROWS: self._matrix.rows(ids)}, self._matrix.bias(ids)

    def __call__(self, hidden: Floats) -> Floats:
        """Return hidden states [R, M] times the chosen rows, plus their bias, [R, n]."""
        scores: Floats = self._session.run(None, {HIDDEN: np.ascontiguousarray(hidden), **self._feeds})[0]
        return scores if self._bias is None else np.add(scores, self._bias, out=scores)


class ByteProduct:
    """A product of integers as the bundle's decoder graph computes it: it gives the same bits as the logits.

    Sums of integers are exact. What follows are operations on single numbers, which do not depend on the place of a
    column among others: the result is the same whatever else is multiplied.
    """

    def __init__(self, matrix: StoredMatrix, session: Any) -> None:
        self._matrix, self._session = matrix, session
        self._feeds: dict[str, Any] = {}
        self._bias: Floats | None = None  # of rows that have scales of their own
        self._factors: Floats | None = None  # hidden states are multiplied with, [M]

    def choose(self, ids: Ids) -> None:
        """Multiply with the rows of these ids from now on."""
        rows, scales = self._matrix.byte_rows(ids)
        scale, zero = self._matrix.activation or (1.0, MIDDLE)
        bias, smoothing = self._matrix.bias(ids), self._matrix.smoothing
        self._factors = None if smoothing is None else np.float32(1) / smoothing
        self._feeds = {
            ROWS: _transposed(rows),
            SCALES: scales,
            UNIT: np.array(scale, np.float32),
            ZERO: np.array(zero, np.uint8),
            BIAS: np.zeros(len(ids), np.float32),
        }
        if self._matrix.activation is None:
            self._bias = bias
        elif bias is not None:
            self._feeds[BIAS] = bias

    def __call__(self, hidden: Floats) -> Floats:
        """Return hidden states [R, M] times the chosen rows, plus their bias, [R, n]."""
        if self._factors is not None:
            hidden = hidden * self._factors
        if self._matrix.activation is not None:
            return self._product(hidden)
        steps: Floats = np.maximum(np.abs(hidden).max(-1, keepdims=True), TINY) * STEP
        scores = self._product(hidden / steps)
        np.multiply(scores, steps, out=scores)
        return scores if self._bias is None else np.add(scores, self._bias, out=scores)

    def _product(self, hidden: Floats) -> Floats:
        levels = np.rint(hidden / self._feeds[UNIT])
        np.clip(np.add(levels, self._feeds[ZERO], out=levels), 0, HIGHEST, out=levels)
        scores: Floats = self._session.run(None, {HIDDEN: levels.astype(np.uint8), **self._feeds})[0]
        return scores


def _transposed(rows: NDArray[np.int8]) -> NDArray[np.int8]:
    result = np.empty(rows.shape[::-1], np.int8)
    for start in range(0, len(rows), STRIP):
        strip = slice(start, start + STRIP)
        result[:, strip] = rows[strip].T
    return result
