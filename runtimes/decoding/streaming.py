"""A target while it is decoded: an event for each new piece, for loops, threads and event loops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from types import TracebackType
from typing import Protocol, Self, TypeVar

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.closing import ClosedOnExit
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.text.tokenizer import Tokenizer

# What a decoder writes for bytes that are not a character, or not yet.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

Piece = tuple[tuple[int, ...], str | None]
TextOrTokens = TypeVar("TextOrTokens", str, tuple[int, ...])


@dataclass(frozen=True)
class Event:
    """New tokens, and their text if the bundle has a tokenizer. The last event of a stream has the whole result.

    All ``tokens`` together are the hypothesis's, and so is all ``text``: an event has nothing that may still change.
    """

    tokens: tuple[int, ...] = ()
    text: str | None = None
    hypothesis: Hypothesis | None = None


class Steps(Protocol):
    """The part of a decode of one source that a stream uses: it advances step by step."""

    def advance(self) -> bool:
        """Make one step; False when decoding is complete."""
        ...

    def tokens_so_far(self) -> tuple[int, ...]:
        """Return the tokens so far."""
        ...

    def results(self) -> list[Hypothesis]:
        """Return the result."""
        ...

    def close(self) -> None:
        """Return the state to the engine."""
        ...


class Deltas:
    """Cuts a growing target into pieces. A piece is never taken back, so whatever may change waits.

    Among the tokens that is the beginning of a stop sequence. In the text it is the beginning of a stop text, blanks at
    the end, which some decoders remove before punctuation, and incomplete characters. If a decoder changes text that
    was sent before, which none of the usual ones does, nothing is sent until it agrees again.
    """

    def __init__(self, stops: Sequence[Sequence[int] | str], tokenizer: Tokenizer | None) -> None:
        self._stop_ids = [tuple(stop) for stop in stops if not isinstance(stop, str)]
        self._stop_texts = [stop for stop in stops if isinstance(stop, str)]
        self._tokenizer = tokenizer
        self._n_sent = 0
        self._sent_text = ""

    def grown(self, tokens: tuple[int, ...]) -> Piece:
        """Return what is new and certain in the tokens so far."""
        certain = tokens[: len(tokens) - _begun(tokens, self._stop_ids)]
        return self._new_tokens(certain), self._new_text(self._certain_text(certain))

    def rest(self, hypothesis: Hypothesis) -> Piece:
        """Return what was not sent yet of the complete target."""
        return self._new_tokens(hypothesis.tokens), self._new_text(hypothesis.text)

    def _certain_text(self, tokens: tuple[int, ...]) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.text(tokens[: self._tokenizer.n_certain(tokens)])
        end = len(text)
        while end and (text[end - 1].isspace() or text[end - 1] == REPLACEMENT):
            end -= 1
        return text[: end - _begun(text[:end], self._stop_texts)]

    def _new_tokens(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        new = tokens[self._n_sent :]
        self._n_sent += len(new)
        return new

    def _new_text(self, text: str | None) -> str | None:
        if text is None:
            return None
        if not text.startswith(self._sent_text):
            return ""
        new = text[len(self._sent_text) :]
        self._sent_text = text
        return new


class Stream(ClosedOnExit):
    """Events of one target, for ``for`` and ``async for``. Nothing runs before the first event is requested.

    In an event loop each step runs in a thread of its default executor. ``close`` ends a stream at once, from any
    thread; so does leaving its ``with``, dropping it, and cancelling the task that waits for an event. The state
    returns to the engine then, or when the current step ends.
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
        self._guard = Lock()  # guards the three below; never locked while a step runs
        self._steps: Steps | None = None
        self._busy = False
        self._over = False

    def close(self) -> None:
        """End the stream; there are no more events."""
        with self._guard:
            self._over = True
            idle = not self._busy
        if idle:
            self._release()

    async def aclose(self) -> None:
        """End the stream as ``close`` does; neither waits."""
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Event:
        while (event := self._step()) is not None:
            if _has_news(event):
                return event
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        # Imported on use: most applications have no event loop, and the import takes longer than a short decode.
        from asyncio import to_thread

        try:
            while (event := await to_thread(self._step)) is not None:
                if _has_news(event):
                    return event
        except BaseException:
            # Mainly for a cancellation, which does not reach the thread.
            self.close()
            raise
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _step(self) -> Event | None:
        """Make one step and return its event, which may be empty; None if the stream is over."""
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
                raise ConfigError("another thread is reading this stream: open another with model.stream(...)")
            if self._over:
                return False
            self._busy = True
            return True

    def _ended_step(self, last: bool) -> bool:
        """Return whether the stream was closed during the step."""
        with self._guard:
            self._busy = False
            cancelled, self._over = self._over, self._over or last
            over = self._over
        if over:
            self._release()
        return cancelled

    def _advanced(self) -> Event:
        if self._steps is None:
            self._steps = self._begin()
        if self._steps.advance():
            return Event(*self._deltas.grown(self._steps.tokens_so_far())) if self._in_reading_order else Event()
        [result] = self._steps.results()
        hypothesis = self._completed(result)
        return Event(*self._deltas.rest(hypothesis), hypothesis)

    def _release(self) -> None:
        with self._guard:
            steps, self._steps = self._steps, None
        if steps is not None:
            steps.close()


def _has_news(event: Event) -> bool:
    return bool(event.tokens or event.text or event.hypothesis is not None)


def _begun(text: TextOrTokens, stops: Sequence[TextOrTokens]) -> int:
    """Return the length of the longest end of ``text`` with which a stop begins."""
    longest = min(len(text), max(map(len, stops), default=0))
    return next((n for n in range(longest, 0, -1) if any(text[-n:] == stop[:n] for stop in stops)), 0)
