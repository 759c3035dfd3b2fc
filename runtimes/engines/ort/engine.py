"""ONNX Runtime: caches in place, bound once per decode; a step changes only the tokens and the position."""

from dataclasses import dataclass, field, replace
from functools import partial
from threading import BoundedSemaphore
from typing import Any

import numpy as np

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError, FatdeployError, SpecMismatch
from fatdeploy.machine import usable_cores
from fatdeploy.manifest import DECODER, ENCODER
from fatdeploy.runtimes.engines.checks import (
    check_length_head,
    check_newcomers,
    check_refill,
    check_step,
    check_want,
    checked_move,
    released_state,
)
from fatdeploy.runtimes.engines.ort.bindings import MOST_HELD_BYTES, MOST_SHAPES, Binder, BoundCall
from fatdeploy.runtimes.engines.ort.buffers import BufferPool, Buffers
from fatdeploy.runtimes.engines.ort.device_memory import DeviceBinder, DeviceMemory, OrtCudaDevice, OrtDevice
from fatdeploy.runtimes.engines.ort.host_memory import ArrayMemory, HostMemory, HostOrDeviceArray
from fatdeploy.runtimes.engines.ort.log_softmax import LogSoftmax
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.ort.output_product import multiplies_bytes, output_product, product_graph
from fatdeploy.runtimes.engines.ort.refills import next_width, refilled, restart_rows
from fatdeploy.runtimes.engines.ort.saturation import check_saturation
from fatdeploy.runtimes.engines.ort.sessions import (
    Sessions,
    onnxruntime_module,
    opened_session,
    opened_sessions,
    run_failed,
)
from fatdeploy.runtimes.engines.output_matrix import stored_output_bias, stored_output_rows
from fatdeploy.runtimes.engines.protocol import (
    ALL_SOURCES,
    Capacity,
    Floats,
    Ids,
    OutputProduct,
    Rows,
    StepOut,
    Want,
    copied,
    joined,
)
from fatdeploy.spec import Mask, ModelSpec, Tokens

NO_BUFFERS = Buffers([])  # of a released state
DEFAULT_OPTIONS = OrtOptions()
# An attention product adds up this many keys at a time: a source of 7 tokens alone is summed in another order than one
# padded to the length of others. The difference of 1e-7 is noise in fp32, but may round to another integer.
SOURCE_MULTIPLE = 4
# From this size on numpy finds the best tokens of a vocabulary sooner than onnxruntime, whose ReduceLogSumExp and TopK
# take 350 microseconds for a row of 65,000 logits; numpy takes 50.
LARGE_VOCABULARY = 4096


@dataclass
class OrtState:
    """Encoded sources and decoder state: arrays that onnxruntime writes in place, on the host or on a device."""

    inputs: dict[str, Any]  # inputs that do not change from step to step, as OrtValues
    sources: dict[str, HostOrDeviceArray]  # the same as arrays
    buffers: Buffers  # for the most rows that the state may have; a step uses the first rows
    capacity: Capacity
    rows: int
    most_rows: int  # the largest number so far
    source_length: int  # of the caller; the arrays may be padded further
    widest: int  # the source axis of the arrays; refilled arrays may be narrower
    position: int = 0  # of the row that is furthest
    ragged: bool = False  # whether rows may be at different positions
    turn: int = 0  # which set of buffers holds the state
    bound: dict[tuple[int, Want], BoundCall] = field(default_factory=dict)
    released: bool = False

    @property
    def arrays(self) -> list[list[HostOrDeviceArray]]:
        """The state: one set of arrays, or two that alternate."""
        return self.buffers.sets


