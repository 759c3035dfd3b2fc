"""The training losses, checked by hand; and every weight of every model can learn."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fatdeploy.export.reference.attention import PositiveNorms, slow_scores
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.model import Decoded, ReferenceModel
from fatdeploy.export.reference.presets import PRESETS, config_from_preset
from fatdeploy.export.training.batches import Batch, IdPair, batch_of
from fatdeploy.export.training.losses import Objective, far_attention
from fatdeploy.export.training.start import untrained_model
from tests.support.choices import CHOICES, PLAIN, name_of

PAIRS = [IdPair([15, 16, 17], [18, 19]), IdPair([14], [11]), IdPair([20, 33], [40, 41, 15, 9])]
SIZES = {"max_source": 16, "max_target": 12}


def model_and_batch(preset: str, **changes: Any) -> tuple[ReferenceModel, Batch]:
    config = config_from_preset(f"{preset}-tiny", **{**SIZES, **changes})
    return untrained_model(config, seed=3), batch_of(PAIRS, config)


def log_probabilities(model: ReferenceModel, batch: Batch, read: Tensor) -> list[Tensor]:
    """Return the log-probabilities at every learned token, [V] each."""
    logits = model(batch.source, batch.source_mask, read).detach()
    return [row for row, learned in zip(logits.flatten(0, 1), batch.learned.flatten(), strict=True) if learned]


@pytest.mark.parametrize("preset", ["transformer", "fat", "transformer-nat"])
def test_the_token_loss_is_the_mean_over_tokens_and_smoothing_does_not_enter_it(preset: str) -> None:
    model, batch = model_and_batch(preset)
    plain, smooth = (Objective(smoothing).losses(model, batch) for smoothing in (0.0, 0.2))
    rows = [row.log_softmax(-1) for row in log_probabilities(model, batch, batch.target_in)]
    targets = batch.target_out[batch.learned].tolist()
    assert len(rows) == len(targets) == batch.n_tokens
    tokens = -sum(float(row[token]) for row, token in zip(rows, targets, strict=True)) / len(targets)
    everywhere = -sum(float(row.mean()) for row in rows) / len(targets)
    assert float(plain.tokens) == pytest.approx(tokens, rel=1e-5)
    assert torch.equal(plain.tokens, smooth.tokens)
    assert float((smooth.total - plain.total).detach()) == pytest.approx(0.2 * (everywhere - tokens), abs=1e-5)
    assert not plain.tokens.requires_grad


def test_a_length_head_learns_the_lengths_with_a_tenth_of_the_weight() -> None:
    model, batch = model_and_batch("transformer-nat")
    losses = Objective().losses(model, batch)
    logits = model.encode(batch.source, batch.source_mask).length_logits
    assert logits is not None
    chances = logits.detach().log_softmax(-1)
    by_hand = -float(chances[0, 1] + chances[1, 0] + chances[2, 3]) / 3
    assert float((losses.total - losses.tokens).detach()) == pytest.approx(0.1 * by_hand, rel=1e-4)


@pytest.mark.parametrize(("preset", "changes"), [("transformer", {}), ("transformer-nat", {"length": "eos"})])
def test_without_a_length_head_there_is_no_length_loss(preset: str, changes: dict[str, str]) -> None:
    model, batch = model_and_batch(preset, **changes)
    losses = Objective().losses(model, batch)
    assert torch.equal(losses.total.detach(), losses.tokens)


def test_attention_far_from_the_diagonal_costs_the_value_computed_by_hand() -> None:
    config = config_from_preset("transformer-tiny")
    batch = batch_of([IdPair([15, 16, 17], [18]), IdPair([14], [11, 12])], config)  # 2 and 3 tokens with EOS
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 2, 3, 3, generator=draw)  # [B, H, T, S], also negative as those of tanh
    total = 0.0
    # Positions scaled to 0 to 1; padding has none.
    for row, (targets, sources) in enumerate([([0, 1], [0, 0.5, 1]), ([0, 0.5, 1], [0])]):
        for head in range(2):
            for t, at_target in enumerate(targets):
                for s, at_source in enumerate(sources):
                    cost = 1 - math.exp(-((at_target - at_source) ** 2) / (2 * 0.2**2))
                    total += abs(float(weights[row, head, t, s])) * cost
    result = far_attention(Decoded(torch.zeros(0), {0: weights}, None), 0, batch)
    assert float(result) == pytest.approx(total / (5 * 2), rel=1e-5)


def test_attention_on_the_diagonal_costs_nothing_and_across_it_almost_all() -> None:
    batch = batch_of([IdPair([14, 15, 16], [11, 12])], config_from_preset("transformer-tiny"))
    straight = torch.eye(3)[None, None]
    for weights, cost in [(straight, 0.0), (straight.flip(-1), 2 / 3)]:
        result = far_attention(Decoded(torch.zeros(0), {1: weights}, None), 1, batch)
        assert float(result) == pytest.approx(cost, abs=1e-4)


def test_a_target_from_right_to_left_has_the_other_diagonal() -> None:
    # Targets of three and of two tokens with EOS: the second row is padded on both sides.
    config = config_from_preset("transformer-tiny", target_order="right_to_left")
    batch = batch_of([IdPair([14, 15, 16], [11, 12]), IdPair([14, 15], [11])], config)
    other = torch.zeros(2, 1, 3, 3)
    other[0, 0] = torch.eye(3).flip(-1)
    other[1, 0, :2, :2] = torch.eye(2).flip(-1)
    for weights, cost in [(other, 0.0), (torch.eye(3).expand(2, 1, 3, 3), 4 / 5)]:
        result = far_attention(Decoded(torch.zeros(0), {0: weights}, None), 0, batch, backwards=True)
        assert float(result) == pytest.approx(cost, abs=1e-4)


@pytest.mark.parametrize("order", ["left_to_right", "right_to_left"])
def test_guided_attention_teaches_the_diagonal_of_the_targets_order(order: str) -> None:
    model, batch = model_and_batch("transformer", target_order=order)
    plain, guided = (Objective(0.0, weight).losses(model, batch) for weight in (0.0, 0.5))
    memory = model.encode(batch.source, batch.source_mask)
    decoded, _ = model.decode(batch.target_in, model.stateless(), memory, weights_of=1)
    costs = {
        name: float(far_attention(decoded, 1, batch, backwards=name == "right_to_left").detach())
        for name in ("left_to_right", "right_to_left")
    }
    assert len({round(cost, 3) for cost in costs.values()}) == 2
    assert float((guided.total - plain.total).detach()) == pytest.approx(0.5 * costs[order], rel=1e-4)


@pytest.mark.parametrize("preset", ["transformer", "rnn", "fat", "transformer-nat"])
def test_guided_attention_adds_the_cost_of_the_last_layer(preset: str) -> None:
    model, batch = model_and_batch(preset)
    plain, guided = (Objective(0.0, weight).losses(model, batch) for weight in (0.0, 0.5))
    memory = model.encode(batch.source, batch.source_mask)
    decoded, _ = model.decode(batch.target_in, model.stateless(), memory, weights_of=1)
    assert model.config.decoder_layers == 2
    cost = float(far_attention(decoded, 1, batch).detach())
    assert cost > 0.05
    assert float((guided.total - plain.total).detach()) == pytest.approx(0.5 * cost, rel=1e-3)
    assert float(guided.tokens) == pytest.approx(float(plain.tokens), rel=1e-6)


CASES = [
    *(("fast", {**PLAIN, **changes}) for changes in CHOICES),
    *((preset, {}) for preset in PRESETS),
    ("transformer-nat", {"length": "eos"}),
]


def without_gradient(config: ModelConfig) -> tuple[str, ...]:
    """Return name endings of weights without a gradient: a softmax ignores a term added to all its scores."""
    names = ()
    if config.cross_attention == "fast_fc" and config.fc_softmax == "softmax":
        names += ("head_bias",)
    if config.encoder_attention == "compressed":
        names += ("compress_keys.bias",)
    return names


def undecided(config: ModelConfig) -> tuple[str, ...]:
    """Return name endings of weights that short sources give no choice: one block, or a cluster per position."""
    names = {"routing": ("centroids",), "sinkhorn": ("sort.weight", "sort.bias", "attention.into.weight", "into.bias")}
    return names.get(str(config.encoder_attention), ())


@pytest.mark.parametrize(("preset", "changes"), CASES, ids=name_of)
def test_every_parameter_of_an_untrained_model_learns(preset: str, changes: dict[str, Any]) -> None:
    config = config_from_preset(f"{preset}-tiny", **{**SIZES, **changes})
    model = untrained_model(config).train()  # decisions have a gradient in training alone
    # The first step moves the weights that start at zero.
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for batch in (batch_of(PAIRS, config), batch_of([IdPair([9, 50, 51, 52], [53, 54, 55]), *PAIRS[1:]], config)):
        optimiser.step()
        optimiser.zero_grad()
        Objective(0.1, 0.1).losses(model, batch).total.backward()  # type: ignore[no-untyped-call]
    largest = {name: _largest(parameter.grad) for name, parameter in model.named_parameters()}
    assert all(math.isfinite(size) for size in largest.values())
    still = [name for name, size in largest.items() if size < 1e-6 and not name.endswith(undecided(config))]
    assert still == [name for name in largest if name.endswith(without_gradient(config))]


def _largest(gradient: Tensor | None) -> float:
    assert gradient is not None
    return float(gradient.abs().max())


@pytest.mark.parametrize("preset", PRESETS)
def test_an_untrained_model_guesses(preset: str) -> None:
    model, batch = model_and_batch(preset)
    assert float(Objective().losses(model, batch).tokens) == pytest.approx(math.log(64), abs=0.35)


def test_the_seed_of_an_untrained_model_decides_its_weights_and_leaves_other_draws_alone() -> None:
    config = config_from_preset("fat-tiny", **SIZES)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    first, same, other = (untrained_model(config, seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["source_embedding.weight"], other["source_embedding.weight"])


def drawn_pairs(seed: int = 0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = (2, 3, 4, 5), (2, 3, 6, 5)
    queries, keys = (torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return queries.requires_grad_(), keys.requires_grad_()


def test_the_norms_of_slow_attention_have_the_gradient_of_their_formula() -> None:
    queries, keys = drawn_pairs()
    assert torch.autograd.gradcheck(PositiveNorms.apply, (queries, keys))
    weights = torch.randn(2, 3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = ((queries.unsqueeze(-2) + keys.unsqueeze(-3)).relu().square().sum(-1) + 1e-6).sqrt()
    expected = torch.autograd.grad((plain * weights).sum(), (queries, keys))
    norms = PositiveNorms.apply(queries, keys)  # type: ignore[no-untyped-call]
    result = torch.autograd.grad((norms * weights).sum(), (queries, keys))
    torch.testing.assert_close(norms, plain, rtol=1e-12, atol=0)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_slow_scores_are_the_same_with_and_without_gradients(dtype: torch.dtype, tolerance: float) -> None:
    queries, keys = (tensor.detach().to(dtype).requires_grad_() for tensor in drawn_pairs())
    learning = slow_scores(queries, keys)
    with torch.no_grad():
        running = slow_scores(queries, keys)
    assert learning.requires_grad
    torch.testing.assert_close(learning.detach(), running, rtol=tolerance, atol=0)
    # A frozen side needs no gradient, and the gradient of the other side is the same.
    both = torch.autograd.grad(learning.sum(), (queries, keys))
    alone = torch.autograd.grad(slow_scores(queries.detach(), keys).sum(), keys)
    assert torch.equal(alone[0], both[1])


def test_a_pair_without_any_positive_feature_has_a_finite_score_and_no_gradient() -> None:
    queries = torch.full((1, 1, 1, 4), -1.0, requires_grad=True)
    keys = torch.full((1, 1, 2, 4), -1.0, requires_grad=True)
    scores = slow_scores(queries, keys)
    assert scores.detach().flatten().tolist() == pytest.approx([math.sqrt(1e-6) / 2] * 2)
    scores.sum().backward()  # type: ignore[no-untyped-call]
    assert queries.grad is not None
    assert not queries.grad.any()
