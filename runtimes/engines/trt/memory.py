"""Device memory of one decode: sources, memory and state at addresses that never change, and rows that move in it."""

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock

from fatdeploy.runtimes.engines.row_moves import SPARE, planned_moves
from fatdeploy.runtimes.engines.trt.calls import PlanCall
from fatdeploy.runtimes.engines.trt.device import Device, Strips
from fatdeploy.runtimes.engines.trt.layout import ITEM_BYTES, Slab, n_bytes
from fatdeploy.spec import ModelSpec, StateSpec

# As in the pool of the CPU's engine: as many as decodes that usually run side by side.
MOST_WAITING = 4
# Calls that wait for another of their shape: sizes that a batch shrinks to, and a few lengths of prefixes. The bytes
# are of results, which a long prefix has many of.
MOST_CALLS = 32
MOST_CALL_BYTES = 2**28


@dataclass(frozen=True)
class DecodeMemoryShape:
    """What a decode's memory is allocated for: sources, their length, rows a source."""

    batch: int
    source: int
    rows_per_source: int

    def sizes(self, spec: ModelSpec) -> dict[str, int]:
        """Return the size of every axis but that of a step."""
        rows = self.batch * self.rows_per_source
        return {"batch": self.batch, "source": self.source, "rows": rows, "capacity": spec.max_target}


class DecodeMemory:
    """Memory of one decode on the device, and the calls that are bound to it; other decodes of its shape get both.

    A cache has one place: a step reads it and writes it there. Recurrent state has two that change roles.
    """

    def __init__(self, device: Device, spec: ModelSpec, shape: DecodeMemoryShape) -> None:
        self.device, self.spec, self.shape = device, spec, shape
        sizes = shape.sizes(spec)
        sources = (*spec.encoder_inputs(), *spec.encoder_outputs())
        self._row_bytes = {one.name: n_bytes(one, {**sizes, "batch": 1, "rows": 1}) for one in (*sources, *spec.state)}
        parts = {one.name: n_bytes(one, sizes) for one in sources}
        self._first_state = spec.state[0].name if spec.state else None
        for one in spec.state:
            parts |= {name: n_bytes(one, sizes) for name in _names(one)}
        self.slab = Slab(device, parts | {"spare": max(self._row_bytes.values())})
        self.sources = {one.name: self.slab.place(one.name) for one in sources}
        self.state = [[self.slab.place(name) for name in _names(one)] for one in spec.state]
        self.encoding: PlanCall | None = None
        self.calls: dict[tuple[int, int, int], PlanCall] = {}
        self.busy = Lock()  # while a thread uses it: nobody frees it then
        self.spoilt = False  # a call failed: nobody knows what is left
        self.closed = False
        try:
            self.event = device.event()
        except BaseException:
            self.slab.close()
            raise

    @property
    def n_sets(self) -> int:
        """How many roles the places of state have: steps take them in turn."""
        return max([len(places) for places in self.state], default=1)

    def places(self, role: int) -> tuple[list[int], list[int]]:
        """Return where the state is read from and written to by a step in this role."""
        return [each[role % len(each)] for each in self.state], [each[(role + 1) % len(each)] for each in self.state]

    def zero_state(self) -> None:
        """Make state as good as new: sums start from zero, and zero times a NaN that was left in a cache is NaN."""
        if self._first_state is not None:
            start = self.slab.offsets[self._first_state]
            self.device.zero(self.slab.address + start, self.slab.offsets["spare"] - start)

    def move_state(self, rows: Sequence[int], role: int, position: int) -> None:
        """Let row i of the state hold what row rows[i] held, as far as it is written."""
        moves = planned_moves(rows) if position else []
        for one, place in zip(self.spec.state, self.places(role)[0], strict=True):
            strips = written_strips(one, self.shape.sizes(self.spec), position)
            self._move(moves, place, self._row_bytes[one.name], strips)

    def move_sources(self, names: Iterable[str], kept: Sequence[int]) -> None:
        """Let source i be what source kept[i] was, in all tensors of these names."""
        moves = planned_moves(kept)
        for name in names:
            size = self._row_bytes[name]
            self._move(moves, self.sources[name], size, Strips(size, size, 1))

    def _move(self, moves: Sequence[tuple[int, int]], place: int, row_bytes: int, strips: Strips) -> None:
        spare = self.slab.place("spare")
        for to, source in moves:
            addresses = [spare if row == SPARE else place + row * row_bytes for row in (to, source)]
            self.device.move(addresses[0], addresses[1], strips)

    def settle(self) -> None:
        """Close the calls that waited longest, where they are too many or too large."""
        while self.calls and (
            len(self.calls) > MOST_CALLS or sum(call.n_bytes for call in self.calls.values()) > MOST_CALL_BYTES
        ):
            self.calls.pop(next(iter(self.calls))).close()

    def close(self) -> None:
        """Give everything back."""
        if self.closed:
            return
        self.closed = True
        for call in (self.encoding, *self.calls.values()):
            if call is not None:
                call.close()
        self.encoding, self.calls = None, {}
        self.event.close()
        self.slab.close()


class HeldPool:
    """Memory that waits for the next decode of its shape; the oldest is freed."""

    def __init__(self) -> None:
        self._returned: deque[DecodeMemory] = deque()
        self._waiting: list[DecodeMemory] = []

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def give(self, held: DecodeMemory) -> None:
        """Take memory back. Nothing is asked of the device: the garbage collector may be who gives, at any moment."""
        self._returned.append(held)

    def take(self, shape: DecodeMemoryShape) -> DecodeMemory | None:
        """Return memory of this shape, if there is any."""
        self.settle()
        for index in reversed(range(len(self._waiting))):
            if self._waiting[index].shape == shape:
                return self._waiting.pop(index)
        return None

    def settle(self, most: int = MOST_WAITING) -> list[DecodeMemory]:
        """Close what is spoilt and what waited longest; return what was closed."""
        while self._returned:
            self._waiting.append(self._returned.popleft())
        sound = [held for held in self._waiting if not held.spoilt]
        dropped = [held for held in self._waiting if held.spoilt] + sound[: max(0, len(sound) - most)]
        self._waiting = sound[max(0, len(sound) - most) :]
        for held in dropped:
            held.close()
        for held in self._waiting:
            held.settle()
        return dropped


def written_strips(spec: StateSpec, sizes: Mapping[str, int], position: int) -> Strips:
    """Return which part of a row of state steps up to a position have written."""
    _, *axes = spec.shape
    shape = spec.sized(sizes)[1:]
    item = ITEM_BYTES[spec.dtype]
    if "capacity" not in axes:
        whole = math.prod(shape) * item
        return Strips(whole, whole, 1)
    at = axes.index("capacity")
    inner = math.prod(shape[at + 1 :]) * item
    return Strips(position * inner, shape[at] * inner, math.prod(shape[:at]))


def _names(one: StateSpec) -> list[str]:
    """Return what the places of a state tensor are called in its slab."""
    return [one.name] if one.kind == "cache" else [one.name, f"{one.name} again"]
