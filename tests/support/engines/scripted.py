"""An engine without a model: a script has each row's next tokens, so the loop can be tested alone."""

import numpy as np

from fatdeploy.runtimes.engines.protocol import Capacity, Rows, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

SPEC = ModelSpec(vocab_size=10, width=1, max_source=4, max_target=6, pad_id=0, bos_id=1, eos_id=2)


class ScriptedEngine:
    """Source [n, ...] produces script n; ``fed`` records every call's tokens."""

    def __init__(self, scripts: dict[int, list[int]], spec: ModelSpec = SPEC) -> None:
        self.spec = spec
        self.scripts = scripts
        self.fed: list[list[list[int]]] = []
        self.released = 0

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> list[list[int]]:
        self.spec.check_source(source, mask)
        self.capacity = capacity
        return [list(self.scripts[int(row[0])]) for row in source]

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        assert want is Want.LOGITS
        self.fed.append(tokens.tolist())
        logits = np.zeros((len(state), 1, self.spec.vocab_size), np.float32)
        for row, script in enumerate(state):
            logits[row, 0, script.pop(0)] = 1
        return StepOut(np.zeros((len(state), 1, 1), np.float32), logits=logits)

    def reorder(self, state: list[list[int]], rows: Rows) -> None:
        state[:] = [list(state[row]) for row in rows]

    def length_log_probs(self, state: list[list[int]]) -> np.ndarray:
        raise NotImplementedError

    def output_rows(self, ids: np.ndarray) -> None:
        return None

    def output_bias(self, ids: np.ndarray) -> None:
        return None

    def release(self, state: list[list[int]]) -> None:
        self.released += 1

    def close(self) -> None: ...
