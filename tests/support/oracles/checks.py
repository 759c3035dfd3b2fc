"""Compares a reference model with its oracle: one padded batch, every intermediate result, in one call and in steps."""

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.weights import random_model
from tests.support.oracles.formulas import Trace
from tests.support.oracles.models import Oracle

# Heads of 12 features are a block of eight and a rest; the maxima differ, so that a mix-up shows; a source of 21 and a
# target of 19 exceed the 16 of the relative table.
SIZES: dict[str, Any] = {
    "vocab_size": 40,
    "width": 24,
    "heads": 2,
    "ffn_width": 20,
    "max_source": 24,
    "max_target": 20,
    "dropout": 0.1,
    "window": 3,
    "stride": 3,
    "linformer_rows": 5,
    "compression": 4,
    "random_features": 7,
}
SOURCE_LENGTHS = (21, 9, 1)
TARGET_LENGTHS = (19, 8, 2)
CHUNKS = (4, 1, 1, 9, 1, 3)


def double_model(preset: str = "transformer-tiny", **changes: Any) -> ReferenceModel:
    return random_model(config_from_preset(preset, **{**SIZES, **changes}), seed=5).double()


def batch_of(config: ModelConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return source, mask and target; the padding of the source is ordinary tokens, which nothing may read."""
    generator = torch.Generator().manual_seed(11)
    source = torch.randint(
        3, config.source_vocab_size or config.vocab_size, (3, max(SOURCE_LENGTHS)), generator=generator
    )
    source[:, 1:4:2] = source[:, :1]  # a token that a source repeats
    mask = torch.arange(source.shape[1]) < torch.tensor(SOURCE_LENGTHS)[:, None]
    if config.parallel:
        real = torch.arange(max(TARGET_LENGTHS)) < torch.tensor(TARGET_LENGTHS)[:, None]
        return source, mask, torch.where(real, config.bos_id, config.pad_id)
    target = torch.randint(3, config.vocab_size, (3, max(TARGET_LENGTHS)), generator=generator)
    target[:, 0] = config.bos_id
    target[:, 3], target[:, 6] = config.pad_id, config.eos_id
    target[:, 9], target[:, 12] = source[:, 0], source[:, -1]
    return source, mask, target


def oracle_traces(model: ReferenceModel, source: Tensor, target: Tensor) -> list[tuple[Trace, Trace]]:
    oracle, traces = Oracle(model, model.config), []
    for row, length in enumerate(SOURCE_LENGTHS):
        ids = source[row, :length].tolist()
        end = TARGET_LENGTHS[row] if model.config.parallel else target.shape[1]
        encoded = oracle.encode(ids)
        traces.append((encoded, oracle.decode(ids, encoded, target[row, :end].tolist())))
    return traces


def check_close(actual: Tensor, expected: Iterable[Any], what: str) -> None:
    numbers = np.array(list(expected))
    assert np.isfinite(numbers).all()
    np.testing.assert_allclose(actual.numpy(), numbers, rtol=1e-9, atol=1e-10, err_msg=what)


def recorded(modules: Iterable[nn.Module]) -> list[Tensor]:
    """Return a list that collects what the modules return, the first of several results."""
    results: list[Tensor] = []
    for module in modules:
        module.register_forward_hook(lambda *call: results.append(call[2][0] if type(call[2]) is tuple else call[2]))
    return results


@torch.no_grad()
def check_whole(model: ReferenceModel) -> list[tuple[Trace, Trace]]:
    """Compare every intermediate result and the scores of a padded batch with the oracle's, row by row."""
    source, mask, target = batch_of(model.config)
    attended = recorded(layer.attention for layer in model.encoder.layers)
    self_attended = recorded(layer.attention for layer in model.decoder.layers if layer.attention is not None)
    crossed = recorded(layer.cross for layer in model.decoder.layers)
    encoded = recorded([model.encoder])
    scores = model(source, mask, target)
    memory = model.encode(source, mask)
    oracle, traces = Oracle(model, model.config), oracle_traces(model, source, target)
    for row, (n, (below, above)) in enumerate(zip(SOURCE_LENGTHS, traces, strict=True)):
        for layer, expected in enumerate(below.attended):
            first = attended[layer].shape[1] - source.shape[1]  # after tokens that are added
            check_close(attended[layer][row, first : first + n], expected, f"row {row}: encoder attention {layer}")
        check_close(encoded[0][-1][row, :n], below.outputs[-1], f"row {row}: encoder")
        for layer in range(model.config.decoder_layers):
            pairs = oracle.memory_pairs(source[row, :n].tolist(), below, layer)
            for tensors, expected in zip((memory.keys, memory.values), pairs, strict=True):
                pair = tensors[layer][row, :, :n].transpose(0, 1).flatten(1)
                check_close(pair, expected, f"row {row}: memory of layer {layer}")
            crosses = crossed[layer][row, above.places]
            check_close(crosses, above.crossed[layer], f"row {row}: cross-attention {layer}")
            if self_attended:
                attentions = self_attended[layer][row, above.places]
                check_close(attentions, above.attended[layer], f"row {row}: self-attention {layer}")
        check_close(scores[row, : len(above.scores)], above.scores, f"row {row}: scores")
    return traces


@torch.no_grad()
def check_steps(model: ReferenceModel) -> None:
    """Compare the scores of a target, fed in calls of different lengths, with the oracle's."""
    source, mask, target = batch_of(model.config)
    memory = model.encode(source, mask)
    state, scores = model.start(memory), []
    ends = list(itertools.accumulate(CHUNKS))
    for start, end in zip([0, *ends], ends, strict=False):
        step, state = model.step(target[:, start:end], state, memory)
        scores.append(step)
    all_scores = torch.cat(scores, 1)
    assert all_scores.shape[1] == target.shape[1]
    for row, (_, above) in enumerate(oracle_traces(model, source, target)):
        check_close(all_scores[row], above.scores, f"row {row}: steps")
