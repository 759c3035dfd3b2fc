"""Decoding with growing caches, the usual way over onnxruntime: ``session.run`` and numpy. Imports no torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from fatdeploy.runtimes.engines.protocol import Capacity, Floats, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

ENCODER, DECODER, SPEC = "encoder.onnx", "decoder.onnx", "spec.json"


@dataclass
class GrowingState:
    """The inputs of every step that depend on the source, and the caches so far."""

    source: dict[str, Any]
    past: list[Floats]


class GrowingCaches:
    """Two graphs of ``write_growing_caches`` behind the verbs of a ``Stepper``."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self.spec = ModelSpec.from_dict(json.loads((folder / SPEC).read_text()))
        self.encoder, self.decoder = (_session(folder / name, threads) for name in (ENCODER, DECODER))

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> GrowingState:  # noqa: ARG002 - caches grow
        """Read the source [B, S] and return empty caches."""
        spec = self.spec
        inputs = {spec.source_mask.name: mask}
        memory = self.encoder.run(None, {spec.source.name: source, **inputs})
        empty = [np.zeros(tensor.sized({"rows": len(source), "capacity": 0}), np.float32) for tensor in spec.past]
        return GrowingState(
            inputs | {tensor.name: array for tensor, array in zip(spec.memory, memory, strict=True)}, empty
        )

    def step(self, tokens: Tokens, state: GrowingState, want: Want) -> StepOut:  # noqa: ARG002 - the graph returns only logits
        """Feed tokens [R, 1] and return their logits."""
        past = {tensor.name: array for tensor, array in zip(self.spec.past, state.past, strict=True)}
        logits, *state.past = self.decoder.run(None, {self.spec.tokens.name: tokens, **state.source, **past})
        return StepOut(logits=logits)

    def release(self, state: GrowingState) -> None:
        """Do nothing: no memory is reused."""


def _session(path: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
