"""Models as the contract sees them: tensors in the order of its spec, whoever wrote the model."""

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.export.reference.cross.attention import SourceMemory
from fatdeploy.export.reference.decoder import DecoderState
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.seams import Position, seams
from fatdeploy.spec import AlignmentSpec, ModelSpec

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Memory:
    """The source, and what ``encode`` made of it. R rows of tokens share B sources: R = B·n."""

    source: Tensor  # [B, S] ids
    mask: Tensor  # [B, S], True = a real token
    tensors: Tensors  # as the spec's ``memory`` describes them; behind them what else the encoder graph returns

    def by_source(self, x: Tensor) -> Tensor:
        """Return x [R, t, …] as [B, n, t, …], so that the n rows of a source meet its tensors without copies."""
        return seams().by_source(x, self.source)

    def by_row(self, x: Tensor, like: Tensor) -> Tensor:
        """Return x [B, n, t, …] in the shape of ``like`` [R, t, …]."""
        return seams().by_row(x, like)


@dataclass(frozen=True)
class State:
    """How many positions came before (a tensor without axes), and what ``start`` or the last step returned."""

    position: Tensor
    tensors: Tensors  # as the spec's ``state`` describes them


class UserModel(Protocol):
    """Your own model: a contract and four methods. An nn.Module, so that its weights are found."""

    @property
    def spec(self) -> ModelSpec:
        """The contract: sizes, ids, and the tensors of memory and state."""
        ...

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensors:
        """Return the memory: all that the decoder needs from source [B, S]."""
        ...

    def start(self, memory: Memory) -> Tensors:
        """Return the state before the first token, one row per source."""
        ...

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, Tensors]:
        """Return logits [R, t, V] after tokens [R, t], and the next state."""
        ...

    def forward(self, source: Tensor, source_mask: Tensor, target_in: Tensor) -> Tensor:
        """Return logits [B, T, V] for a whole target at once."""
        ...


@dataclass(frozen=True)
class DecoderOutput:
    """What a call of the decoder returned, before logits are computed."""

    hidden: Tensor | None
    attention: Tensor | None
    inner: Any  # what the model itself computes logits from


class Exportable(nn.Module):
    """A model behind flat tensors: what graphs are traced from, and what the eager engine runs."""

    spec: ModelSpec
    inner: nn.Module

    def with_spec(self, spec: ModelSpec) -> "Exportable":
        """Return the same model behind another contract."""
        raise NotImplementedError

    def encoded(self, source: Tensor, mask: Tensor) -> Tensors:
        """Return the encoder graph's outputs."""
        raise NotImplementedError

    def started(self, memory: Memory, capacity: int) -> Tensors:
        """Return the state before the first token."""
        raise NotImplementedError

    def called(
        self, tokens: Tensor, position: Position, past: Tensors, memory: Memory
    ) -> tuple[DecoderOutput, Tensors]:
        """Return what the decoder makes of ``tokens``, and the next state."""
        raise NotImplementedError

    def logits(self, output: DecoderOutput, memory: Memory) -> Tensor:
        """Return the scores of the vocabulary."""
        raise NotImplementedError

    def output_matrix(self) -> Tensor | None:
        """Return the matrix [V, M] that makes logits of the hidden state; None if they are something else."""
        return None

    def output_bias(self) -> Tensor | None:
        """Return what is added to the product with the output matrix, [V]; None if nothing is."""
        return None


