"""How long a device works on what is asked of it between two marks, by events in its stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from fatdeploy.runtimes.engines.trt.device import Device, TimedEvent


class DeviceClock:
    """Times every call that is made inside of ``timed``; what the host does meanwhile does not count."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: list[tuple[TimedEvent, TimedEvent]] = []
        self._marks: list[int] = []  # how many spans there were at each

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Put an event before and one behind what is asked for meanwhile."""
        begun, ended = self._device.timed_event(), self._device.timed_event()
        self._spans.append((begun, ended))
        begun.record()
        yield
        ended.record()

    def mark(self) -> None:
        self._marks.append(len(self._spans))

    def seconds(self) -> list[float]:
        """Return the seconds of work from each mark to the next, and forget them all."""
        try:
            if self._spans:
                self._spans[-1][1].wait()
            took = [ended.seconds_since(begun) for begun, ended in self._spans]
            return [sum(took[first:last]) for first, last in pairwise(self._marks)]
        finally:
            self.close()

    def close(self) -> None:
        """Give all events back."""
        for span in self._spans:
            for event in span:
                event.close()
        self._spans, self._marks = [], []
