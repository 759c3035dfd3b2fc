"""The contract between a model and its runtimes: sizes, ids, tensors. The only file that spells a tensor name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.input_checks import wrong_form, wrong_ids, wrong_padding
from fatdeploy.records import RecordReader, json_from_record
from fatdeploy.targets import HalfDtype

Axis = Literal["batch", "rows", "source", "step", "capacity"]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape of a tensor; the size of a named axis varies between calls."""

    name: str
    dtype: str
    shape: tuple[int | Axis, ...]

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with the sizes of the named axes filled in."""
        # A list first: every decode calls this, and a generator takes twice as long.
        return tuple([axis if isinstance(axis, int) else sizes[axis] for axis in self.shape])

    def fixed(self, sizes: Mapping[str, int]) -> "TensorSpec":
        """Return the same tensor with the sizes of some named axes filled in."""
        shape = tuple(axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in self.shape)
        return TensorSpec(self.name, self.dtype, shape)


AnyTensor = TypeVar("AnyTensor", bound=TensorSpec)
AnyArray = TypeVar("AnyArray")  # of numpy, of PyTorch, or an address


@dataclass(frozen=True)
class StateSpec(TensorSpec):
    """A tensor that a decoder passes from step to step.

    A ``cache`` is written at new positions only, so past and present may be one buffer. ``recurrent`` state is read
    after it is written: past and present must be two buffers that swap roles. Before the first token state is ``zero``,
    or what the encoder graph computes from the ``source``.
    """

    kind: Literal["cache", "recurrent"]
    start: Literal["zero", "source"] = "zero"


def cache_specs(layer: int, heads: int, head_width: int, dtype: str = "float32") -> tuple[StateSpec, StateSpec]:
    """Return the key and value caches of one decoder layer."""
    shape: tuple[int | Axis, ...] = ("rows", heads, "capacity", head_width)
    return StateSpec(f"keys.{layer}", dtype, shape, "cache"), StateSpec(f"values.{layer}", dtype, shape, "cache")


def recurrent_specs(
    layer: int, heads: int, features: int, head_width: int, dtype: str = "float32"
) -> tuple[StateSpec, StateSpec]:
    """Return the sums and the normaliser of one decoder layer's linear attention."""
    return (
        StateSpec(f"sums.{layer}", dtype, ("rows", heads, features, head_width), "recurrent"),
        StateSpec(f"normaliser.{layer}", dtype, ("rows", heads, features), "recurrent"),
    )


def cell_specs(layer: int, width: int, count: int) -> tuple[StateSpec, ...]:
    """Return the state of one recurrent decoder layer, which starts from the source; an LSTM has two vectors."""
    names = (f"state.{layer}", f"cell.{layer}")[:count]
    return tuple(StateSpec(name, "float32", ("rows", width), "recurrent", "source") for name in names)


def context_spec(layer: int, width: int) -> TensorSpec:
    """Return what every step of one recurrent decoder layer reads of the source's context vector."""
    return TensorSpec(f"memory.context.{layer}", "float32", ("batch", width))


def attended_spec(layer: int, heads: int) -> StateSpec:
    """Return the sum of all weights so far of one decoder layer's location-aware attention to the source."""
    return StateSpec(f"attended.{layer}", "float32", ("rows", heads, "source"), "recurrent")


def reached_spec(layer: int, heads: int) -> StateSpec:
    """Return the position of the source that each head of one decoder layer's monotonic attention has reached."""
    return StateSpec(f"reached.{layer}", "int64", ("rows", heads), "recurrent")


def memory_specs(layer: int, heads: int, head_width: int, dtype: str = "float32") -> tuple[TensorSpec, TensorSpec]:
    """Return the cross keys and values of one decoder layer: the encoder's outputs, the decoder's inputs."""
    shape: tuple[int | Axis, ...] = ("batch", heads, "source", head_width)
    return TensorSpec(f"memory.keys.{layer}", dtype, shape), TensorSpec(f"memory.values.{layer}", dtype, shape)