class OrtEngine:
    """Runs a bundle's two graphs; any number of threads may decode at once, each with a state of its own.

    If the first provider is on a GPU, the arrays are there too; ``device`` puts them elsewhere.
    """

    def __init__(
        self, bundle: Bundle, options: OrtOptions = DEFAULT_OPTIONS, *, device: OrtDevice | None = None
    ) -> None:
        self._ort = onnxruntime_module()
        self._bundle = bundle
        self.spec: ModelSpec = bundle.spec
        self.branches = bundle.manifest.branches
        self.pool = BufferPool()
        check_saturation(self._ort, bundle)
        self._sessions: Sessions | None = opened_sessions(self._ort, bundle, options)
        self._product_session: Any = None  # opened when it is first needed
        # TensorRT's provider may write state before it has read it, as every provider does with recurrent state.
        recurrent = any(tensor.kind == "recurrent" for tensor in self.spec.state)
        self._has_caches = any(tensor.kind == "cache" for tensor in self.spec.state)
        self._alternates = recurrent or "tensorrt" in options.providers
        self.device = OrtCudaDevice(self._ort) if device is None and options.on_device else device
        self._binder, self._memory = self._places()
        self._log_softmax: LogSoftmax | None = None  # opened when beams need it
        # onnxruntime keeps the memory of all encodes that ever ran at once; more of them than cores finish no sooner.
        self._encoding = BoundedSemaphore(usable_cores())

    @property
    def topk_pays(self) -> bool:
        """On a device the logits need not be copied to the host; without branches the top k is computed anyway."""
        return self.device is not None or not self.branches or self.spec.vocab_size < LARGE_VOCABULARY

    def log_softmax(self, scores: Floats, out: Floats) -> None:
        """Write the log-probabilities of scores [R, n] on the host to another array."""
        if self._log_softmax is None:
            self._log_softmax = LogSoftmax(self._ort)
        self._log_softmax(scores, out)

    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> OrtState:
        """Read the source and return a state with one row per source."""
        self.spec.check_source(source, mask)
        length = source.shape[1]
        if self._bundle.manifest.quantization is not None:
            source, mask = _padded_to_multiple(source, mask, self.spec)
        if self.refills:
            source, mask = source.copy(), mask.copy()  # refills write to them, and the caller's stay as they are
        encoder, feeds = self._open.encoder, {self.spec.source.name: source, self.spec.source_mask.name: mask}
        try:
            with self._encoding:
                sources = self._memory.encoded(encoder, feeds)
        except FatdeployError:
            raise
        except Exception as error:  # onnxruntime's exceptions have no common base class
            raise run_failed(self._bundle, ENCODER, error) from error
        # In `standard` graphs the capacity is a constant.
        positions = capacity.target_positions if self.branches else self.spec.max_target
        rows = len(source)
        width = source.shape[1]
        sizes = {"rows": rows * capacity.rows_per_source, "capacity": positions, "source": width}
        buffers = self._zeros(sizes)
        sources = self._memory.started(buffers, sources)
        return OrtState(self._binder.values(sources), sources, buffers, capacity, rows, rows, length, width)

    def step(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        """Feed tokens [R, t]; only they are copied, and from a device the wanted results."""
        _check_not_released(state)
        check_want(self.spec, want)
        check_step(self.spec, tokens, state.rows, state.position, state.capacity.target_positions)
        if tokens.shape[1] > 1 and self._takes_single_tokens(state):
            return joined([copied(self._run(column, state, want)) for column in np.split(tokens, tokens.shape[1], 1)])
        return self._run(tokens, state, want)

    def _takes_single_tokens(self, state: OrtState) -> bool:
        """Whether the graph cannot read several tokens per row now.

        onnxruntime's attention with a position per row can if no row has a past, or if there is one row.
        """
        return self.spec.row_positions and self._has_caches and state.position > 0 and state.rows > 1

    def _run(self, tokens: Tokens, state: OrtState, want: Want) -> StepOut:
        """Run the decoder on tokens that it can read in one call, and advance every row."""
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
        state.position += tokens.shape[1]
        state.buffers.position += tokens.shape[1]  # rows that are not used, too: all are equal unless ragged
        state.buffers.written = max(state.buffers.written, state.position)
        if self._alternates:
            state.turn = 1 - state.turn
        return bound.out

    def reorder(self, state: OrtState, rows: Rows) -> None:
        """Make new row i continue old row rows[i]; sources without rows leave.

        Rows are copied, and buffers stay where they are. The alternative, an index of the row that holds each position,
        is slower in onnxruntime (benchmarks/beams/rows.py).
        """
        _check_not_released(state)
        batch = len(state.sources[self.spec.source_mask.name])
        kept, _ = checked_move(rows, state.rows, batch, state.capacity)
        state.turn = self._memory.moved(state.buffers, state.turn, rows, state.rows)
        if state.ragged:
            positions = state.buffers.position
            positions[: len(rows)] = positions[rows]
            state.position = int(positions[: len(rows)].max())
        leaving = kept.tolist() != list(range(batch))
        if leaving:
            state.sources = self._memory.kept(state.sources, kept)
            state.inputs = self._binder.values(state.sources)
        if leaving or len(rows) != state.rows:
            _set_aside(state)
        state.rows, state.most_rows = len(rows), max(len(rows), state.most_rows)

    @property
    def refills(self) -> bool:
        """Whether rows may be at different positions, so that new sources can take the places of finished ones."""
        return self.spec.row_positions and self.device is None

    def refill(self, state: OrtState, places: Rows, newcomers: OrtState, chosen: slice = ALL_SOURCES) -> None:
        """Let newly encoded sources take the places of sources of a state; all rows of these places start anew."""
        _check_not_released(state)
        _check_not_released(newcomers)
        if not self.refills:
            raise SpecMismatch("refill refused: all rows of this engine are at one position; decode whole batches")
        mask, all_new = (one.sources[self.spec.source_mask.name] for one in (state, newcomers))
        new_mask = all_new[chosen]
        check_refill(places, len(mask), len(new_mask))
        lengths, new_lengths = mask.sum(1), new_mask.sum(1)
        check_newcomers(new_lengths, state.source_length, started=newcomers.position > 0 or newcomers is state)
        lengths[places] = new_lengths
        width = next_width(self.spec, lengths, mask.shape[1], state.widest, SOURCE_MULTIPLE)
        joining = {name: array[chosen] for name, array in newcomers.sources.items()}
        state.sources = refilled(self.spec, state.sources, places, joining, width)
        if width != mask.shape[1]:
            state.inputs = self._binder.values(state.sources)
            _set_aside(state)
        per_source = state.rows // len(mask)
        rows = (places[:, None] * per_source + np.arange(per_source)).reshape(-1)
        # One row of each newcomer, which all rows of its place continue: it has read no token yet.
        first = np.arange(0, newcomers.rows, newcomers.rows // len(all_new))[chosen].repeat(per_source)
        restart_rows(self.spec.state, state.arrays[state.turn], rows, newcomers.arrays[newcomers.turn], first)
        _restart(state, rows)

    def rest(self, state: OrtState, rows: Rows) -> None:
        """Put rows whose targets are complete back to position 0."""
        _check_not_released(state)
        _restart(state, rows)

    def length_log_probs(self, state: OrtState) -> Floats:
        """Return log-probabilities [B, max_target] of the target lengths from 1 up."""
        _check_not_released(state)
        check_length_head(self.spec)
        log_probs: Floats = state.sources[self.spec.length_log_probs[0].name]
        return log_probs

    def output_rows(self, ids: Ids) -> Floats | None:
        """Return the rows of the output matrix that belong to ids, [n, M]; None if the bundle has none."""
        return stored_output_rows(self._bundle, ids)

    def output_bias(self, ids: Ids) -> Floats | None:
        """Return what is added to the products with the rows of ids, [n]; None if nothing is."""
        return stored_output_bias(self._bundle, ids)

    def output_product(self) -> OutputProduct | None:
        """Return a product with rows of the output matrix, which runs on the host; None if the bundle has none."""
        if self._product_session is None:
            graph = product_graph(integers=multiplies_bytes(self._bundle))
            self._product_session = opened_session(self._ort, graph, threads=1)
        return output_product(self._bundle, self._product_session)

    def release(self, state: OrtState) -> None:
        """Take a state back: the next decode of the same shapes reuses its buffers."""
        _check_not_released(state)
        state.released = True
        self._memory.clear(state.buffers, state.most_rows)
        state.buffers.position[...] = state.buffers.written = 0
        _set_aside(state)
        self.pool.give(state.buffers)
        state.buffers = NO_BUFFERS

    def close(self) -> None:
        """Free the sessions; a decode in progress ends with an error."""
        self._sessions = self._product_session = None
        self.pool.clear()

    @property
    def _open(self) -> Sessions:
        if self._sessions is None:
            raise ConfigError("this engine is closed: load the bundle again")
        return self._sessions

    def _zeros(self, sizes: dict[str, int]) -> Buffers:
        """Return zeroed buffers, reused where possible."""
        shapes = [tensor.sized(sizes) for tensor in self.spec.state]
        return self.pool.take(shapes) or self._memory.zeros(shapes)

    def _places(self) -> tuple[Binder, ArrayMemory]:
        """Return what binds arrays and what stores them, on the host or on a device."""
        if self.device is None:
            return Binder(self._ort, self.spec, branches=self.branches), HostMemory(
                self._ort, self.spec, 1 + self._alternates
            )
        binder = DeviceBinder(self._ort, self.spec, self.device, branches=self.branches, alternates=self._alternates)
        open_session = partial(opened_session, self._ort, provider=self.device.provider, threads=1)
        return binder, DeviceMemory(self.device, self.spec, open_session, alternates=self._alternates)

    def _bound(self, state: OrtState, steps: int, want: Want) -> BoundCall:
        """Return buffers and bindings for calls of ``steps`` tokens that want the same results."""
        source = state.sources[self.spec.source_mask.name].shape[1]
        sizes = {"rows": state.rows, "step": steps, "source": source}
        bound = self._binder.bound(self._open.decoder, state.buffers, state.inputs, sizes, want)
        if bound.out.attention is not None and source > state.source_length:
            bound.out = replace(bound.out, attention=bound.out.attention[..., : state.source_length])
        state.bound[steps, want] = bound
        return bound


def _padded_to_multiple(source: Tokens, mask: Mask, spec: ModelSpec) -> tuple[Tokens, Mask]:
    """Return sources padded to a multiple of SOURCE_MULTIPLE tokens, or to the model's longest."""
    rows, length = source.shape
    padded = min(-(-length // SOURCE_MULTIPLE) * SOURCE_MULTIPLE, spec.max_source)
    if padded == length:
        return source, mask
    # np.pad takes fifty microseconds for this; a step of a small model takes less than two hundred.
    padded_source, padded_mask = np.full((rows, padded), spec.pad_id), np.zeros((rows, padded), bool)
    padded_source[:, :length], padded_mask[:, :length] = source, mask
    return padded_source, padded_mask


def _restart(state: OrtState, rows: Rows) -> None:
    """Put rows at position 0: what their caches hold beyond it is hidden."""
    positions = state.buffers.position
    positions[rows] = 0
    live = positions[: state.rows]
    state.position = int(live.max())
    state.ragged = bool(live.min() != state.position)
    if not state.ragged:
        positions[:] = state.position  # also of rows that are not used yet


def _set_aside(state: OrtState) -> None:
    """Keep bindings for later calls of their shape, in this decode or another with the same buffers."""
    waiting = state.buffers.bound
    n_bytes = sum(array.nbytes for array in state.sources.values())
    for key, bound in state.bound.items():
        if n_bytes + bound.n_bytes <= MOST_HELD_BYTES:
            waiting[state.rows, *key] = bound
    while len(waiting) > MOST_SHAPES:
        del waiting[next(iter(waiting))]
    state.bound = {}


def _check_not_released(state: OrtState) -> None:
    if state.released:
        raise released_state()
