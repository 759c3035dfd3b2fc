"""The reference model as two modules whose inputs and outputs are those of the contract, in its order."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fatdeploy.export.dialects import emitted, number
from fatdeploy.export.reference.decoder import DecoderState, Memory
from fatdeploy.export.reference.model import Decoded, ReferenceModel
from fatdeploy.runtimes.engine import Want
from fatdeploy.spec import ModelSpec

Results = tuple[Tensor, Tensor, Tensor]


class EncoderGraph(nn.Module):
    """Source in, projected cross keys and values out."""

    def __init__(self, model: ReferenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        source, mask = tensors
        memory = self.model.encode(source, mask)
        pairs = [tensor for pair in zip(memory.keys, memory.values, strict=True) for tensor in pair]
        return (*pairs, *([] if memory.length_logits is None else [memory.length_logits.log_softmax(-1)]))


class DecoderGraph(nn.Module):
    """One call of the decoder: tokens, position, memory and past state in; results and present state out."""

    def __init__(self, model: ReferenceModel, *, branches: bool) -> None:
        super().__init__()
        self.model = model
        self.spec: ModelSpec = model.spec
        self.branches = branches

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        tokens = next(rest)
        position = next(rest) if self.spec.decoding == "autoregressive" else 0
        want = next(rest) if self.branches else None
        # A decoder that does not read the source's ids never looks at what stands in their place.
        memory = self._memory(next(rest) if self.spec.reads_source else tokens, next(rest), rest)
        state = DecoderState(position, self._layers(list(rest)))
        decoded, state = self.model.decode(tokens, state, memory)
        results = self._results(decoded, memory, want)
        return (decoded.hidden, *results, *(tensor for layer in state.layers for tensor in layer))

    def _memory(self, source: Tensor, mask: Tensor, rest: Iterator[Tensor]) -> Memory:
        pairs = [(next(rest), next(rest)) for _ in range(self.model.config.decoder_layers)]
        return Memory(source, mask, [keys for keys, _ in pairs], [values for _, values in pairs])

    def _layers(self, tensors: list[Tensor]) -> list[tuple[Tensor, ...]]:
        layers = self.model.config.decoder_layers
        each = len(tensors) // layers
        return [tuple(tensors[index * each : (index + 1) * each]) for index in range(layers)]

    def _results(self, decoded: Decoded, memory: Memory, want: Tensor | None) -> Results:
        if want is None:
            logits = self.model.logits(decoded, memory)
            return logits, *best_of(logits, self.spec)
        return wanted_of(self.model, decoded, memory, want)


def best_of(logits: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the best tokens."""
    top = logits.topk(min(spec.top_k, spec.vocab_size))
    return top.values - logits.logsumexp(-1, keepdim=True), top.indices


def wanted_of(model: ReferenceModel, decoded: Decoded, memory: Memory, want: Tensor) -> Results:
    """Return logits and best tokens as far as they are wanted; a branch that is not taken gives empty tensors.

    A function, because torch refuses branches that reach one module by two ways, such as ``self`` and a closure.
    """
    spec, hidden = model.spec, decoded.hidden
    k = min(spec.top_k, spec.vocab_size)

    # Sizes are read off a tensor that the branch itself is given: torch compares the branches' symbols, not values.
    def no_best(like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (like.shape[0], like.shape[1], k)
        return nothing(like.dtype, shape), nothing(torch.int64, shape)

    def some() -> Results:
        logits = model.logits(decoded, memory)
        return logits, *torch.cond(want == int(Want.TOPK), lambda: best_of(logits, spec), lambda: no_best(logits))

    def none() -> Results:
        return nothing(hidden.dtype, (hidden.shape[0], hidden.shape[1], spec.vocab_size)), *no_best(hidden)

    results: Results = torch.cond(want == int(Want.HIDDEN), none, some)
    return results


def nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor where one of ``shape`` is expected: torch wants branches alike, onnxruntime does not."""
    zeros = torch.cat([number(0)] * len(shape))
    empty = emitted("ConstantOfShape", (zeros,), torch.float32, shape)
    return empty if dtype == torch.float32 else empty.to(dtype)
