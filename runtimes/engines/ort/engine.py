"""ONNX Runtime: caches in place, bound once a sentence; a step changes the tokens and one number."""

from dataclasses import dataclass, field, replace
from functools import partial
from threading import BoundedSemaphore
from typing import Any, Unpack

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError, FatdeployError
from fatdeploy.machine import usable_cores
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.engines.checks import check_length_head, check_step, check_want, checked_move, released_state
from fatdeploy.runtimes.engines.ort.bindings import MOST_HELD_BYTES, MOST_SHAPES, Binder, Bound
from fatdeploy.runtimes.engines.ort.buffers import BufferPool, Buffers
from fatdeploy.runtimes.engines.ort.device_memory import DeviceBinder, DeviceMemory, OrtCudaDevice, OrtDevice
from fatdeploy.runtimes.engines.ort.host_memory import ArrayMemory, Held, HostMemory
from fatdeploy.runtimes.engines.ort.saturation import check_saturation
from fatdeploy.runtimes.engines.ort.sessions import (
    OrtKeywords,
    OrtOptions,
    Sessions,
    onnxruntime_module,
    opened_sessions,
    run_failed,
    small_session,
)
from fatdeploy.runtimes.engines.output_matrix import stored_output_rows
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Ids, Rows, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

NOTHING = Buffers([])  # what a state has that was given back
# Keys that one product of an attention adds up at a time: a source of 7 alone is summed in another order than one of 7
# among longer ones. The 1e-7 between them is noise in fp32, but may become another integer and then much more.
SOURCE_MULTIPLE = 4


@dataclass
class OrtState:
    """Memory of the sources, and the decoder's state: arrays that onnxruntime writes in place, here or on a device."""

    inputs: dict[str, Any]  # what stays the same from step to step, as OrtValues
    sources: dict[str, Held]  # the same as arrays
    held: Buffers  # of all rows that there may be; a step is given the first
    capacity: Capacity
    rows: int
    most_rows: int  # that there ever were
    source_length: int  # as it was given; the arrays may be padded further
    turn: int = 0  # which set of buffers holds the state
    bound: dict[tuple[int, Want], Bound] = field(default_factory=dict)
    released: bool = False

    @property
    def buffers(self) -> list[list[Held]]:
        """The state: one set of arrays, or two that change places."""
        return self.held.sets

    @property
    def position(self) -> NDArray[np.int64]:
        """How many positions were fed."""
        return self.held.position


