"""Self-critical training: the rewards, the loss and its gradient by hand, and a toy task that it improves."""

import random
from pathlib import Path
from typing import Any

import pytest
import sacrebleu
import torch

from fatdeploy.errors import ConfigError
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.training.batches import Batch, IdPair, batch_of
from fatdeploy.export.training.own_words import written
from fatdeploy.export.training.rewards import REWARDS, self_critical, sentence_bleu, token_accuracy
from fatdeploy.export.training.settings import Reward, TrainSettings
from fatdeploy.export.training.start import untrained_model
from tests.support.trainings import parts, plan, trained

PAIRS = [IdPair([15, 16, 17], [18, 19]), IdPair([14], [11]), IdPair([20, 33], [40, 41, 15, 9])]


def model_and_batch(preset: str, **changes: Any) -> tuple[ReferenceModel, Batch]:
    config = config_from_preset(f"{preset}-tiny", max_source=16, max_target=12, **changes)
    return untrained_model(config, seed=3), batch_of(PAIRS, config)


def test_the_bleu_of_a_target_is_sacrebleus_with_one_added() -> None:
    metric = sacrebleu.BLEU(smooth_method="add-k", smooth_value=1, tokenize="none")
    draw = random.Random(0)
    values = set()
    for _ in range(300):
        hypothesis, reference = ([draw.randrange(4) for _ in range(draw.randint(1, 9))] for _ in range(2))
        texts = [" ".join(map(str, ids)) for ids in (hypothesis, reference)]
        expected = metric.sentence_score(texts[0], [texts[1]]).score / 100
        assert sentence_bleu(hypothesis, reference) == pytest.approx(expected, abs=1e-9)
        values.add(round(expected, 3))
    assert len(values) > 100


def test_rewards_of_equal_empty_and_wrong_targets() -> None:
    assert sentence_bleu([5, 6, 7], [5, 6, 7]) == pytest.approx(1)
    assert sentence_bleu([], [5]) == sentence_bleu([8, 9], [5, 6]) == 0
    assert token_accuracy([5, 6, 7], [5, 6, 7]) == 1
    assert token_accuracy([], [5, 6]) == 0
    assert token_accuracy([5, 8], [5, 6, 7, 9]) == 0.25
    assert token_accuracy([1, 1, 1], [5]) == -2


def by_hand(model: ReferenceModel, batch: Batch, kind: Reward, seed: int) -> tuple[torch.Tensor, float]:
    """Return the self-critical loss from its formula, one target after another, and the mean reward of the best."""
    torch.manual_seed(seed)
    greedy, drawn = (written(model, batch, 8, drawn=drawn).tolist() for drawn in (False, True))
    total, count, rewards = torch.zeros(()), 0, []
    for row, pair in enumerate(PAIRS):
        target = list(pair.target)
        if model.config.target_order == "right_to_left":
            target.reverse()
        ours, theirs = ([token for token in rows[row] if token not in (-100, 2)] for rows in (drawn, greedy))
        advantage = REWARDS[kind](ours, target) - REWARDS[kind](theirs, target)
        rewards.append(REWARDS[kind](theirs, target))
        tokens = [token for token in drawn[row] if token != -100]
        n_source = len(pair.source)
        logits = model(
            batch.source[row : row + 1, :n_source],
            batch.source_mask[row : row + 1, :n_source],
            torch.tensor([[1, *tokens[:-1]]]),
        )
        chances = logits[0].softmax(-1)
        for t, token in enumerate(tokens):
            total = total - advantage * chances[t, token].log()
        count += len(tokens)
    return total / count, sum(rewards) / len(rewards)


@pytest.mark.parametrize("kind", REWARDS)
@pytest.mark.parametrize(
    ("preset", "changes"), [("transformer", {}), ("fat", {"target_order": "right_to_left"}), ("rnn", {})]
)
def test_the_loss_and_its_gradient_are_those_of_the_formula(kind: Reward, preset: str, changes: dict[str, str]) -> None:
    model, batch = model_and_batch(preset, **changes)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    largest = 0.0
    for seed in range(4):
        expected, reward = by_hand(model, batch, kind, seed)
        torch.manual_seed(seed)
        result = self_critical(model, batch, kind)
        assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
        assert result.reward == pytest.approx(reward, abs=1e-9)
        gradients, wanted = (
            torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            for loss in (result.loss, expected)
        )
        for gradient, other in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, other, rtol=1e-3, atol=1e-5)
            largest = max(largest, float(gradient.abs().max()))
    assert largest > 0.001


def test_the_mean_gradient_is_that_of_the_expected_reward() -> None:
    # Targets of at most three tokens from a vocabulary of four: all of them can be listed.
    config = config_from_preset("transformer-tiny", vocab_size=4, max_source=4, max_target=3)
    model, reference, n_rows = untrained_model(config, seed=1), [3, 3], 8000
    alone, many = (batch_of([IdPair([3], reference)] * count, config) for count in (1, n_rows))
    others = (0, 1, 3)  # 2 is EOS
    rows = [[2], *([a, 2] for a in others), *([a, b, c] for a in others for b in others for c in range(4))]
    expected, chance_of_all = torch.zeros(()), 0.0
    for row in rows:
        chances = model(alone.source, alone.source_mask, torch.tensor([[1, *row[:-1]]]))[0].softmax(-1)
        chance = torch.stack([chances[t, token] for t, token in enumerate(row)]).prod()
        expected = expected + chance * token_accuracy([token for token in row if token != 2], reference)
        chance_of_all += float(chance.detach())
    assert chance_of_all == pytest.approx(1, abs=1e-5)
    torch.manual_seed(0)
    n_tokens = int((written(model, many, 3, drawn=True) >= 0).sum())
    torch.manual_seed(0)
    loss = self_critical(model, many, "token_error_rate").loss * (n_tokens / n_rows)
    [gradient], [wanted] = (torch.autograd.grad(value, [model.output.weight]) for value in (loss, -expected))
    assert float((gradient - wanted).norm() / wanted.norm()) < 0.1


def test_rewards_alone_improve_what_the_model_writes(tmp_path: Path) -> None:
    # The second half of the training has no other loss.
    settings = {"reward": "token_error_rate", "reward_weight": 1.0, "reward_after": 0.5}
    training = trained(
        tmp_path / "one", plan("transformer-tiny", epochs=12, learning_rate=5e-3, **settings), parts(320)
    )
    rewards = [epoch.reward for epoch in training.trainer.progress.epochs]
    assert rewards[:6] == [None] * 6
    late = [reward for reward in rewards[6:] if reward is not None]
    assert len(late) == 6
    assert late[-1] > late[0] + 0.05


def test_a_weight_of_zero_changes_nothing(tmp_path: Path) -> None:
    settings = TrainSettings(reward="bleu", reward_weight=0.0)
    assert settings.reward_share(99, 100) == 0
    settings = TrainSettings(reward="bleu", reward_weight=0.3, reward_after=0.5)
    assert [settings.reward_share(step, 10) for step in (0, 4, 5, 9)] == [0, 0, 0.3, 0.3]
    assert TrainSettings().reward_share(9, 10) == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reward": "chrf"}, r"reward: expected one of \['none', 'bleu', 'token_error_rate'\], found 'chrf'"),
        ({"reward_weight": 0.1}, "reward_weight: does nothing without reward"),
        ({"reward": "bleu", "reward_after": 2.0}, "reward_after: must lie in 0…1, found 2.0"),
        ({"reward": "bleu", "updates": "token"}, "updates: token needs losses of single positions, reward has none"),
    ],
)
def test_wrong_settings_of_rewards_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**wrong)
