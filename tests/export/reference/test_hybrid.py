"""The hybrid forward pass: the numbers of the masked computation, and cross-attention that really does not run."""

import pytest
import torch

from fatdeploy.export.reference.model import ReferenceModel
from tests.support.choices import drawn_batch, tiny

VARIANTS = [{}, {"norm": "post"}, {"cross_attention": "scaled_dot"}, {"cross_attention": "scaled_dot", "copy": True}]


def count_cross_calls(model: ReferenceModel) -> list[int]:
    """Return a list that grows by one with every execution of a cross-attention."""
    calls: list[int] = []
    for layer in model.decoder.stack():
        layer.cross.register_forward_hook(lambda *_: calls.append(1))
    return calls


def dull_token(model: ReferenceModel, source: torch.Tensor) -> int:
    """Return a token without source information: rare, and in no source."""
    return next(t for t in range(model.config.vocab_size - 1, 0, -1) if not model.keep[t] and t not in source)


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@torch.inference_mode()
def test_a_step_without_source_information_skips_cross_attention_and_returns_the_masked_numbers(changes: dict) -> None:
    model = tiny(changes, base="fat").double()
    source, mask, _ = drawn_batch(model.config, [5, 8], 1)
    dull, memory = dull_token(model, source), model.encode(source, mask)
    bos = torch.full((2, 1), model.config.bos_id)
    dull_step = torch.full((2, 1), dull)
    calls = count_cross_calls(model)

    _, state = model.step(bos, model.start(memory), memory)
    assert len(calls) == model.config.decoder_layers
    skipped, _ = model.step(dull_step, state, memory)
    assert len(calls) == model.config.decoder_layers

    # A call that includes BOS cannot skip: the gate alone must make the second position's cross-attention 0.
    masked = model(source, mask, torch.cat([bos, dull_step], 1))
    assert len(calls) == 2 * model.config.decoder_layers
    assert float((skipped[:, 0] - masked[:, 1]).abs().max()) <= 1e-12


@torch.inference_mode()
def test_one_row_with_source_information_makes_it_run_and_changes_nothing_for_the_others() -> None:
    model = tiny({}, base="fat").double()
    source, mask, _ = drawn_batch(model.config, [5, 8], 1)
    memory = model.encode(source, mask)
    dull = dull_token(model, source)
    calls = count_cross_calls(model)
    both_dull, _ = model.step(torch.tensor([[dull], [dull]]), model.start(memory), memory)
    assert not calls
    one_dull, _ = model.step(torch.tensor([[dull], [int(source[1, 0])]]), model.start(memory), memory)
    assert len(calls) == model.config.decoder_layers
    assert float((both_dull[0] - one_dull[0]).abs().max()) <= 1e-12


@torch.inference_mode()
def test_the_gate_opens_for_bos_frequent_tokens_and_tokens_of_the_rows_own_source() -> None:
    model = tiny({"hybrid_threshold": 0.5}, base="fat")
    source = torch.tensor([[40, 41, 0, 0], [50, 51, 52, 60]])
    mask = torch.tensor([[True, True, False, False], [True] * 4])
    memory = model.encode(source, mask)
    # BOS, padding, frequent, last frequent, first rare, of its own source, of the other row's source
    tokens = torch.tensor([[1, 0, 5, 31, 32, 41, 50], [1, 0, 5, 31, 32, 60, 40]])
    gate = model._gate(tokens, memory)
    assert gate is not None
    assert gate.squeeze(-1).tolist() == [[1, 0, 1, 1, 0, 1, 0]] * 2


@torch.inference_mode()
def test_a_padded_source_position_opens_no_gate() -> None:
    model = tiny({"pad_id": 60}, base="fat")
    source = torch.tensor([[40, 45], [50, 51]])
    mask = torch.tensor([[True, False], [True, True]])
    gate = model._gate(torch.tensor([[45], [51]]), model.encode(source, mask))
    assert gate is not None
    assert gate.squeeze(-1).tolist() == [[0], [1]]


@torch.inference_mode()
def test_a_closed_gate_zeroes_the_embedding_and_leaves_the_position() -> None:
    model = tiny({}, base="fat").double()
    source, mask, _ = drawn_batch(model.config, [5], 1)
    memory, dull = model.encode(source, mask), dull_token(model, source)
    expected, _ = model.step(torch.tensor([[dull]]), model.start(memory), memory)
    model.target_embedding.weight[dull] = 1e3
    logits = model.decode(torch.tensor([[dull]]), model.start(memory), memory)[0].hidden @ model.output.weight.T
    others = [token for token in range(model.config.vocab_size) if token != dull]
    assert torch.equal(logits[..., others], expected[..., others])
