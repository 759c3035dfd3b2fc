"""A scripted engine that waits in its steps, and ways to wait for it: what runs at the same time can be tested."""

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from fatdeploy import Event
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.spec import ModelSpec, Tokens
from tests.support.engines.scripted import SPEC, ScriptedEngine

# How long a test waits for what must happen: only a failure takes as long.
PATIENCE = 30


class GatedEngine(ScriptedEngine):
    """Waits in each step until it may go on, if there is a gate; counts states that were given and taken back."""

    def __init__(self, script: list[int], spec: ModelSpec = SPEC, *, gated: bool = False) -> None:
        super().__init__({5: script}, spec)
        self.encoded = 0
        self.entered, self.gate = threading.Event(), threading.Event()
        self.in_step = False
        if not gated:
            self.gate.set()

    def encode(self, *given: Any) -> list[list[int]]:
        self.encoded += 1
        return super().encode(*given)

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        self.in_step = True
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        try:
            return super().step(tokens, state, want)
        finally:
            self.in_step = False

    def release(self, state: list[list[int]]) -> None:
        assert not self.in_step, "a state was given back during a step"
        super().release(state)


def eventually(happens: Callable[[], bool]) -> bool:
    """Whether something is so within the time that a test is patient."""
    waited = threading.Event()
    return any(happens() or waited.wait(0.01) for _ in range(100 * PATIENCE))


async def collected(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]
