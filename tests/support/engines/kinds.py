"""Every engine behind one name, for what must hold for all of them."""

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
    """Return where the state of a decode stands."""
    if isinstance(state, TrtState):
        assert state.memory is not None
        return [place for places in state.memory.state for place in places]
    return [array.ctypes.data for arrays in state.arrays for array in arrays]
