"""How many of the reference's tokens an engine also chooses: the number that stands beside every speed. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fatdeploy.runtimes.engines.protocol import Capacity, Engine, State
from fatdeploy.runtimes.proof.forced import decoder_inputs, step_logits
from fatdeploy.runtimes.proof.probes import Probe


@dataclass(frozen=True)
class Fidelity:
    """How many of the reference's tokens an engine also chooses."""

    tokens: int  # of all probes
    same: int  # each step reads the reference's own tokens before it

    @property
    def share(self) -> float:
        """From 0 to 1; comparing nothing is no agreement."""
        return self.same / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "same": self.same, "share": self.share}


def token_fidelity(engine: Engine[State], probes: Sequence[Probe]) -> Fidelity:
    """Return how often an engine's best token is the reference's, on the probes that came with a bundle.

    The engine reads the reference's tokens whatever it would have chosen itself: an early difference counts once, and
    does not send the rest of the target another way.
    """
    return Fidelity(
        tokens=sum(probe.tokens.size for probe in probes), same=sum(_same_tokens(engine, probe) for probe in probes)
    )


def _same_tokens(engine: Engine[State], probe: Probe) -> int:
    inputs = decoder_inputs(engine.spec, probe.tokens)
    # Step by step, as a decode does it: a call of many tokens may choose other kernels, and takes more memory.
    width = inputs.shape[1] if engine.spec.decoding == "parallel" else 1
    state = engine.encode(probe.source, probe.mask, Capacity(1, inputs.shape[1]))
    try:
        # Only the best token of each step is kept: the logits of a whole probe may be hundreds of megabytes.
        tokens = [
            step_logits(engine, np.ascontiguousarray(inputs[:, start : start + width]), state).argmax(-1)
            for start in range(0, inputs.shape[1], width)
        ]
    finally:
        engine.release(state)
    return int((np.concatenate(tokens, 1) == probe.tokens).sum())
