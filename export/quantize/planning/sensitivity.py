"""What an error in the results of each matrix costs: gradients of the reference, from one pass over some sources."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from fatdeploy.export.models.exportable import Exportable, Memory
from fatdeploy.export.quantize.calibrate import CalibrationRow, decoder_tokens, unpadded_batches
from fatdeploy.export.quantize.integers import Floats
from fatdeploy.export.tracing.scaled_queries import scaled_queries
from fatdeploy.manifest import EMBEDDING
from fatdeploy.runtimes.decoding.sources import padded

# Target tokens that are enough to rank matrices and the tokens of a vocabulary by; more take longer and change little.
MOST_TOKENS = 4096
LOGITS = "logits"


def sensitivities_of(
    model: Exportable, columns: Mapping[str, int], rows: Sequence[CalibrationRow]
) -> dict[str, Floats]:
    """Return, for each module in ``columns``, what a squared error in each column of its results costs, per row.

    ``columns`` has the number of results of each module. The cost is the expected divergence of the next token's
    distribution: half the mean square of the gradient of a log-likelihood, with targets that are drawn from the model
    itself (Fisher's information). Modules that gradients do not reach, or with other results, are left out. Two names
    are no modules: the embedding is the sum over all tables that tokens are looked up in, and ``LOGITS`` are those of
    the vocabulary.
    """
    sums: dict[str, Tensor] = {}
    n_tokens = 0
    generator = torch.Generator().manual_seed(0)
    with scaled_queries(model.inner), _with_gradients(model), _captured(model.inner, columns) as outputs:
        for batch in _some(rows):
            outputs.clear()
            log_probs = _logits(model, batch).flatten(0, 1).log_softmax(-1)
            n_tokens += len(log_probs)
            probabilities = log_probs.detach().exp()
            _add(sums, LOGITS, (probabilities * (1 - probabilities)).sum(0))
            drawn = torch.multinomial(probabilities, 1, generator=generator)
            _add_gradients(sums, outputs, log_probs.gather(1, drawn).sum())
    # Per token: the results of an encoder matter for all tokens of their target.
    return {name: (total / (2 * max(1, n_tokens))).numpy() for name, total in sums.items()}


def _some(rows: Sequence[CalibrationRow]) -> Iterator[list[CalibrationRow]]:
    """Yield batches without padding, evenly from all rows, until there are enough tokens."""
    tokens = sum(len(row.target) + 1 for row in rows)
    chosen = rows[:: max(1, -(-tokens // MOST_TOKENS))]
    yield from unpadded_batches(chosen)


def _logits(model: Exportable, batch: Sequence[CalibrationRow]) -> Tensor:
    source, mask = (torch.from_numpy(array) for array in padded([row.source for row in batch], model.spec))
    tokens = torch.from_numpy(np.ascontiguousarray(decoder_tokens(batch, model.spec)))
    memory = Memory(source, mask, model.encoded(source, mask))
    output, _ = model.called(tokens, 0, model.started(memory, tokens.shape[1]), memory)
    return model.logits(output, memory)


def _add_gradients(sums: dict[str, Tensor], outputs: Sequence[tuple[str, Tensor]], likelihood: Tensor) -> None:
    """Add the squared gradients of a log-likelihood with respect to results."""
    usable = [(name, output) for name, output in outputs if output.requires_grad]
    if not usable or not likelihood.requires_grad:
        return
    gradients = torch.autograd.grad(likelihood, [output for _, output in usable], allow_unused=True)
    for (name, _), gradient in zip(usable, gradients, strict=True):
        if gradient is not None:
            _add(sums, name, gradient.flatten(0, -2).square().sum(0))


def _add(sums: dict[str, Tensor], name: str, squares: Tensor) -> None:
    sums[name] = sums[name] + squares if name in sums else squares


@contextmanager
def _with_gradients(model: nn.Module) -> Iterator[None]:
    """Let results depend on weights, so that gradients reach every matrix; afterwards weights are as before."""
    parameters = list(model.parameters())
    before = [parameter.requires_grad for parameter in parameters]
    try:
        with torch.enable_grad():
            for parameter in parameters:
                parameter.requires_grad_(True)  # noqa: FBT003 - torch's own signature
            yield
    finally:
        for parameter, required in zip(parameters, before, strict=True):
            parameter.requires_grad_(required)


@contextmanager
def _captured(model: nn.Module, columns: Mapping[str, int]) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield a list that gets the results of each named module, and of each embedding, whenever it is called."""
    outputs: list[tuple[str, Tensor]] = []

    def hook(name: str, width: int | None) -> Callable[[nn.Module, object, object], None]:
        def keep(_module: nn.Module, _inputs: object, result: object) -> None:
            if isinstance(result, Tensor) and width in (None, result.shape[-1]):
                outputs.append((name, result))

        return keep

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if isinstance(module, nn.Embedding):
                hooks.callback(module.register_forward_hook(hook(EMBEDDING, None)).remove)
            elif name in columns:
                hooks.callback(module.register_forward_hook(hook(name, columns[name])).remove)
        yield outputs
