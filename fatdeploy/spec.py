"""The contract between a model and its runtimes: sizes, ids, tensors. The only file that spells a tensor name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.records import RecordReader, json_from_record

Axis = Literal["batch", "rows", "source", "step", "capacity"]
Tokens = NDArray[np.int64]
Mask = NDArray[np.bool_]

FEW = 32


@dataclass(frozen=True)
class TensorSpec:
    """Name, element type and shape of a tensor; a named axis varies from call to call."""

    name: str
    dtype: str
    shape: tuple[int | Axis, ...]

    def sized(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape with the named axes' sizes in it."""
        # A list first: every decode asks, and a generator takes twice as long.
        return tuple([axis if isinstance(axis, int) else sizes[axis] for axis in self.shape])

    def fixed(self, sizes: Mapping[str, int]) -> "TensorSpec":
        """Return the same with some of the named axes' sizes in it."""
        shape = tuple(axis if isinstance(axis, int) else sizes.get(axis, axis) for axis in self.shape)
        return TensorSpec(self.name, self.dtype, shape)


AnyTensor = TypeVar("AnyTensor", bound=TensorSpec)


@dataclass(frozen=True)
class StateSpec(TensorSpec):
    """A tensor that a decoder hands from step to step.

    A ``cache`` is written at new positions only, so past and present may be one buffer. ``recurrent`` state is read
    after it is written: past and present must be two buffers that change places.
    """

    kind: Literal["cache", "recurrent"]


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


def memory_specs(layer: int, heads: int, head_width: int, dtype: str = "float32") -> tuple[TensorSpec, TensorSpec]:
    """Return the cross keys and values of one decoder layer: the encoder's outputs, the decoder's inputs."""
    shape: tuple[int | Axis, ...] = ("batch", heads, "source", head_width)
    return TensorSpec(f"memory.keys.{layer}", dtype, shape), TensorSpec(f"memory.values.{layer}", dtype, shape)