@dataclass(frozen=True)
class AlignmentSpec:
    """The decoder layer whose cross-attention weights a step returns, and its number of heads."""

    layer: int
    heads: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a decode loop and an application must know about a model.

    ``width`` is the width of the hidden state that an output matrix multiplies; None if the decoder returns only
    logits.
    """

    vocab_size: int
    width: int | None = None
    max_source: int
    max_target: int
    pad_id: int
    bos_id: int
    eos_id: int
    decoding: Literal["autoregressive", "parallel"] = "autoregressive"
    length: Literal["head", "eos"] = "head"
    target_order: Literal["left_to_right", "right_to_left"] = "left_to_right"
    source: TensorSpec = TensorSpec("source", "int64", ("batch", "source"))
    source_mask: TensorSpec = TensorSpec("source_mask", "bool", ("batch", "source"))
    memory: tuple[TensorSpec, ...] = ()
    state: tuple[StateSpec, ...] = ()
    reads_source: bool = False  # the decoder compares its tokens with the source's ids
    top_k: int = 16
    alignment: AlignmentSpec | None = None
    source_vocab_size: int | None = None  # None is vocab_size
    silent_ids: tuple[int, ...] = ()  # tokens that are never chosen, and whose scores mean nothing
    row_positions: bool = False  # whether rows may be at different positions; the exporter sets it

    def __post_init__(self) -> None:
        reasons = self._wrong_sizes() or [*self._wrong_special_ids(), *self._wrong_starts()]
        if reasons:
            raise SpecMismatch("; ".join(reasons))

    @property
    def n_source_ids(self) -> int:
        """The number of ids that a source can have."""
        return self.vocab_size if self.source_vocab_size is None else self.source_vocab_size

    @property
    def tokens(self) -> TensorSpec:
        """The decoder's input tokens."""
        return TensorSpec("tokens", "int64", ("rows", "step"))

    @property
    def position(self) -> TensorSpec:
        """The number of positions before this step: one per row, or the same for all rows."""
        return TensorSpec("position", "int64", ("rows",) if self.row_positions else ())

    @property
    def want(self) -> TensorSpec:
        """What to compute besides the hidden state; only graphs with branches have this input."""
        return TensorSpec("want", "int64", ())

    @property
    def past(self) -> tuple[TensorSpec, ...]:
        """The state as the decoder's inputs."""
        return tuple(TensorSpec(f"past.{tensor.name}", tensor.dtype, tensor.shape) for tensor in self.state)

    @property
    def present(self) -> tuple[TensorSpec, ...]:
        """The state as the decoder's outputs."""
        return tuple(TensorSpec(f"present.{tensor.name}", tensor.dtype, tensor.shape) for tensor in self.state)

    @property
    def starts(self) -> tuple[TensorSpec, ...]:
        """The state before the first token of tensors that do not start at zero, one row per source."""
        return tuple(
            TensorSpec(f"start.{tensor.name}", tensor.dtype, ("batch", *tensor.shape[1:])) for tensor in self._started
        )

    def started_by(self, outputs: Mapping[str, AnyArray]) -> list[AnyArray | None]:
        """Return the encoder output that each state tensor starts from; None for those that start at zero."""
        names = [start.name for start in self.starts]
        started = dict(zip((tensor.name for tensor in self._started), names, strict=True))
        return [outputs[started[tensor.name]] if tensor.name in started else None for tensor in self.state]

    @property
    def _started(self) -> tuple[StateSpec, ...]:
        return tuple(tensor for tensor in self.state if tensor.start == "source")

    @property
    def length_log_probs(self) -> tuple[TensorSpec, ...]:
        """The output of the length head, if there is one."""
        has_head = self.decoding == "parallel" and self.length == "head"
        return (TensorSpec("length_log_probs", "float32", ("batch", self.max_target)),) if has_head else ()

    @property
    def hidden(self) -> tuple[TensorSpec, ...]:
        """What the output matrix multiplies, if the decoder returns it."""
        return () if self.width is None else (TensorSpec("hidden", "float32", ("rows", "step", self.width)),)

    @property
    def logits(self) -> TensorSpec:
        """The vocabulary's scores."""
        return TensorSpec("logits", "float32", ("rows", "step", self.vocab_size))

    @property
    def best(self) -> tuple[TensorSpec, TensorSpec]:
        """The best tokens' log-probabilities and ids."""
        shape: tuple[int | Axis, ...] = ("rows", "step", min(self.top_k, self.vocab_size))
        return TensorSpec("top_log_probs", "float32", shape), TensorSpec("top_ids", "int64", shape)

    @property
    def attention(self) -> tuple[TensorSpec, ...]:
        """The cross-attention weights of one layer, if they were exported."""
        if self.alignment is None:
            return ()
        return (TensorSpec("attention", "float32", ("rows", self.alignment.heads, "step", "source")),)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """Everything that a step can return."""
        return (*self.hidden, self.logits, *self.best, *self.attention)

    def encoder_inputs(self) -> tuple[TensorSpec, ...]:
        """Return the inputs of the encoder graph, in order."""
        return self.source, self.source_mask

    def encoder_outputs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs of the encoder graph, in order."""
        return (*self.memory, *self.length_log_probs, *self.starts)

    def decoder_inputs(self, *, branches: bool) -> tuple[TensorSpec, ...]:
        """Return the inputs of the decoder graph, in order; with ``branches`` one of them says what to compute."""
        position = (self.position,) if self.decoding == "autoregressive" else ()
        want = (self.want,) if branches else ()
        source = (self.source,) if self.reads_source else ()
        return (self.tokens, *position, *want, *source, self.source_mask, *self.memory, *self.past)

    def decoder_outputs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs of the decoder graph, in order."""
        return (*self.results, *self.present)

    def fixed_axes(self, *, branches: bool) -> dict[str, int]:
        """Return the axes that are numbers in the graphs: TensorRT only updates caches of a fixed length."""
        return {} if branches else {"capacity": self.max_target}

    def halved(self, dtype: HalfDtype) -> "ModelSpec":
        """Return the contract of the same model in half precision.

        Memory and caches become half. Recurrent state is a sum over all positions, which half would round at each, and
        results are for applications: both stay float32.
        """
        memory = tuple(_halved(tensor, dtype) for tensor in self.memory)
        state = tuple(_halved(tensor, dtype) if tensor.kind == "cache" else tensor for tensor in self.state)
        return replace(self, memory=memory, state=state)

    def widened(self) -> "ModelSpec":
        """Return the contract of a half-precision model in float32."""
        memory = tuple(_with_dtype(tensor, "float32") for tensor in self.memory)
        state = tuple(_with_dtype(tensor, "float32") for tensor in self.state)
        return replace(self, memory=memory, state=state)

    def ordinary_ids(self) -> Tokens:
        """Return the ids of all source tokens but padding, BOS and EOS, in ascending order."""
        return np.setdiff1d(np.arange(self.n_source_ids), [self.pad_id, self.bos_id, self.eos_id])

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, including defaults: a later change of a default changes no bundle."""
        values: dict[str, Any] = json_from_record(self)
        return values

    @classmethod
    def from_dict(cls, values: object) -> "ModelSpec":
        """Return the spec that ``to_dict`` wrote; one error lists all unknown, missing and mistyped fields."""
        reader = RecordReader()
        spec = reader.read(cls, values)
        if spec is None:
            raise SpecMismatch(in_one_line("spec refused", reader.reasons))
        return spec

    def check_source(self, source: Tokens, mask: Mask) -> None:
        """Raise SpecMismatch, with every reason, unless the source is right-padded ids that the model can read.

        Every engine calls this at its own door, for callers that do not come through the decode loop. It is two
        reductions per batch, and the only check of the padded arrays.
        """
        reasons = self._wrong_source_form(source, mask) or [
            *wrong_ids("source", source, self.n_source_ids),
            *wrong_padding(mask),
        ]
        if reasons:
            raise SpecMismatch(in_one_line("source refused", reasons))

    def check_tokens(self, tokens: Tokens, position: int, capacity: int | None = None) -> None:
        """Raise SpecMismatch unless a step can read these tokens at this position."""
        reasons = wrong_form("tokens", tokens, np.dtype(np.int64))
        if not reasons:
            reasons = wrong_ids("tokens", tokens, self.vocab_size)
            end, limit = position + tokens.shape[1], self.max_target if capacity is None else capacity
            if end > limit:
                reasons.append(f"a step to position {end} is past max_target = {limit}")
            if self.decoding == "parallel" and position:
                reasons.append("a parallel model decodes all positions in one call, this is the second")
        if reasons:
            raise SpecMismatch(in_one_line("step refused", reasons))

    def _wrong_sizes(self) -> list[str]:
        names = ("vocab_size", "source_vocab_size", "width", "max_source", "max_target", "top_k")
        sizes = {name: getattr(self, name) for name in names}
        return [
            f"{name} must be 1 or more, found {size}" for name, size in sizes.items() if size is not None and size < 1
        ]

    def _wrong_special_ids(self) -> list[str]:
        # Padding is also read by the encoder, which may have fewer ids.
        limits = {
            "pad_id": min(self.vocab_size, self.n_source_ids),
            "bos_id": self.vocab_size,
            "eos_id": self.vocab_size,
        }
        ids = [(name, getattr(self, name), limit) for name, limit in limits.items()]
        ids += [("silent_ids", token, self.vocab_size) for token in self.silent_ids]
        reasons = [
            f"{name} must lie in 0…{limit - 1}, found {token}" for name, token, limit in ids if not 0 <= token < limit
        ]
        if len(set(self.silent_ids)) >= self.vocab_size > 0:
            reasons.append("silent_ids must leave a token that can be chosen")
        return reasons

    def _wrong_starts(self) -> list[str]:
        reasons = [
            f"state {tensor.name} starts from the source, so it must be recurrent, found a {tensor.kind}"
            for tensor in self._started
            if tensor.kind != "recurrent"
        ]
        return reasons + [
            f"state {tensor.name} starts from the source, so its axes must be rows and numbers, found "
            f"{list(tensor.shape)}"
            for tensor in self._started
            if tensor.shape[:1] != ("rows",) or not all(isinstance(axis, int) for axis in tensor.shape[1:])
        ]

    def _wrong_source_form(self, source: Tokens, mask: Mask) -> list[str]:
        reasons = wrong_form("source", source, np.dtype(np.int64)) + wrong_form("mask", mask, np.dtype(np.bool_))
        if source.shape != mask.shape:
            reasons.append(f"mask has shape {mask.shape}, the source has {source.shape}")
        if source.ndim == 2 and source.shape[1] > self.max_source:
            reasons.append(f"length {source.shape[1]} is more than max_source = {self.max_source}")
        return reasons


def _with_dtype(tensor: AnyTensor, dtype: str) -> AnyTensor:
    return replace(tensor, dtype=dtype) if tensor.dtype in ("float32", "float16", "bfloat16") else tensor


def _halved(tensor: AnyTensor, dtype: HalfDtype) -> AnyTensor:
    return replace(tensor, dtype=dtype) if tensor.dtype == "float32" else tensor


# Tensors of the graph in a quantized bundle that shows whether a CPU adds products of integers exactly.
SATURATION_INPUT, SATURATION_OUTPUT = "activations", "sums"
