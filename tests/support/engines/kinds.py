"""Every kind of engine behind one function, for tests that hold for all of them."""

from typing import Any, Literal

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.engines.trt.engine import TrtState
from tests.support.bundles import bundle_of, model_of
from tests.support.devices.cpu import trt_engine

# The reference; graphs of both dialects on onnxruntime; plans on the test device.
Kind = Literal["eager", "ort", "standard", "trt"]


def engine_of(preset: str, kind: Kind) -> Engine[Any]:
    """Return a preset on an engine."""
    if kind == "eager":
        return EagerEngine(model_of(preset))
    return trt_engine(preset) if kind == "trt" else OrtEngine(bundle_of(preset, kind), OrtOptions(threads=1))


def places(state: OrtState | TrtState) -> list[int]:
    """Return the addresses of a decode's state."""
    if isinstance(state, TrtState):
        assert state.memory is not None
        return [address for addresses in state.memory.state for address in addresses]
    return [array.ctypes.data for arrays in state.arrays for array in arrays]
