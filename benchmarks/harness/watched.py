"""An engine that knows which of its states are in use: what a decode holds, and what it forgot to give back."""

from threading import Lock
from typing import Any

from fatdeploy.runtimes.engines.ort.engine import OrtEngine, OrtState
from fatdeploy.spec import Mask, Tokens


class Watched:
    """Another engine, with a list of the states that were not given back yet."""

    def __init__(self, engine: OrtEngine) -> None:
        self.engine, self.spec = engine, engine.spec
        self.held: list[OrtState] = []
        self.most_held = 0
        self._lock = Lock()

    def encode(self, source: Tokens, mask: Mask, capacity: Any) -> OrtState:
        """Read the source, and remember its state."""
        state = self.engine.encode(source, mask, capacity)
        with self._lock:
            self.held.append(state)
            self.most_held = max(self.most_held, len(self.held))
        return state

    def release(self, state: OrtState) -> None:
        """Take a state back, and forget it."""
        self.engine.release(state)
        with self._lock:
            # By identity: states have arrays, which are not equal to anything.
            self.held = [one for one in self.held if one is not state]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)
