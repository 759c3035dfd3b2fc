"""TensorRT: caches in place on the device, steps recorded and replayed; only ids and wanted results cross the bus."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError, DeviceFailed, OutOfDeviceMemory
from fatdeploy.plans import Part
from fatdeploy.runtimes.engines.checks import check_length_head, check_step, check_want, checked_move, released_state
from fatdeploy.runtimes.engines.output_matrix import stored_output_bias, stored_output_rows
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Ids, Rows, StepOut, Want, in_parts
from fatdeploy.runtimes.engines.results import step_out_from_arrays
from fatdeploy.runtimes.engines.trt.bindings import bound_encoder, bound_step, results_of
from fatdeploy.runtimes.engines.trt.calls import PlanCall
from fatdeploy.runtimes.engines.trt.clock import DeviceClock
from fatdeploy.runtimes.engines.trt.device import Device
from fatdeploy.runtimes.engines.trt.memory import DecodeMemory, DecodeMemoryPool, DecodeMemoryShape
from fatdeploy.runtimes.engines.trt.plans import OpenedPlan, opened_plans
from fatdeploy.runtimes.engines.trt.profile_choice import (
    chosen_profile,
    fitting_profile,
    most_sources,
    most_steps,
    no_profile,
    padded_sizes,
    power_of_two,
)
from fatdeploy.spec import Mask, ModelSpec, Tokens

Resource = TypeVar("Resource")


@dataclass
class TrtState:
    """A decode: its memory on the device, None once released, and how much of it is used."""

    memory: DecodeMemory | None
    capacity: Capacity
    batch: int
    rows: int
    device_batch: int  # sources that the device computes; those beyond ``batch`` are padding
    source_length: int  # of the caller; the device may pad further
    lengths: Floats | None = None
    position: int = 0
    n_steps: int = 0

    @property
    def rows_per_source(self) -> int:
        """How many rows each source has now."""
        return self.rows // self.batch

    @property
    def device_rows(self) -> int:
        """How many rows the device computes."""
        return self.device_batch * self.rows_per_source


class TrtEngine:
    """Runs a bundle's two plans on one GPU; any number of threads may decode at once, each with a state of its own.

    The threads take turns to enqueue work and wait for it concurrently. ``capture`` records each step when it is made
    for the second time, and replays it from then on.
    """

    def __init__(self, bundle: Bundle, device: Device, *, capture: bool = True) -> None:
        self._bundle, self._device, self._capture = bundle, device, capture
        self.spec: ModelSpec = bundle.spec
        self.pool = DecodeMemoryPool()
        self._lock = Lock()  # held while a thread enqueues work
        self._all: list[DecodeMemory] = []
        self._closed = False
        self._clock: DeviceClock | None = None
        inputs = self.spec.decoder_inputs(branches=False)
        sources = (*self.spec.encoder_inputs(), *self.spec.encoder_outputs())
        self._read = [tensor.name for tensor in sources if tensor in inputs]
        try:
            self._plans: dict[Part, OpenedPlan] = opened_plans(device, bundle)
        except BaseException:
            device.close()
            raise
        self._profiles = self._plans["decoder"].record.profiles  # the encoder has the same

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> TrtState:
        """Read the source and return a state with one row per source; its memory stays on the device."""
        self.spec.check_source(source, mask)
        batch, length = source.shape
        shape = self._shape(batch, length, capacity.rows_per_source)
        with self._lock:
            self._check_open()
            memory = self._memory(shape)
        try:
            lengths = self._encoded(memory, source, mask)
        except BaseException:
            memory.spoilt = True
            self.pool.give(memory)
            with self._lock:
                self.pool.settle()
            raise
        return TrtState(memory, capacity, batch, batch, shape.batch, length, lengths)

    def step(self, tokens: Tokens, state: TrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]: they and the position go to the device, the wanted results come back.

        If there are more tokens than a profile or the model takes, several calls feed them; the result is the same.
        """
        memory = _memory_of(state)
        check_want(self.spec, want)
        limit = min(state.capacity.target_positions, self.spec.max_target)
        check_step(self.spec, tokens, state.rows, state.position, limit)
        most = None
        if tokens.shape[1] > 1 and self.spec.decoding != "parallel":
            # 0 if no profile takes the sizes: the call itself refuses them.
            by_profile = most_steps(self._profiles, self._sizes(state, memory, tokens.shape[1]))
            most = min((limit for limit in (by_profile, self.spec.tokens_per_call) if limit), default=None)
        return in_parts(tokens, most, lambda part: self._step(part, state, memory, want))

    def _step(self, tokens: Tokens, state: TrtState, memory: DecodeMemory, want: Want) -> StepOut:
        """Make one call of the decoder."""
        sizes = self._sizes(state, memory, tokens.shape[1])
        with memory.busy, self._named(memory, "decoder", sizes):
            with self._lock:
                self._check_open()
                call = self._step_call(memory, sizes)
                results = results_of(call, self.spec, want, sizes)
                ids = call.inputs[self.spec.tokens.name]
                ids[: state.rows], ids[state.rows :] = tokens, self.spec.pad_id
                if self.spec.position.name in call.inputs:
                    call.inputs[self.spec.position.name][...] = state.position
                with nullcontext() if self._clock is None else self._clock.timed():
                    call.run(state.n_steps % memory.n_sets, results)
                memory.event.record()
            memory.event.wait()
        state.position += tokens.shape[1]
        state.n_steps += 1
        return self._step_out(state, results.arrays)

    def reorder(self, state: TrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave.

        Rows are copied on the device: only rows that move, and only their written positions.
        """
        memory = _memory_of(state)
        kept, per_source = checked_move(rows, state.rows, state.batch, state.capacity)
        leaving = kept.tolist() != list(range(state.batch))
        with memory.busy, self._lock, self._named(memory, "decoder", self._sizes(state, memory, 1)):
            self._check_open()
            memory.move_state(rows.tolist(), state.n_steps % memory.n_sets, state.position)
            if leaving:
                memory.move_sources(self._read, kept.tolist())
        if leaving and state.lengths is not None:
            state.lengths = state.lengths[kept]
        state.rows, state.batch = len(rows), len(kept)
        state.device_batch = self._device_batch(state, memory, per_source)

    def stopwatch(self) -> DeviceClock:
        """Return a device clock that times every step from now on; for benchmarks on one thread."""
        self._clock = DeviceClock(self._device)
        return self._clock

    def most_sources(self, length: int, rows_per_source: int) -> int:
        """Return how many sources of at most ``length`` tokens the profiles take at once; 0 if none."""
        return most_sources(self._profiles, length, rows_per_source)

    def length_log_probs(self, state: TrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        _memory_of(state)
        check_length_head(self.spec)
        if state.lengths is None:
            raise DeviceFailed("the encoder returned no target lengths")
        return state.lengths

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M]; None if the bundle has none."""
        return stored_output_rows(self._bundle, ids)

    def output_bias(self, ids: Ids) -> Floats | None:
        """Return what is added to the products with the rows of ids, [n]; None if nothing is."""
        return stored_output_bias(self._bundle, ids)

    def release(self, state: TrtState) -> None:
        """Take a state back: the next decode of the same shape reuses its memory and recordings."""
        memory = _memory_of(state)
        state.memory = None
        self.pool.give(memory)

    def close(self) -> None:
        """Free everything on the device; a decode in progress ends with an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._clock is not None:
            self._clock.close()
        for memory in self._all:
            with memory.busy:  # a thread that waits for a result still gets it
                memory.close()
        for opened in self._plans.values():
            opened.plan.close()
        self._device.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed: load the bundle again")

    def _shape(self, batch: int, length: int, rows_per_source: int) -> DecodeMemoryShape:
        """Return the sizes to allocate for a decode; refuse what no profile takes before anything is allocated."""
        padded = padded_sizes(self._profiles, batch, length, rows_per_source)
        if padded is None:
            sizes = {"batch": batch, "source": length, "rows": batch * rows_per_source}
            raise no_profile(self._plans["decoder"].record, self._plans["decoder"].inputs, sizes)
        n_sources, padded_length = padded
        return DecodeMemoryShape(n_sources, min(padded_length, self.spec.max_source), rows_per_source)

    def _memory(self, shape: DecodeMemoryShape) -> DecodeMemory:
        """Return memory for a decode, reused where possible."""
        memory = self.pool.take(shape) or self._with_room(lambda: DecodeMemory(self._device, self.spec, shape))
        self._all = [other for other in self._all if not other.closed and other is not memory] + [memory]
        return memory

    def _with_room(self, make: Callable[[], Resource]) -> Resource:
        """Return what ``make`` returns; if the device is full, free waiting memory of other decodes and retry."""
        try:
            return make()
        except OutOfDeviceMemory:
            if not self.pool.settle(most=0):
                raise
            return make()

    def _encoded(self, memory: DecodeMemory, source: Tokens, mask: Mask) -> Floats | None:
        """Run the encoder into a decode's memory, and return the output of its length head."""
        sizes = {"batch": memory.shape.batch, "source": memory.shape.source}
        with memory.busy, self._named(memory, "encoder", sizes):
            with self._lock:
                self._check_open()
                call = memory.encoding
                if call is None:
                    call = memory.encoding = self._with_room(
                        lambda: bound_encoder(
                            memory, self._plans["encoder"], self._profile("encoder", sizes), self._capture
                        )
                    )
                lengths = [(tensor, memory.sources[tensor.name]) for tensor in self.spec.length_log_probs]
                results = call.results(None, lengths, sizes)
                _write_padded(call.inputs[self.spec.source.name], source, self.spec.pad_id)
                _write_padded(call.inputs[self.spec.source_mask.name], mask, False)  # noqa: FBT003
                memory.zero_state()
                call.run(0, results)
                memory.event.record()
            memory.event.wait()
        return next((np.array(array[: len(source)]) for array in results.arrays.values()), None)

    def _step_call(self, memory: DecodeMemory, sizes: Mapping[str, int]) -> PlanCall:
        """Return the call for steps of these sizes, and move it to the end: calls are kept in order of use."""
        key = sizes["batch"], sizes["rows"], sizes["step"]
        call = memory.calls.pop(key, None)
        if call is None:
            opened, profile = self._plans["decoder"], self._profile("decoder", sizes)
            call = self._with_room(lambda: bound_step(memory, opened, profile, sizes, capture=self._capture))
        memory.calls[key] = call
        return call

    def _profile(self, part: Part, sizes: Mapping[str, int]) -> int:
        return chosen_profile(self._plans[part].record, self._plans[part].inputs, sizes)

    def _sizes(self, state: TrtState, memory: DecodeMemory, steps: int) -> dict[str, int]:
        return {
            "batch": state.device_batch,
            "rows": state.device_rows,
            "source": memory.shape.source,
            "step": steps,
            "capacity": self.spec.max_target,
        }

    def _device_batch(self, state: TrtState, memory: DecodeMemory, rows_per_source: int) -> int:
        """Return how many sources the device computes from now on; batches shrink by halves, not one by one."""
        fewer = power_of_two(state.batch)
        if fewer >= state.device_batch:
            return state.device_batch
        sizes = {"batch": fewer, "rows": fewer * rows_per_source, "source": memory.shape.source}
        fits = fitting_profile(self._profiles, tuple(sizes), sizes) is not None
        return fewer if fits else state.device_batch

    def _step_out(self, state: TrtState, arrays: Mapping[str, NDArray[Any]]) -> StepOut:
        """Return the results without rows and source positions that are padding."""
        real = {name: array[: state.rows] for name, array in arrays.items()}
        for tensor in self.spec.attention:
            real[tensor.name] = real[tensor.name][..., : state.source_length]
        return step_out_from_arrays(self.spec, real)

    @contextmanager
    def _named(self, memory: DecodeMemory, part: Part, sizes: Mapping[str, int]) -> Iterator[None]:
        """Add the plan, profile and sizes to an error of the device; the memory is not used again."""
        try:
            yield
        except DeviceFailed as error:
            memory.spoilt = True
            record = self._plans[part].record
            profile = fitting_profile(record.profiles, tuple(sizes), sizes)
            shown = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "capacity")
            raise type(error)(f"{record.file}, profile {profile} ({shown}): {error}") from error


def _memory_of(state: TrtState) -> DecodeMemory:
    if state.memory is None:
        raise released_state()
    return state.memory


def _write_padded(array: NDArray[Any], content: NDArray[Any], padding: int) -> None:
    """Write rows into a larger array; rows beyond them repeat the first, which is certainly valid input."""
    rows, length = content.shape
    array[:rows, :length], array[rows:, :length] = content, content[0]
    array[:, length:] = padding
