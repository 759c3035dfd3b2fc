"""Whether this CPU adds the products of a bundle's 8-bit integers exactly: some add two in 16 bits, which overflow."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import SATURATION, Bundle
from fatdeploy.errors import BackendUnavailable
from fatdeploy.runtimes.ort_sessions import run_failed
from fatdeploy.spec import SATURATION_INPUT, SATURATION_OUTPUT

# One row, and as many as other kernels are used for.
ROWS = (1, 9)


def check_saturation(ort: Any, bundle: Bundle) -> None:
    """Raise if the weights of a quantized bundle are too large for this CPU; a few milliseconds."""
    quantization = bundle.manifest.quantization
    if quantization is None or quantization.weights_alone:
        return
    limit = 2 ** (quantization.weight_bits - 1) - 1
    for width, found in _sums(ort, bundle):
        refuse_overflow(found, width * 255 * limit, bundle)


def _sums(ort: Any, bundle: Bundle) -> list[tuple[int, NDArray[np.int32]]]:
    """Return how many products are added and what comes of it, for a row and for several."""
    path = bundle.file(SATURATION)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        width = session.get_inputs()[0].shape[1]
        given = [np.full((rows, width), 255, np.uint8) for rows in ROWS]
        return [(width, session.run([SATURATION_OUTPUT], {SATURATION_INPUT: largest})[0]) for largest in given]
    except Exception as error:  # onnxruntime's have no base of their own
        raise run_failed(bundle, SATURATION, error) from error


def refuse_overflow(found: NDArray[np.int32], expected: int, bundle: Bundle) -> None:
    """Raise unless every sum is what exact integers give."""
    if (np.abs(found.astype(np.int64)) == expected).all():
        return
    quantization = bundle.manifest.quantization
    raise BackendUnavailable(
        f"{bundle.path} has 8-bit weights for CPUs of the class {quantization.cpu if quantization else 'any'}, and "
        f"this CPU overflows when it adds their products ({int(np.abs(found).min())} for {expected}): its answers "
        "would be wrong without a word. Export it with --cpu any, which is right everywhere"
    )
