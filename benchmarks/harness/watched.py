"""An engine that lists the states in use: the memory of a decode, and states that were never released."""

from threading import Lock
from typing import Any

from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.spec import Mask, Tokens


class WatchedEngine:
    """Another engine, with a list of the states that are not released yet."""

    def __init__(self, engine: OrtEngine) -> None:
        self.engine, self.spec = engine, engine.spec
        self.states: list[OrtState] = []
        self.most_states = 0
        self._lock = Lock()

    def encode(self, source: Tokens, mask: Mask, capacity: Any) -> OrtState:
        """Read the source, and list its state."""
        state = self.engine.encode(source, mask, capacity)
        with self._lock:
            self.states.append(state)
            self.most_states = max(self.most_states, len(self.states))
        return state

    def release(self, state: OrtState) -> None:
        """Release a state, and remove it from the list."""
        self.engine.release(state)
        with self._lock:
            # By identity: states have arrays, which cannot be compared with ==.
            self.states = [other for other in self.states if other is not state]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