class OrtEngine:
    """Runs a bundle's two graphs; any number of threads may decode at once, each with a state of its own.

    The options are those of ``OrtOptions``. With a provider on a GPU the arrays are there, too; ``device`` is another
    place for them.
    """

    def __init__(self, bundle: Bundle, *, device: OrtDevice | None = None, **keywords: Unpack[OrtKeywords]) -> None:
        options = OrtOptions(**keywords)
        self._ort = onnxruntime_module()
        self._bundle = bundle
        self.spec: ModelSpec = bundle.spec
        self.branches = bundle.manifest.branches
        self.pool = BufferPool()
        check_saturation(self._ort, bundle)
        self._sessions: Sessions | None = opened_sessions(self._ort, bundle, options)
        # TensorRT's provider may write what it has not read yet, as every provider does with recurrent state.
        recurrent = any(one.kind == "recurrent" for one in self.spec.state)
        self._alternates = recurrent or "tensorrt" in options.providers
        self.device = OrtCudaDevice(self._ort) if device is None and options.on_device else device
        self._binder, self._memory = self._places()
        # onnxruntime keeps the memory of all encodes that ever ran at once; more than there are cores end no sooner.
        self._encoding = BoundedSemaphore(usable_cores())

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        """Read the source and return a state with one row a source."""
        self.spec.check_source(source, mask)
        length = source.shape[1]
        if self._bundle.manifest.quantization is not None:
            source, mask = _padded_to_whole(source, mask, self.spec)
        encoder, feeds = self._open.encoder, {self.spec.source.name: source, self.spec.source_mask.name: mask}
        try:
            with self._encoding:
                sources = self._memory.encoded(encoder, feeds)
        except FatdeployError:
            raise
        except Exception as error:  # onnxruntime's have no base of their own
            raise run_failed(self._bundle, ENCODER, error) from error
        # In `standard` graphs the capacity is a number of the graph.
        positions = capacity.target_positions if self.branches else self.spec.max_target
        rows = len(source)
        buffers = self._zeros(rows * capacity.rows_per_source, positions)
        return OrtState(self._binder.values(sources), sources, buffers, capacity, rows, rows, length)

    def step(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]; nothing is copied but them, and from a device what is wanted."""
        _check_held(state)
        check_want(self.spec, want)
        position = int(state.position)
        check_step(self.spec, tokens, state.rows, position, state.capacity.target_positions)
        key = (tokens.shape[1], want)
        bound = state.bound.get(key) or self._bound(state, *key)
        bound.tokens[...] = tokens
        binding = bound.bindings[state.turn]
        try:
            if self.device is not None:
                for name, array in bound.fed.items():
                    self.device.feed(binding, name, array)
            self._open.decoder.run_with_iobinding(binding)
        except Exception as error:
            raise run_failed(self._bundle, DECODER, error) from error
        state.position[...] = position + tokens.shape[1]
        if self._alternates:
            state.turn = 1 - state.turn
        return bound.out

    def reorder(self, state: OrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave.

        Rows are copied, and buffers stay where they are. onnxruntime could be told instead which row holds each
        position: that is slower (benchmarks/beams/rows.py).
        """
        _check_held(state)
        batch = len(state.sources[self.spec.source_mask.name])
        kept, _ = checked_move(rows, state.rows, batch, state.capacity)
        state.turn = self._memory.moved(state.held, state.turn, rows, state.rows)
        leaving = kept.tolist() != list(range(batch))
        if leaving:
            state.sources = self._memory.kept(state.sources, kept)
            state.inputs = self._binder.values(state.sources)
        if leaving or len(rows) != state.rows:
            _set_aside(state)
        state.rows, state.most_rows = len(rows), max(len(rows), state.most_rows)

    def length_log_probs(self, state: OrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        _check_held(state)
        check_length_head(self.spec)
        log_probs: Floats = state.sources[self.spec.length_log_probs[0].name]
        return log_probs

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M]; None if the bundle has none."""
        return stored_output_rows(self._bundle, ids)

    def release(self, state: OrtState) -> None:
        """Take a state back: its buffers serve the next decode of the same shapes."""
        _check_held(state)
        state.released = True
        self._memory.clear(state.held, state.most_rows)
        state.position[...] = 0
        _set_aside(state)
        self.pool.give(state.held)
        state.held = NOTHING

    def close(self) -> None:
        """Give the sessions back; a decode that is under way ends with an error."""
        self._sessions = None
        self.pool.clear()

    @property
    def _open(self) -> Sessions:
        if self._sessions is None:
            raise ConfigError("this engine is closed: load the bundle again")
        return self._sessions

    def _zeros(self, rows: int, capacity: int) -> Buffers:
        """Return zeroed buffers, used ones where there are any."""
        sizes = {"rows": rows, "capacity": capacity}
        shapes = [one.sized(sizes) for one in self.spec.state]
        found = self.pool.take(shapes)
        if found is not None:
            return found
        return self._memory.zeros(shapes)

    def _places(self) -> tuple[Binder, ArrayMemory]:
        """Return what binds arrays and what holds them, here or on a device."""
        if self.device is None:
            return Binder(self._ort, self.spec, branches=self.branches), HostMemory(self.spec, 1 + self._alternates)
        binder = DeviceBinder(self._ort, self.spec, self.device, branches=self.branches, alternates=self._alternates)
        opened = partial(small_session, self._ort, provider=self.device.provider)
        return binder, DeviceMemory(self.device, self.spec, opened, alternates=self._alternates)

    def _bound(self, state: OrtState, steps: int, want: Want) -> Bound:
        """Return buffers and bindings for calls of ``steps`` tokens that want the same."""
        source = state.sources[self.spec.source_mask.name].shape[1]
        sizes = {"rows": state.rows, "step": steps, "source": source}
        bound = self._binder.bound(self._open.decoder, state.held, state.inputs, sizes, want)
        if bound.out.attention is not None and source > state.source_length:
            bound.out = replace(bound.out, attention=bound.out.attention[..., : state.source_length])
        state.bound[steps, want] = bound
        return bound


def _padded_to_whole(source: Tokens, mask: Mask, spec: ModelSpec) -> tuple[Tokens, Mask]:
    """Return sources padded to a multiple of WHOLE tokens, or to the longest that there may be."""
    rows, length = source.shape
    whole = min(-(-length // SOURCE_MULTIPLE) * SOURCE_MULTIPLE, spec.max_source)
    if whole == length:
        return source, mask
    # np.pad takes fifty microseconds for the same, a step of a small model less than two hundred.
    padded_source, padded_mask = np.full((rows, whole), spec.pad_id), np.zeros((rows, whole), bool)
    padded_source[:, :length], padded_mask[:, :length] = source, mask
    return padded_source, padded_mask


def _set_aside(state: OrtState) -> None:
    """Leave bindings to later calls of their shape, of this decode or of another in the same buffers."""
    waiting = state.held.bound
    n_bytes = sum(array.nbytes for array in state.sources.values())
    for key, bound in state.bound.items():
        if n_bytes + bound.n_bytes <= MOST_HELD_BYTES:
            waiting[state.rows, *key] = bound
    while len(waiting) > MOST_SHAPES:
        del waiting[next(iter(waiting))]
    state.bound = {}


def _check_held(state: OrtState) -> None:
    if state.released:
        raise released_state()