class ExportableReference(Exportable):
    """A model of the FAT family."""

    def __init__(self, model: ReferenceModel, spec: ModelSpec) -> None:
        super().__init__()
        self.inner: ReferenceModel = model
        self.spec = spec

    def with_spec(self, spec: ModelSpec) -> "ExportableReference":
        return ExportableReference(self.inner, spec)

    def encoded(self, source: Tensor, mask: Tensor) -> Tensors:
        memory = self.inner.encode(source, mask)
        pairs = [tensor for pair in zip(memory.keys, memory.values, strict=True) for tensor in pair]
        contexts, starts = ([tensor for layer in part for tensor in layer] for part in (memory.contexts, memory.starts))
        if memory.length_logits is None:
            return (*pairs, *contexts, *starts)
        return (*pairs, memory.length_logits.log_softmax(-1)[:, : self.spec.max_target])

    def started(self, memory: Memory, capacity: int) -> Tensors:
        state = self.inner.start(self._memory(memory), capacity)
        return tuple(tensor for layer in state.layers for tensor in layer)

    def called(
        self, tokens: Tensor, position: Position, past: Tensors, memory: Memory
    ) -> tuple[DecoderOutput, Tensors]:
        state = DecoderState(position, self._by_layer(past))
        layer = None if self.spec.alignment is None else self.spec.alignment.layer
        decoded, state = self.inner.decode(tokens, state, self._memory(memory), weights_of=layer)
        attention = None if layer is None else decoded.weights.get(layer, self._no_attention(decoded.hidden, memory))
        present = tuple(tensor for tensors in state.layers for tensor in tensors)
        return DecoderOutput(decoded.hidden, attention, decoded), present

    def logits(self, output: DecoderOutput, memory: Memory) -> Tensor:
        return self.inner.logits(output.inner, self._memory(memory))

    def output_matrix(self) -> Tensor | None:
        # With copying, logits are log-probabilities of a mixture.
        return None if self.inner.config.copy else self.inner.output.weight

    def output_bias(self) -> Tensor | None:
        return None if self.inner.config.copy else self.inner.output_bias

    def _memory(self, memory: Memory) -> SourceMemory:
        config, used = self.inner.config, memory.tensors[: len(self.spec.memory)]
        starts = self._by_layer(memory.tensors[len(self.spec.memory) :]) if config.starts_from_source else []
        if config.decoder_attention == "fully_connected":
            return SourceMemory(memory.source, memory.mask, contexts=self._by_layer(used), starts=starts)
        contexts: list[Tensors] = [()] * config.decoder_layers
        return SourceMemory(memory.source, memory.mask, list(used[::2]), list(used[1::2]), contexts, starts)

    def _by_layer(self, tensors: Tensors) -> list[Tensors]:
        layers = self.inner.config.decoder_layers
        each = len(tensors) // layers
        return [tensors[index * each : (index + 1) * each] for index in range(layers)]

    def _no_attention(self, hidden: Tensor, memory: Memory) -> Tensor:
        heads = self.inner.config.target_heads.count
        return hidden.new_zeros(hidden.shape[0], heads, hidden.shape[1], memory.mask.shape[1])


