"""How long a device works between two marks, measured by events in its stream."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from fatdeploy.runtimes.engines.trt.device import Device, TimedEvent


class DeviceClock:
    """Times every call made inside ``timed``; the host's own work does not count."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._spans: list[tuple[TimedEvent, TimedEvent]] = []
        self._marks: list[int] = []  # the number of spans at each mark

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Put an event before and after the work enqueued meanwhile."""
        start, end = self._device.timed_event(), self._device.timed_event()
        self._spans.append((start, end))
        start.record()
        yield
        end.record()

    def mark(self) -> None:
        self._marks.append(len(self._spans))

    def seconds(self) -> list[float]:
        """Return the seconds of work between successive marks, and forget all of them."""
        try:
            if self._spans:
                self._spans[-1][1].wait()
            durations = [end.seconds_since(start) for start, end in self._spans]
            return [sum(durations[first:last]) for first, last in pairwise(self._marks)]
        finally:
            self.close()

    def close(self) -> None:
        """Free all events."""
        for span in self._spans:
            for event in span:
                event.close()
        self._spans, self._marks = [], []
