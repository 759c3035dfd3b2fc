"""How many of the reference's tokens an engine chooses too: the number that stands beside every speed. No torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fatdeploy.runtimes.engines.protocol import Capacity, Engine, State
from fatdeploy.runtimes.proof.lockstep import step_logits
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import ModelSpec, Tokens


@dataclass(frozen=True)
class Fidelity:
    """How many of the reference's tokens an engine chooses too."""

    tokens: int  # of all probes
    same: int  # each step is given the reference's own tokens before it

    @property
    def share(self) -> float:
        """From 0 to 1; nothing compared is no agreement."""
        return self.same / self.tokens if self.tokens else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "same": self.same, "share": self.share}


def token_fidelity(engine: Engine[State], probes: Sequence[Probe]) -> Fidelity:
    """Return how often an engine's best token is the reference's, on the probes that came with a bundle.

    It reads the reference's tokens, whatever it would have said itself: one early difference is one, and not a target
    that goes another way from there.
    """
    return Fidelity(
        tokens=sum(probe.tokens.size for probe in probes), same=sum(_same_tokens(engine, probe) for probe in probes)
    )


def _same_tokens(engine: Engine[State], probe: Probe) -> int:
    state = engine.encode(probe.source, probe.mask, Capacity(1, probe.tokens.shape[1]))
    try:
        # Step by step, as a decode does it: a call of many tokens may choose other kernels, and takes more memory.
        said = [step_logits(engine, tokens, state).argmax(-1) for tokens in _read(engine.spec, probe.tokens)]
    finally:
        engine.release(state)
    return int((np.concatenate(said, 1) == probe.tokens).sum())


def _read(spec: ModelSpec, tokens: Tokens) -> Iterator[Tokens]:
    """Yield what each call reads: BOS, then the reference's tokens; BOS everywhere where all is said at once."""
    if spec.decoding == "parallel":
        yield np.full(tokens.shape, spec.bos_id)
        return
    before = np.column_stack([np.full(len(tokens), spec.bos_id), tokens[:, :-1]])
    for position in range(tokens.shape[1]):
        yield np.ascontiguousarray(before[:, position : position + 1])
