"""A model as two modules with the inputs and outputs of the contract, in its order."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from fatdeploy.export.models.exportable import DecoderOutput, Exportable, Memory
from fatdeploy.export.tracing.dialect_base import emitted, number
from fatdeploy.runtimes.engines.protocol import Want
from fatdeploy.spec import ModelSpec

Results = tuple[Tensor, Tensor, Tensor]


class EncoderGraph(nn.Module):
    """The source in, what the decoder needs from it out."""

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
        output, present = self.model.called(tokens, position, tuple(rest), memory)
        hidden = () if output.hidden is None else (output.hidden,)
        attention = () if output.attention is None else (output.attention,)
        return (*hidden, *self._results(output, memory, want, tokens), *attention, *present)

    def _memory(self, rest: Iterator[Tensor]) -> Memory:
        source = next(rest) if self.spec.reads_source else None
        mask = next(rest)
        # A decoder that does not read the source's ids uses only the sizes of the tensor in their place.
        return Memory(mask if source is None else source, mask, tuple(next(rest) for _ in self.spec.memory))

    def _results(self, output: DecoderOutput, memory: Memory, want: Tensor | None, tokens: Tensor) -> Results:
        if want is None:
            logits = self.model.logits(output, memory)
            return logits, *best_of(logits, self.spec)
        return wanted_of(self.model, output, memory, want, tokens)


def best_of(logits: Tensor, spec: ModelSpec) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and ids of the best tokens."""
    top = logits.topk(min(spec.top_k, spec.vocab_size))
    return top.values - logits.logsumexp(-1, keepdim=True), top.indices


def wanted_of(model: Exportable, output: DecoderOutput, memory: Memory, want: Tensor, tokens: Tensor) -> Results:
    """Return logits and best tokens if they are wanted, else empty tensors.

    A function, because torch refuses branches that reach a module in two ways, such as ``self`` and a closure.
    """
    spec = model.spec
    k = min(spec.top_k, spec.vocab_size)

    # Sizes come from a tensor that the branch itself receives: torch compares the symbols of branches, not values.
    def no_best(like: Tensor) -> tuple[Tensor, Tensor]:
        shape = (like.shape[0], like.shape[1], k)
        return nothing(torch.float32, shape), nothing(torch.int64, shape)

    def computed() -> Results:
        logits = model.logits(output, memory)
        return logits, *torch.cond(want == int(Want.TOPK), lambda: best_of(logits, spec), lambda: no_best(logits))

    def skipped() -> Results:
        return nothing(torch.float32, (tokens.shape[0], tokens.shape[1], spec.vocab_size)), *no_best(tokens)

    # A model without a hidden state has computed the logits already.
    results: Results = torch.cond(want == int(Want.HIDDEN), skipped, computed) if spec.hidden else computed()
    return results


def nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """Return an empty tensor that torch takes for one of ``shape``: it wants equal branches, onnxruntime does not."""
    zeros = torch.cat([number(0)] * len(shape))
    empty = emitted("ConstantOfShape", (zeros,), torch.float32, shape)
    return empty if dtype == torch.float32 else empty.to(dtype)
