"""A scripted engine that waits inside its steps, and ways to wait for it: for tests of concurrency."""

import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from fatdeploy import Event
from fatdeploy.runtimes.engines.protocol import StepOut, Want
from fatdeploy.spec import ModelSpec, Tokens
from tests.support.engines.scripted import SPEC, ScriptedEngine

# How many seconds a test waits for something that must happen; only a failing test waits this long.
PATIENCE = 30


class GatedEngine(ScriptedEngine):
    """If gated, waits in each step until the gate opens; counts encoded and released states."""

    def __init__(self, script: list[int], spec: ModelSpec = SPEC, *, gated: bool = False) -> None:
        super().__init__({5: script}, spec)
        self.encoded = 0
        self.entered, self.gate = threading.Event(), threading.Event()
        self.in_step = False
        if not gated:
            self.gate.set()

    def encode(self, *arguments: Any) -> list[list[int]]:
        self.encoded += 1
        return super().encode(*arguments)

    def step(self, tokens: Tokens, state: list[list[int]], want: Want) -> StepOut:
        self.in_step = True
        self.entered.set()
        assert self.gate.wait(PATIENCE)
        try:
            return super().step(tokens, state, want)
        finally:
            self.in_step = False

    def release(self, state: list[list[int]]) -> None:
        assert not self.in_step, "a state was released during a step"
        super().release(state)


def eventually(happens: Callable[[], bool]) -> bool:
    """Whether something happens within PATIENCE seconds."""
    never = threading.Event()
    return any(happens() or never.wait(0.01) for _ in range(100 * PATIENCE))


async def collected(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]