@dataclass(frozen=True)
class AlignmentSpec:
    """Which decoder layer's cross-attention weights a step returns, and of how many heads."""

    layer: int
    heads: int


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a decode loop and an application must know of a model.

    ``width`` is that of the hidden state which an output matrix multiplies; None if the decoder gives logits alone.
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

    @property
    def tokens(self) -> TensorSpec:
        """The decoder's input tokens."""
        return TensorSpec("tokens", "int64", ("rows", "step"))

    @property
    def position(self) -> TensorSpec:
        """How many positions were fed before, one number for all rows."""
        return TensorSpec("position", "int64", ())

    @property
    def want(self) -> TensorSpec:
        """What to compute beyond the hidden state; only graphs with branches have it."""
        return TensorSpec("want", "int64", ())

    @property
    def past(self) -> tuple[TensorSpec, ...]:
        """The state as the decoder's inputs."""
        return tuple(TensorSpec(f"past.{one.name}", one.dtype, one.shape) for one in self.state)

    @property
    def present(self) -> tuple[TensorSpec, ...]:
        """The state as the decoder's outputs."""
        return tuple(TensorSpec(f"present.{one.name}", one.dtype, one.shape) for one in self.state)

    @property
    def length_log_probs(self) -> tuple[TensorSpec, ...]:
        """What the length head says, where there is one."""
        has_head = self.decoding == "parallel" and self.length == "head"
        return (TensorSpec("length_log_probs", "float32", ("batch", self.max_target)),) if has_head else ()

    @property
    def hidden(self) -> tuple[TensorSpec, ...]:
        """What the output matrix multiplies, where the decoder tells it."""
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
        """The cross-attention weights of one layer, where they were exported."""
        if self.alignment is None:
            return ()
        return (TensorSpec("attention", "float32", ("rows", self.alignment.heads, "step", "source")),)

    @property
    def results(self) -> tuple[TensorSpec, ...]:
        """All that a step can say."""
        return (*self.hidden, self.logits, *self.best, *self.attention)

    def encoder_inputs(self) -> tuple[TensorSpec, ...]:
        """Return the inputs of the encoder graph, in order."""
        return self.source, self.source_mask

    def encoder_outputs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs of the encoder graph, in order."""
        return (*self.memory, *self.length_log_probs)

    def decoder_inputs(self, *, branches: bool) -> tuple[TensorSpec, ...]:
        """Return the inputs of the decoder graph, in order; with ``branches`` it is told what to compute."""
        step = (self.position,) if self.decoding == "autoregressive" else ()
        asked = (self.want,) if branches else ()
        ids = (self.source,) if self.reads_source else ()
        return (self.tokens, *step, *asked, *ids, self.source_mask, *self.memory, *self.past)

    def decoder_outputs(self) -> tuple[TensorSpec, ...]:
        """Return the outputs of the decoder graph, in order."""
        return (*self.results, *self.present)

    def fixed_axes(self, *, branches: bool) -> dict[str, int]:
        """Return the axes that are numbers in the graphs: TensorRT updates caches of a fixed length only."""
        return {} if branches else {"capacity": self.max_target}

    def halved(self, dtype: Literal["float16", "bfloat16"]) -> "ModelSpec":
        """Return the contract of the same model in half precision.

        Memory and caches are half. Recurrent state is a sum over all positions, which half would round at each, and
        results are for applications: both stay float32.
        """
        memory = tuple(_halved(one, dtype) for one in self.memory)
        return replace(
            self, memory=memory, state=tuple(_halved(one, dtype) if one.kind == "cache" else one for one in self.state)
        )

    def ordinary_ids(self) -> list[int]:
        """Return the ids that stand for themselves: all but padding, BOS and EOS."""
        special = {self.pad_id, self.bos_id, self.eos_id}
        return [token for token in range(self.vocab_size) if token not in special]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values, defaults included: a later change of a default changes no bundle."""
        values: dict[str, Any] = json_from_record(self)
        return values

    @classmethod
    def from_dict(cls, values: object) -> "ModelSpec":
        """Return the spec that ``to_dict`` described; unknown, missing and mistyped fields are refused together."""
        reader = RecordReader()
        spec = reader.read(cls, values)
        if spec is None:
            raise SpecMismatch(in_one_line("spec refused", reader.reasons))
        return spec

    def check_source(self, source: Tokens, mask: Mask) -> None:
        """Raise SpecMismatch, with every reason, unless the source is right-padded ids that the model takes."""
        reasons = self._wrong_source_form(source, mask) or [
            *self._wrong_ids("source", source),
            *_wrong_padding(mask),
        ]
        if reasons:
            raise SpecMismatch(in_one_line("source refused", reasons))

    def check_tokens(self, tokens: Tokens, position: int, capacity: int | None = None) -> None:
        """Raise SpecMismatch unless a step may be given these tokens at this position."""
        reasons = _wrong_form("tokens", tokens, np.dtype(np.int64))
        if not reasons:
            reasons = self._wrong_ids("tokens", tokens)
            end, limit = position + tokens.shape[1], self.max_target if capacity is None else capacity
            if end > limit:
                reasons.append(f"a step to position {end} is past max_target = {limit}")
            if self.decoding == "parallel" and position:
                reasons.append("a parallel model decodes all positions in one call, this is the second")
        if reasons:
            raise SpecMismatch(in_one_line("step refused", reasons))

    def _wrong_source_form(self, source: Tokens, mask: Mask) -> list[str]:
        reasons = _wrong_form("source", source, np.dtype(np.int64)) + _wrong_form("mask", mask, np.dtype(np.bool_))
        if source.shape != mask.shape:
            reasons.append(f"mask has shape {mask.shape}, the source has {source.shape}")
        if source.ndim == 2 and source.shape[1] > self.max_source:
            reasons.append(f"length {source.shape[1]} is more than max_source = {self.max_source}")
        return reasons

    def _wrong_ids(self, name: str, ids: Tokens) -> list[str]:
        low, high = _extremes(ids)
        if low >= 0 and high < self.vocab_size:
            return []
        return [f"{name} ids must lie in 0…{self.vocab_size - 1}, found {low if low < 0 else high}"]


def _halved(one: AnyTensor, dtype: str) -> AnyTensor:
    return replace(one, dtype=dtype) if one.dtype == "float32" else one


def _wrong_form(name: str, array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> list[str]:
    reasons = []
    if array.dtype != dtype:
        reasons.append(f"{name} must be {dtype}, found {array.dtype}")
    if array.ndim != 2:
        reasons.append(f"{name} must have two axes (rows, positions), found shape {array.shape}")
    elif not array.size:
        reasons.append(f"{name} is empty: shape {array.shape}")
    return reasons


def _extremes(ids: Tokens) -> tuple[int, int]:
    """Return the least and the largest; of few ids, as every step has them, a list says so sooner than an array."""
    if ids.size > FEW:
        return int(ids.min()), int(ids.max())
    listed = ids.ravel().tolist()
    return min(listed), max(listed)


def _wrong_padding(mask: Mask) -> list[str]:
    if mask.all():
        return []
    reasons = []
    empty = np.flatnonzero(~mask.any(axis=1))
    if empty.size:
        reasons.append(f"row {empty[0]} has no real token")
    ragged = np.flatnonzero((mask[:, 1:] & ~mask[:, :-1]).any(axis=1))
    if ragged.size:
        reasons.append(f"row {ragged[0]} of the mask is not a run of True followed by a run of False (right padding)")
    return reasons


# Of the graph in a quantized bundle that shows whether a CPU adds products of integers exactly.
SATURATION_INPUT, SATURATION_OUTPUT = "activations", "sums"
