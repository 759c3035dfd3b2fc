"""TensorRT: caches in place on the device, steps recorded and replayed; only ids and what is wanted cross the bus."""

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
from fatdeploy.runtimes.engines.output_matrix import stored_output_rows
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Ids, Rows, StepOut, Want, copied, joined
from fatdeploy.runtimes.engines.trt.bindings import bound_encoder, bound_step, results_of
from fatdeploy.runtimes.engines.trt.calls import PlanCall
from fatdeploy.runtimes.engines.trt.clock import DeviceClock
from fatdeploy.runtimes.engines.trt.device import Device
from fatdeploy.runtimes.engines.trt.memory import DecodeMemory, DecodeMemoryShape, HeldPool
from fatdeploy.runtimes.engines.trt.plans import Opened, opened_plans
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

Made = TypeVar("Made")


@dataclass
class TrtState:
    """What a decode knows of its memory on the device; None when it was given back."""

    held: DecodeMemory | None
    capacity: Capacity
    batch: int
    rows: int
    device_batch: int  # sources that the device computes; those beyond ``batch`` are nobody's
    source_length: int  # as it was given; the device's is padded further
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

    The threads take turns to ask the device for work, and wait for it side by side. ``capture`` records each step that
    is made a second time, and replays it from then on.
    """

    def __init__(self, bundle: Bundle, device: Device, *, capture: bool = True) -> None:
        self._bundle, self._device, self._capture = bundle, device, capture
        self.spec: ModelSpec = bundle.spec
        self.pool = HeldPool()
        self._lock = Lock()  # of those who ask the device for something
        self._all: list[DecodeMemory] = []
        self._closed = False
        self._clock: DeviceClock | None = None
        inputs = self.spec.decoder_inputs(branches=False)
        sources = (*self.spec.encoder_inputs(), *self.spec.encoder_outputs())
        self._read = [one.name for one in sources if one in inputs]
        try:
            self._plans: dict[Part, Opened] = opened_plans(device, bundle)
        except BaseException:
            device.close()
            raise
        self._profiles = self._plans["decoder"].record.profiles  # the encoder has the same

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> TrtState:
        """Read the source and return a state with one row a source; its memory stays on the device."""
        self.spec.check_source(source, mask)
        batch, length = source.shape
        shape = self._shape(batch, length, capacity.rows_per_source)
        with self._lock:
            self._check_open()
            held = self._memory(shape)
        try:
            lengths = self._encoded(held, source, mask)
        except BaseException:
            held.spoilt = True
            self.pool.give(held)
            with self._lock:
                self.pool.settle()
            raise
        return TrtState(held, capacity, batch, batch, shape.batch, length, lengths)

    def step(self, tokens: Tokens, state: TrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]: they and the position go to the device, what is wanted comes back.

        More tokens than a profile takes are fed in several calls, which changes no result.
        """
        held = _held(state)
        check_want(self.spec, want)
        limit = min(state.capacity.target_positions, self.spec.max_target)
        check_step(self.spec, tokens, state.rows, state.position, limit)
        steps = tokens.shape[1]
        most = steps if steps == 1 else most_steps(self._profiles, self._sizes(state, held, steps))
        if self.spec.decoding == "parallel" or not 0 < most < steps:
            return self._step(tokens, state, held, want)
        parts = [tokens[:, start : start + most] for start in range(0, steps, most)]
        # Copies: a result is the engine's own until its next step.
        return joined([copied(self._step(part, state, held, want)) for part in parts])

    def _step(self, tokens: Tokens, state: TrtState, held: DecodeMemory, want: Want) -> StepOut:
        """Make one call."""
        sizes = self._sizes(state, held, tokens.shape[1])
        with held.busy, self._named(held, "decoder", sizes):
            with self._lock:
                self._check_open()
                call = self._step_call(held, sizes)
                results = results_of(call, self.spec, want, sizes)
                fed = call.inputs[self.spec.tokens.name]
                fed[: state.rows], fed[state.rows :] = tokens, self.spec.pad_id
                if self.spec.position.name in call.inputs:
                    call.inputs[self.spec.position.name][...] = state.position
                with nullcontext() if self._clock is None else self._clock.timed():
                    call.run(state.n_steps % held.n_sets, results)
                held.event.record()
            held.event.wait()
        state.position += tokens.shape[1]
        state.n_steps += 1
        return self._said(state, results.arrays)

    def reorder(self, state: TrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave.

        Rows are copied on the device, only those that another continues and only their written positions.
        """
        held = _held(state)
        kept, each = checked_move(rows, state.rows, state.batch, state.capacity)
        leaving = kept.tolist() != list(range(state.batch))
        with held.busy, self._lock, self._named(held, "decoder", self._sizes(state, held, 1)):
            self._check_open()
            held.move_state(rows.tolist(), state.n_steps % held.n_sets, state.position)
            if leaving:
                held.move_sources(self._read, kept.tolist())
        if leaving and state.lengths is not None:
            state.lengths = state.lengths[kept]
        state.rows, state.batch = len(rows), len(kept)
        state.device_batch = self._device_batch(state, held, each)

    def stopwatch(self) -> DeviceClock:
        """Return a clock of the device that times every step from now on; for one thread that measures."""
        self._clock = DeviceClock(self._device)
        return self._clock

    def most_sources(self, length: int, rows_per_source: int) -> int:
        """Return how many sources of at most some length the profiles take at once; 0 if none."""
        return most_sources(self._profiles, length, rows_per_source)

    def length_log_probs(self, state: TrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        _held(state)
        check_length_head(self.spec)
        if state.lengths is None:
            raise DeviceFailed("the encoder told no target lengths")
        return state.lengths

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M]; None if the bundle has none."""
        return stored_output_rows(self._bundle, ids)

    def release(self, state: TrtState) -> None:
        """Take a state back: its memory and its recordings serve the next decode of the same shape."""
        held = _held(state)
        state.held = None
        self.pool.give(held)

    def close(self) -> None:
        """Give everything on the device back; a decode that is under way ends with an error."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._clock is not None:
            self._clock.close()
        for held in self._all:
            with held.busy:  # whoever waits for a result gets it
                held.close()
        for opened in self._plans.values():
            opened.plan.close()
        self._device.close()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this engine is closed: load the bundle again")

    def _shape(self, batch: int, length: int, rows_per_source: int) -> DecodeMemoryShape:
        """Return for which sizes a decode gets memory; refuse what no profile takes before anything is allocated."""
        found = padded_sizes(self._profiles, batch, length, rows_per_source)
        if found is None:
            sizes = {"batch": batch, "source": length, "rows": batch * rows_per_source}
            raise no_profile(self._plans["decoder"].record, self._plans["decoder"].inputs, sizes)
        n_sources, padded = found
        return DecodeMemoryShape(n_sources, min(padded, self.spec.max_source), rows_per_source)

    def _memory(self, shape: DecodeMemoryShape) -> DecodeMemory:
        """Return memory for a decode, used one where there is some."""
        found = self.pool.take(shape) or self._with_room(lambda: DecodeMemory(self._device, self.spec, shape))
        self._all = [held for held in self._all if not held.closed and held is not found] + [found]
        return found

    def _with_room(self, make: Callable[[], Made]) -> Made:
        """Return what ``make`` returns; what waits for other decodes is freed if the device is full."""
        try:
            return make()
        except OutOfDeviceMemory:
            if not self.pool.settle(most=0):
                raise
            return make()

    def _encoded(self, held: DecodeMemory, source: Tokens, mask: Mask) -> Floats | None:
        """Run the encoder into a decode's memory, and return what its length head says."""
        sizes = {"batch": held.shape.batch, "source": held.shape.source}
        with held.busy, self._named(held, "encoder", sizes):
            with self._lock:
                self._check_open()
                call = held.encoding
                if call is None:
                    call = held.encoding = self._with_room(
                        lambda: bound_encoder(
                            held, self._plans["encoder"], self._profile("encoder", sizes), self._capture
                        )
                    )
                results = call.results(
                    None, [(one, held.sources[one.name]) for one in self.spec.length_log_probs], sizes
                )
                _write_padded(call.inputs[self.spec.source.name], source, self.spec.pad_id)
                _write_padded(call.inputs[self.spec.source_mask.name], mask, False)  # noqa: FBT003
                held.zero_state()
                call.run(0, results)
                held.event.record()
            held.event.wait()
        return next((np.array(array[: len(source)]) for array in results.arrays.values()), None)

    def _step_call(self, held: DecodeMemory, sizes: Mapping[str, int]) -> PlanCall:
        """Return what is bound for steps of some sizes, the one that was used last at the end."""
        key = sizes["batch"], sizes["rows"], sizes["step"]
        call = held.calls.pop(key, None)
        if call is None:
            opened, profile = self._plans["decoder"], self._profile("decoder", sizes)
            call = self._with_room(lambda: bound_step(held, opened, profile, sizes, capture=self._capture))
        held.calls[key] = call
        return call

    def _profile(self, part: Part, sizes: Mapping[str, int]) -> int:
        return chosen_profile(self._plans[part].record, self._plans[part].inputs, sizes)

    def _sizes(self, state: TrtState, held: DecodeMemory, steps: int) -> dict[str, int]:
        return {
            "batch": state.device_batch,
            "rows": state.device_rows,
            "source": held.shape.source,
            "step": steps,
            "capacity": self.spec.max_target,
        }

    def _device_batch(self, state: TrtState, held: DecodeMemory, each: int) -> int:
        """Return how many sources the device computes from now on: half as many, again and again, not one fewer."""
        fewer = power_of_two(state.batch)
        if fewer >= state.device_batch:
            return state.device_batch
        sizes = {"batch": fewer, "rows": fewer * each, "source": held.shape.source}
        fits = fitting_profile(self._profiles, tuple(sizes), sizes) is not None
        return fewer if fits else state.device_batch

    def _said(self, state: TrtState, arrays: Mapping[str, NDArray[Any]]) -> StepOut:
        """Return the results of rows that are somebody's."""
        mine = {name: array[: state.rows] for name, array in arrays.items()}
        top_log_probs, top_ids = (mine.get(one.name) for one in self.spec.best)
        attention = next((mine[one.name][..., : state.source_length] for one in self.spec.attention), None)
        hidden = next((mine[one.name] for one in self.spec.hidden), None)
        return StepOut(hidden, mine.get(self.spec.logits.name), top_log_probs, top_ids, attention)

    @contextmanager
    def _named(self, held: DecodeMemory, part: Part, sizes: Mapping[str, int]) -> Iterator[None]:
        """Say of a failure on the device which plan, profile and sizes it had; the memory is not used again."""
        try:
            yield
        except DeviceFailed as error:
            held.spoilt = True
            record = self._plans[part].record
            profile = fitting_profile(record.profiles, tuple(sizes), sizes)
            said = ", ".join(f"{axis} {size}" for axis, size in sizes.items() if axis != "capacity")
            raise type(error)(f"{record.file}, profile {profile} ({said}): {error}") from error


def _held(state: TrtState) -> DecodeMemory:
    if state.held is None:
        raise released_state()
    return state.held


def _write_padded(array: NDArray[Any], given: NDArray[Any], padding: int) -> None:
    """Write rows into a larger array; rows beyond them repeat the first, which the model can certainly read."""
    rows, length = given.shape
    array[:rows, :length], array[rows:, :length] = given, given[0]
    array[:, length:] = padding
