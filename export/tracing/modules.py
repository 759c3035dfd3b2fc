"""A model as two modules whose inputs and outputs are those of the contract, in its order."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fatdeploy.export.models.exportable import DecoderOutput, Exportable, Memory
from fatdeploy.export.tracing.dialects import emitted, number
from fatdeploy.runtimes.engines.protocol import Want
from fatdeploy.spec import ModelSpec

Results = tuple[Tensor, Tensor, Tensor]


class EncoderGraph(nn.Module):
    """Source in; what the decoder needs of it out."""

    def __init__(self, model: Exportable) -> None:
        super().__init__()
        self.model = model

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        source, mask = tensors
        return self.model.encoded(source, mask)


class DecoderGraph(nn.Module):
    """One call of the decoder: tokens, position, memory and past state in; results and present state out."""

    def __init__(self, model: Exportable, *, branches: bool) -> None:
        super().__init__()
        self.model = model
        self.spec: ModelSpec = model.spec
        self.branches = branches

    def forward(self, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        tokens = next(rest)
        position = next(rest) if self.spec.decoding == "autoregressive" else 0
        want = next(rest) if self.branches else None
        memory = self._memory(rest)
        called, present = self.model.called(tokens, position, tuple(rest), memory)
        hidden = () if called.hidden is None else (called.hidden,)
        attention = () if called.attention is None else (called.attention,)
        return (*hidden, *self._results(called, memory, want, tokens), *attention, *present)

    def _memory(self, rest: Iterator[Tensor]) -> Memory:
        source = next(rest) if self.spec.reads_source else None
        mask = next(rest)
        # A decoder that does not read the source's ids looks at nothing of what stands in their place but its sizes.
        return Memory(mask if source is None else source, mask, tuple(next(rest) for _ in self.spec.memory))

    def _results(self, called: DecoderOutput, memory: Memory, want: Tensor | None, tokens: Tensor) -> Results:
        if want is None:
            logits = self.model.logits(called, memory)
            return logits, *best_of(logits, self.spec)
        return wanted_of(self.model, called, memory, want, tokens)


def best_of(logits: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the best tokens."""
    top = logits.topk(min(spec.top_k, spec.vocab_size))
    return top.values - logits.logsumexp(-1, keepdim=True), top.indices


def wanted_of(model: Exportable, called: DecoderOutput, memory: Memory, want: Tensor, tokens: Tensor) -> Results:
    """Return logits and best tokens as far as they are wanted; a branch that is not taken gives empty tensors.

    A function, because torch refuses branches that reach one module by two ways, such as ``self`` and a closure.
    """
    spec = model.spec
    k = min(spec.top_k, spec.vocab_size)

    # Sizes are read off a tensor that the branch itself is given: torch compares the branches' symbols, not values.
    def no_best(like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (like.shape[0], like.shape[1], k)
        return nothing(torch.float32, shape), nothing(torch.int64, shape)

    def some() -> Results:
        logits = model.logits(called, memory)
        return logits, *torch.cond(want == int(Want.TOPK), lambda: best_of(logits, spec), lambda: no_best(logits))

    def none() -> Results:
        return nothing(torch.float32, (tokens.shape[0], tokens.shape[1], spec.vocab_size)), *no_best(tokens)

    # A model that does not tell its hidden state has computed the logits already.
    results: Results = torch.cond(want == int(Want.HIDDEN), none, some) if spec.hidden else some()
    return results


def nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor where one of ``shape`` is expected: torch wants branches alike, onnxruntime does not."""
    zeros = torch.cat([number(0)] * len(shape))
    empty = emitted("ConstantOfShape", (zeros,), torch.float32, shape)
    return empty if dtype == torch.float32 else empty.to(dtype)
