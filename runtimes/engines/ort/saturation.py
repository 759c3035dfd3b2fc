"""Whether this CPU adds the products of a bundle's 8-bit integers exactly: some add two in 16 bits, which overflow."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable
from fatdeploy.manifest import SATURATION
from fatdeploy.runtimes.engines.ort.sessions import run_failed
from fatdeploy.spec import SATURATION_INPUT, SATURATION_OUTPUT

# One row, and as many as other kernels are used for.
ROWS = (1, 9)


def check_saturation(ort: Any, bundle: Bundle) -> None:
    """Raise if the weights of a quantized bundle are too large for this CPU; a few milliseconds."""
    quantization = bundle.manifest.quantization
    if quantization is None or quantization.weights_alone:
        return
    path = bundle.file(SATURATION)
    try:
        sums = sums_of(ort, path)
    except Exception as error:  # onnxruntime's have no base of their own
        raise run_failed(bundle, SATURATION, error) from error
    for width, found in sums:
        refuse_overflow(found, exact_sum(width, quantization.weight_bits), bundle)


def sums_of(ort: Any, path: Path) -> list[tuple[int, NDArray[np.int32]]]:
    """Return how many products a probe adds and what comes of it here, for a row and for several."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    width = session.get_inputs()[0].shape[1]
    given = [np.full((rows, width), 255, np.uint8) for rows in ROWS]
    return [(width, session.run([SATURATION_OUTPUT], {SATURATION_INPUT: largest})[0]) for largest in given]


def exact_sum(width: int, bits: int) -> int:
    """Return the size of every sum of a probe where nothing overflows."""
    return int(width * 255 * (2 ** (bits - 1) - 1))


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
