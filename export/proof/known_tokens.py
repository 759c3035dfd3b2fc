"""The reference on tokens that are known already: every row alone, and many positions in one call."""

from dataclasses import dataclass

import numpy as np

from fatdeploy.errors import ExportFailed
from fatdeploy.export.models.eager import EagerEngine, EagerState
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, StepOut, Want
from fatdeploy.runtimes.proof.forced import decoder_inputs, step_logits
from fatdeploy.runtimes.proof.probes import Probe
from fatdeploy.spec import Mask, Tokens

# Positions that are read in one call: a call reads all weights, whether for one token or for many, and the logits of
# eight rows of a base model are 33 MB.
TOGETHER = 32


@dataclass
class KnownState:
    """A state for each row, and the logits of the positions that were read ahead."""

    rows: list[EagerState]
    ahead: Floats  # [B, up to TOGETHER, V]
    position: int = 0


class KnownTokens:
    """Follows a probe's tokens with every row alone, without padding, and many positions in one call.

    An engine that agrees with it lets no row depend on its batch, and no step on how earlier tokens were read.
    """

    def __init__(self, engine: EagerEngine, probe: Probe) -> None:
        self.engine = engine
        self.spec = engine.spec
        self.tokens = probe.tokens  # [B, T]
        self.inputs = decoder_inputs(self.spec, self.tokens)

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> KnownState:
        """Return a state for each row."""
        rows = [ids[None, real] for ids, real in zip(source, mask, strict=True)]
        states = [self.engine.encode(row, np.ones_like(row, bool), capacity) for row in rows]
        return KnownState(states, np.empty((len(rows), 0, self.spec.vocab_size), np.float32))

    def step(self, tokens: Tokens, state: KnownState, want: Want) -> StepOut:  # noqa: ARG002 - logits are all it has
        """Return the logits after tokens, which are the known ones as long as the reference chooses them itself."""
        steps = tokens.shape[1]
        if not state.ahead.shape[1]:
            columns = slice(state.position, state.position + max(TOGETHER, steps))
            rows = zip(self.inputs[:, columns], state.rows, strict=True)
            state.ahead = np.concatenate([step_logits(self.engine, inputs[None], row) for inputs, row in rows])
        logits, state.ahead = state.ahead[:, :steps], state.ahead[:, steps:]
        self._check(logits.argmax(-1), state.position)
        state.position += steps
        return StepOut(logits=logits)

    def _check(self, chosen: Tokens, position: int) -> None:
        """Raise unless the reference chooses what it chose when the probe was drawn; its margins leave no excuse."""
        known = self.tokens[:, position : position + chosen.shape[1]]
        wrong = np.argwhere(chosen != known)
        if wrong.size:
            row, column = wrong[0].tolist()
            raise ExportFailed(
                f"the model contradicts itself at row {row}, step {position + column}: token {known[row, column]} when "
                f"it reads rows together and tokens one by one, {chosen[row, column]} when it reads many tokens of one "
                "row; encode and step must give the same for both"
            )

    def release(self, state: KnownState) -> None:
        """Nothing is kept for the next state."""
