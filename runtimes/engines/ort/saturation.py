"""Whether this CPU adds products of a bundle's 8-bit integers exactly: some add pairs in 16 bits, which overflow."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable
from fatdeploy.manifest import SATURATION
from fatdeploy.runtimes.engines.ort.sessions import opened_session, run_failed
from fatdeploy.spec import SATURATION_INPUT, SATURATION_OUTPUT

# One row, and enough rows that onnxruntime uses other kernels.
ROWS = (1, 9)


def check_saturation(ort: Any, bundle: Bundle) -> None:
    """Raise if the weights of a quantized bundle are too large for this CPU; takes a few milliseconds."""
    quantization = bundle.manifest.quantization
    if quantization is None or quantization.weights_alone:
        return
    path = bundle.file(SATURATION)
    try:
        probes = sums_of(ort, path)
    except Exception as error:  # onnxruntime's exceptions have no common base class
        raise run_failed(bundle, SATURATION, error) from error
    for width, sums in probes:
        refuse_overflow(sums, exact_sum(width, quantization.weight_bits), bundle)


def sums_of(ort: Any, path: Path) -> list[tuple[int, NDArray[np.int32]]]:
    """Return how many products a probe adds and the sums that this CPU computes, for one row and for several."""
    session = opened_session(ort, path, threads=1)
    width = session.get_inputs()[0].shape[1]
    inputs = [np.full((rows, width), 255, np.uint8) for rows in ROWS]
    return [(width, session.run([SATURATION_OUTPUT], {SATURATION_INPUT: largest})[0]) for largest in inputs]


def exact_sum(width: int, bits: int) -> int:
    """Return the absolute value of every sum of a probe if nothing overflows."""
    return int(width * 255 * (2 ** (bits - 1) - 1))


def refuse_overflow(sums: NDArray[np.int32], expected: int, bundle: Bundle) -> None:
    """Raise unless every sum is what exact integers give."""
    if (np.abs(sums.astype(np.int64)) == expected).all():
        return
    quantization = bundle.manifest.quantization
    raise BackendUnavailable(
        f"{bundle.path} has 8-bit weights for CPUs of the class {quantization.cpu if quantization else 'any'}, and "
        f"this CPU overflows when it adds their products ({int(np.abs(sums).min())} instead of {expected}): it would "
        "silently produce wrong results. Export it with --cpu any, which is right everywhere"
    )
