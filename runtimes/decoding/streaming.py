"""A target while it is decoded: an event for each new piece, in a loop, from a thread or in an event loop."""

from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Protocol, Self

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.deltas import Deltas
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis


@dataclass(frozen=True)
class Event:
    """What is new: tokens, and text if the bundle has a tokenizer. The last event of a stream has the whole result.

    All ``tokens`` together are the hypothesis's, and so is all ``text``: nothing is told that may still change.
    """

    tokens: tuple[int, ...] = ()
    text: str | None = None
    hypothesis: Hypothesis | None = None


class Steps(Protocol):
    """What a stream needs to know of a decode of one source: it goes on a step at a time."""

    def advance(self) -> bool:
        """Make one step; False when all is said."""
        ...

    def said(self) -> tuple[int, ...]:
        """Return the tokens so far."""
        ...

    def found(self) -> list[Hypothesis]:
        """Return the result."""
        ...

    def close(self) -> None:
        """Give the engine's state back."""
        ...


class Stream:
    """Events of one target, for ``for`` and ``async for``. Nothing runs before the first one is asked for.

    In an event loop each step runs in a thread of its default executor. ``close`` ends a stream at once, from any
    thread; so does leaving its ``with``, dropping it, and cancelling the task that waits for an event. The state goes
    back to the engine then, or when the step that is under way is over.
    """

    def __init__(
        self,
        begin: Callable[[], Steps],
        deltas: Deltas,
        completed: Callable[[Hypothesis], Hypothesis],
        *,
        in_reading_order: bool = True,
    ) -> None:
        self._begin, self._deltas, self._completed = begin, deltas, completed
        self._in_reading_order = in_reading_order
        self._guard = Lock()  # of the three below; never held while something runs
        self._steps: Steps | None = None
        self._busy = False
        self._over = False

    def close(self) -> None:
        """End the stream; there are no more events."""
        with self._guard:
            self._over = True
            idle = not self._busy
        if idle:
            self._give_back()

    async def aclose(self) -> None:
        """End the stream, as ``close`` does: neither waits."""
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while (event := self._step()) is not None:
            if _tells(event):
                return event
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        # On use: most applications have no event loop, and importing one takes longer than a short decode.
        from asyncio import to_thread

        try:
            while (event := await to_thread(self._step)) is not None:
                if _tells(event):
                    return event
        except BaseException:
            # Above all a cancellation, which does not reach the thread.
            self.close()
            raise
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _step(self) -> Event | None:
        """Make one step and return what it tells, maybe nothing; None if the stream is over."""
        if not self._started_step():
            return None
        last = True
        try:
            event = self._advanced()
            last = event.hypothesis is not None
        finally:
            cancelled = self._ended_step(last)
        return None if cancelled else event

    def _started_step(self) -> bool:
        with self._guard:
            if self._busy and not self._over:
                raise ConfigError("this stream is being read by somebody else: open another with model.stream(...)")
            if self._over:
                return False
            self._busy = True
            return True

    def _ended_step(self, last: bool) -> bool:
        """Return whether the stream was closed meanwhile."""
        with self._guard:
            self._busy = False
            cancelled, self._over = self._over, self._over or last
            over = self._over
        if over:
            self._give_back()
        return cancelled

    def _advanced(self) -> Event:
        if self._steps is None:
            self._steps = self._begin()
        if self._steps.advance():
            return Event(*self._deltas.grown(self._steps.said())) if self._in_reading_order else Event()
        [found] = self._steps.found()
        found = self._completed(found)
        return Event(*self._deltas.rest(found), found)

    def _give_back(self) -> None:
        with self._guard:
            steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()


def _tells(event: Event) -> bool:
    return bool(event.tokens or event.text or event.hypothesis is not None)
