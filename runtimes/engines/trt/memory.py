"""Device memory of one decode: sources, encoder outputs and state at fixed addresses, and rows that move in it."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Lock

from fatdeploy.runtimes.engines.row_moves import SPARE, Strips, planned_moves, written_strips
from fatdeploy.runtimes.engines.trt.calls import PlanCall
from fatdeploy.runtimes.engines.trt.device import Device
from fatdeploy.runtimes.engines.trt.layout import Slab, n_bytes
from fatdeploy.spec import ModelSpec, StateSpec

# As in the CPU engine's pool: the number of decodes that usually run concurrently.
MOST_WAITING = 4
# Calls kept for the next of their shape: sizes that a batch shrinks to, and a few lengths of prefixes. The bytes are
# those of results; a long prefix has many.
MOST_CALLS = 32
MOST_CALL_BYTES = 2**28


@dataclass(frozen=True)
class DecodeMemoryShape:
    """The sizes that a decode's memory is allocated for: sources, their length, rows per source."""

    batch: int
    source: int
    rows_per_source: int

    def sizes(self, spec: ModelSpec) -> dict[str, int]:
        """Return the size of every axis except the step's."""
        rows = self.batch * self.rows_per_source
        return {"batch": self.batch, "source": self.source, "rows": rows, "capacity": spec.max_target}


class DecodeMemory:
    """Memory of one decode on the device, and the calls bound to it; later decodes of the same shape reuse both.

    A cache has one place, where a step reads and writes it. Recurrent state and rings have two that change roles:
    TensorRT writes in place only what it knows to be a cache, and knows none that turns.
    """

    def __init__(self, device: Device, spec: ModelSpec, shape: DecodeMemoryShape) -> None:
        self.device, self.spec, self.shape = device, spec, shape
        sizes = shape.sizes(spec)
        sources = (*spec.encoder_inputs(), *spec.memory, *spec.length_log_probs)
        self._row_bytes = {
            tensor.name: n_bytes(tensor, {**sizes, "batch": 1, "rows": 1}) for tensor in (*sources, *spec.state)
        }
        parts = {tensor.name: n_bytes(tensor, sizes) for tensor in sources}
        self._first_state = spec.state[0].name if spec.state else None
        for tensor in spec.state:
            parts |= {name: n_bytes(tensor, sizes) for name in _place_names(tensor)}
        self.slab = Slab(device, parts | {"spare": max(self._row_bytes.values())})
        self.sources = {tensor.name: self.slab.place(tensor.name) for tensor in sources}
        self.state = [[self.slab.place(name) for name in _place_names(tensor)] for tensor in spec.state]
        # Where the first step reads the state: the encoder writes it there itself.
        started = [places[0] for tensor, places in zip(spec.state, self.state, strict=True) if tensor.start == "source"]
        self.starts = dict(zip((tensor.name for tensor in spec.starts), started, strict=True))
        self.encoding: PlanCall | None = None
        self.calls: dict[tuple[int, int, int], PlanCall] = {}
        self.busy = Lock()  # while a thread uses the memory, so that nobody frees it
        self.spoilt = False  # a call failed: the content is unknown
        self.closed = False
        try:
            self.event = device.event()
        except BaseException:
            self.slab.close()
            raise

    @property
    def n_sets(self) -> int:
        """How many roles the places of state have; steps take turns."""
        return max([len(places) for places in self.state], default=1)

    def places(self, role: int) -> tuple[list[int], list[int]]:
        """Return where a step in this role reads the state and where it writes it."""
        past, present = ([places[turn % len(places)] for places in self.state] for turn in (role, role + 1))
        return past, present

    def zero_state(self) -> None:
        """Zero the state: sums start from zero, and zero times a NaN left in a cache is NaN."""
        if self._first_state is not None:
            start = self.slab.offsets[self._first_state]
            self.device.zero(self.slab.address + start, self.slab.offsets["spare"] - start)

    def move_state(self, rows: Sequence[int], role: int, position: int) -> None:
        """Make row i of the state continue row rows[i], up to the written position."""
        moves = planned_moves(rows)
        for tensor, place in zip(self.spec.state, self.places(role)[0], strict=True):
            if not position and tensor.start == "zero":
                continue
            strips = written_strips(tensor, self.shape.sizes(self.spec), position)
            self._move(moves, place, self._row_bytes[tensor.name], strips)

    def move_sources(self, names: Iterable[str], kept: Sequence[int]) -> None:
        """Make source i what source kept[i] was, in all tensors of these names."""
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
        """Close the calls that waited longest while there are too many or they are too large."""
        while self.calls and (
            len(self.calls) > MOST_CALLS or sum(call.n_bytes for call in self.calls.values()) > MOST_CALL_BYTES
        ):
            self.calls.pop(next(iter(self.calls))).close()

    def close(self) -> None:
        """Free everything."""
        if self.closed:
            return
        self.closed = True
        for call in (self.encoding, *self.calls.values()):
            if call is not None:
                call.close()
        self.encoding, self.calls = None, {}
        self.event.close()
        self.slab.close()


class DecodeMemoryPool:
    """Memory that waits for the next decode of its shape; the oldest is freed first."""

    def __init__(self) -> None:
        self._returned: deque[DecodeMemory] = deque()
        self._waiting: list[DecodeMemory] = []

    def __len__(self) -> int:
        return len(self._returned) + len(self._waiting)

    def give(self, memory: DecodeMemory) -> None:
        """Take memory back. May run inside the garbage collector, so it must not touch the device."""
        self._returned.append(memory)

    def take(self, shape: DecodeMemoryShape) -> DecodeMemory | None:
        """Return memory of this shape; None if there is none."""
        self.settle()
        for index in reversed(range(len(self._waiting))):
            if self._waiting[index].shape == shape:
                return self._waiting.pop(index)
        return None

    def settle(self, most: int = MOST_WAITING) -> list[DecodeMemory]:
        """Close what is spoilt and what waited longest, and return it."""
        while self._returned:
            self._waiting.append(self._returned.popleft())
        sound = [memory for memory in self._waiting if not memory.spoilt]
        dropped = [memory for memory in self._waiting if memory.spoilt] + sound[: max(0, len(sound) - most)]
        self._waiting = sound[max(0, len(sound) - most) :]
        for memory in dropped:
            memory.close()
        for memory in self._waiting:
            memory.settle()
        return dropped


def _place_names(tensor: StateSpec) -> list[str]:
    """Return the names of a state tensor's places in its slab."""
    return [tensor.name] if tensor.kind == "cache" else [tensor.name, f"{tensor.name} again"]