class ExportableUserModel(Exportable):
    """A model of the user."""

    def __init__(self, model: nn.Module, spec: ModelSpec) -> None:
        super().__init__()
        self.inner: Any = model
        self.spec = spec

    def with_spec(self, spec: ModelSpec) -> "ExportableUserModel":
        return ExportableUserModel(self.inner, spec)

    def encoded(self, source: Tensor, mask: Tensor) -> Tensors:
        memory = Memory(source, mask, tuple(self.inner.encode(source, mask)))
        if not self.spec.starts:
            return memory.tensors
        state = zip(self.spec.state, self.inner.start(memory), strict=False)  # another number is refused elsewhere
        return (*memory.tensors, *(tensor for entry, tensor in state if entry.start == "source"))

    def started(self, memory: Memory, capacity: int) -> Tensors:  # noqa: ARG002
        return tuple(self.inner.start(self._own(memory)))

    def called(
        self, tokens: Tensor, position: Position, past: Tensors, memory: Memory
    ) -> tuple[DecoderOutput, Tensors]:
        logits, present = self.inner.step(tokens, State(torch.as_tensor(position), past), self._own(memory))
        return DecoderOutput(None, None, logits), tuple(present)

    def _own(self, memory: Memory) -> Memory:
        """Return the memory without what else the encoder graph returns."""
        return Memory(memory.source, memory.mask, memory.tensors[: len(self.spec.memory)])

    def logits(self, output: DecoderOutput, memory: Memory) -> Tensor:  # noqa: ARG002
        logits: Tensor = output.inner
        return logits


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What an export may change in a model's contract; None keeps the model's own value."""

    max_source: int | None = None
    max_target: int | None = None
    top_k: int | None = None  # how many best tokens a step can return
    attention_layer: int | None = None  # the layer whose cross-attention weights a step returns

    def applied(self, spec: ModelSpec, model: nn.Module) -> ModelSpec:
        """Return the model's contract with these choices; all that are not possible are one ConfigError."""
        limits = {"max_source": spec.max_source, "max_target": spec.max_target, "top_k": spec.vocab_size}
        chosen = {name: getattr(self, name) for name in limits if getattr(self, name) is not None}
        reasons = [
            f"{name} must lie in 1…{limits[name]}, found {value}"
            for name, value in chosen.items()
            if not 1 <= value <= limits[name]
        ]
        reasons += self._wrong_layer(model)
        if reasons:
            raise ConfigError(in_one_line("the model cannot be exported with these options", reasons))
        if isinstance(model, ReferenceModel) and self.attention_layer is not None:
            chosen["alignment"] = AlignmentSpec(self.attention_layer, model.config.target_heads.count)
        return replace(spec, **chosen)

    def _wrong_layer(self, model: nn.Module) -> list[str]:
        if self.attention_layer is None:
            return []
        if not isinstance(model, ReferenceModel):
            return ["the exporter does not know the attention of your own model"]
        last = model.config.decoder_layers - 1
        layer = self.attention_layer
        if model.config.cross_attention == "none":
            return ["cross_attention = none has no weights of the source"]
        if model.config.recurrent_decoder and layer != last:
            return [f"a recurrent decoder attends to the source after its last layer, {last}, found {layer}"]
        return [] if 0 <= layer <= last else [f"attention must be a decoder layer in 0…{last}, found {layer}"]


def exportable_model(model: object, choices: Choices | None = None) -> Exportable:
    """Return any model, ours or the user's, behind flat tensors."""
    if isinstance(model, Exportable):
        return model if choices is None else exportable_model(model.inner, choices)
    reasons = missing_parts(model)
    if reasons or not isinstance(model, nn.Module):
        raise ConfigError(in_one_line(f"{type(model).__name__} is not a model that can be exported", reasons))
    choices = choices or Choices()
    if isinstance(model, ReferenceModel):
        return ExportableReference(model.eval(), choices.applied(model.spec, model))
    spec: ModelSpec = getattr(model, "spec")  # noqa: B009 - nn.Module declares every attribute a tensor or a module
    return ExportableUserModel(model.eval(), choices.applied(spec, model))


def missing_parts(model: object) -> list[str]:
    """Return what an object lacks to be a ``UserModel``, as reasons."""
    reasons = [] if isinstance(model, nn.Module) else ["it must be a torch.nn.Module, so that its weights are found"]
    spec = getattr(model, "spec", None)
    if not isinstance(spec, ModelSpec):
        reasons.append("it has no spec (a fatdeploy.spec.ModelSpec)")
    elif not isinstance(model, ReferenceModel) and any(tensor.kind == "ring" for tensor in spec.state):
        # Engines write a ring where it is read: a graph that reads what a step overwrites would be wrong.
        reasons.append('its state has a "ring", which only our own decoders have: use "recurrent"')
    methods = [name for name in ("encode", "start", "step") if not callable(getattr(model, name, None))]
    if getattr(type(model), "forward", nn.Module.forward) is nn.Module.forward:
        methods.append("forward")
    return reasons + [f"it has no method {name}" for name in methods]
