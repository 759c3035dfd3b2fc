"""What a training learns, keeps and writes."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file

from fatdeploy.errors import ConfigError, TrainingFailed
from fatdeploy.export.reference.checkpoint import CONFIG, WEIGHTS, load_checkpoint
from fatdeploy.export.training.run import CURVE, REPORT, Training
from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.export.training.trainer import Epoch, Step, ValidationScore, set_threshold
from fatdeploy.export.training.validation import Validation
from tests.support.trainings import parts, plan, trained


@pytest.mark.parametrize(
    ("preset", "changes", "n_epochs", "most"),
    [
        ("fat-tiny", {"fc_softmax": "softmax"}, 12, 40),
        ("transformer-tiny", {"target_order": "right_to_left"}, 12, 65),
        # Without attention to the source it learns more slowly.
        ("at-tiny", {}, 20, 70),
        ("rnn-tiny", {"encoder_attention": "gru", "decoder_attention": "gru"}, 12, 25),
        ("transformer-tiny", {"encoder_attention": "routing", "clusters": 3, "encoder_layers": 2}, 12, 65),
        ("transformer-tiny", {"encoder_attention": "sinkhorn", "block_length": 2, "encoder_layers": 2}, 12, 65),
        ("transformer-tiny", {"encoder_attention": "gmlp", "decoder_attention": "aft"}, 12, 65),
        pytest.param(
            *("transformer-tiny", {"encoder_attention": "aft", "decoder_attention": "aft"}, 12, 65),
            marks=pytest.mark.slow,
        ),
        ("transformer-nat-tiny", {}, 12, 30),
        ("transformer-nat-tiny", {"length": "eos"}, 12, 20),
    ],
)
def test_a_tiny_model_learns_to_spell(
    tmp_path: Path, preset: str, changes: dict[str, Any], n_epochs: int, most: int
) -> None:
    training = trained(tmp_path / "one", plan(preset, changes, epochs=n_epochs))
    epochs, best = training.trainer.progress.epochs, training.trainer.progress.best
    assert epochs[0].score.token_error_rate > 80
    assert best is not None
    assert best.token_error_rate < most
    assert epochs[-1].train_loss < epochs[0].train_loss / 2


def test_the_checkpoint_is_that_of_the_best_epoch(tmp_path: Path) -> None:
    # With this rate, the last epochs are worse than an earlier one.
    training = Training(plan(epochs=5, learning_rate=0.05, clip=0.0, warmup=0), parts(), tmp_path, resume=False)
    kept = None
    for event in training.events():
        if isinstance(event, Epoch) and event.best:
            kept = {name: tensor.clone() for name, tensor in training.trainer.model.state_dict().items()}
            score = event.score
    assert kept is not None
    # Otherwise a training that always keeps the last one would pass.
    assert not training.trainer.progress.epochs[-1].best
    model = load_checkpoint(tmp_path)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert (
        training.validation(model)
        == score
        == min(
            (epoch.score for epoch in training.trainer.progress.epochs),
            key=lambda score: (score.token_error_rate, score.loss),
        )
    )


def test_errors_decide_which_epoch_is_kept_and_the_loss_breaks_ties(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epoch_scores = [
        ValidationScore(2.0, 50.0, 90.0),
        ValidationScore(1.5, 40.0, 90.0),
        ValidationScore(1.2, 40.0, 99.0),
        ValidationScore(1.3, 40.0, 80.0),
    ]
    epoch_scores.append(ValidationScore(0.5, 60.0, 70.0))
    scores = iter(epoch_scores)
    monkeypatch.setattr(Validation, "__call__", lambda *_: next(scores))
    training = Training(plan(epochs=5), parts(), tmp_path, resume=False)
    weights_by_epoch = [
        {name: tensor.clone() for name, tensor in training.trainer.model.state_dict().items()}
        for event in training.events()
        if isinstance(event, Epoch)
    ]
    assert [epoch.best for epoch in training.trainer.progress.epochs] == [True, True, True, False, False]
    kept = load_checkpoint(tmp_path).state_dict()
    same = [all(torch.equal(kept[name], tensor) for name, tensor in weights.items()) for weights in weights_by_epoch]
    assert same == [False, False, True, False, False]
    assert training.finish() == epoch_scores[2]


def test_the_same_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    changes = {"dropout": 0.1}
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        trained(tmp_path / name, plan(changes=changes, seed=seed, scheduled_sampling=0.5))
    first, again, other = (load_file(tmp_path / name / WEIGHTS) for name in ("one", "two", "other"))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["encoder.layers.0.ffn.into.weight"], other["encoder.layers.0.ffn.into.weight"])


def test_a_resumed_training_needs_the_same_pairs_and_options(tmp_path: Path) -> None:
    training = Training(plan(), parts(), tmp_path, resume=False)
    next(training.events())
    training.trainer.save()
    training.close()
    with pytest.raises(
        ConfigError, match="is a different one: batch_size was 16, is 8; the pairs differ; give the same"
    ):
        Training(plan(batch_size=8), parts(300), tmp_path, resume=True)
    Training(plan(threads=2), parts(), tmp_path, resume=True)


def test_a_training_reports_every_epoch_and_draws_its_course(tmp_path: Path) -> None:
    training = trained(tmp_path, plan(epochs=3))
    report = json.loads((tmp_path / REPORT).read_text())
    assert [epoch["number"] for epoch in report["epochs"]] == [1, 2, 3]
    assert report["pairs"] == {"train": 288, "validation": 32}
    assert report["parameters"] == sum(parameter.numel() for parameter in training.trainer.model.parameters())
    assert report["final"]["token_error_rate"] == min(epoch["score"]["token_error_rate"] for epoch in report["epochs"])
    picture = ElementTree.fromstring((tmp_path / CURVE).read_text())
    lines = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3, 3]


def test_weights_are_stored_in_half_precision_where_that_is_wanted(tmp_path: Path) -> None:
    training = Training(plan(epochs=1), parts(), tmp_path, resume=False)
    for _ in training.events():
        pass
    whole = load_file(tmp_path / WEIGHTS)
    training.finish(half=True)
    halves = load_file(tmp_path / WEIGHTS)
    assert all(
        torch.equal(halves[name], tensor.half() if tensor.is_floating_point() else tensor)
        for name, tensor in whole.items()
    )
    assert halves["source_embedding.weight"].dtype == torch.float16
    assert torch.equal(load_checkpoint(tmp_path).source_embedding.weight, halves["source_embedding.weight"].float())


def test_steps_are_counted_over_epochs(tmp_path: Path) -> None:
    training = Training(plan(), parts(), tmp_path, resume=False)
    events = list(training.events())
    assert [event.step for event in events if isinstance(event, Step)] == list(range(1, 37))  # 288 pairs of 16, twice
    assert [index for index, event in enumerate(events) if isinstance(event, Epoch)] == [18, 37]


def test_the_lowest_threshold_that_costs_almost_nothing_is_chosen(tmp_path: Path) -> None:
    drawn = plan(changes={"hybrid_threshold": 0.2, "fc_softmax": "softmax"}, draw_threshold=True, epochs=8)
    training = Training(drawn, parts(), tmp_path, resume=False)
    for _ in training.events():
        pass
    tried = {}
    best = training.finish(lambda threshold, score: tried.update({threshold: score}))
    chosen = json.loads((tmp_path / CONFIG).read_text())["hybrid_threshold"]
    assert min(tried) == 0.2
    assert max(tried) == 1.0
    least = min(score.token_error_rate for score in tried.values())
    assert tried[chosen] == best
    assert best.token_error_rate <= least + 0.05
    assert all(score.token_error_rate > least + 0.05 for threshold, score in tried.items() if threshold < chosen)
    model = load_checkpoint(tmp_path)
    assert model.keep.sum() == sum(token < chosen * model.config.vocab_size for token in range(model.config.vocab_size))
    assert training.validation(model) == best
    set_threshold(model, 1.0)
    assert model.keep.all()


def test_a_loss_that_is_not_finite_ends_the_training_with_advice(tmp_path: Path) -> None:
    training = Training(plan(learning_rate=1.0, clip=0.0, warmup=0, epochs=30), parts(), tmp_path, resume=False)
    with torch.no_grad():
        training.trainer.model.source_embedding.weight.fill_(torch.nan)
    with pytest.raises(TrainingFailed, match="the loss at step 1 is nan: lower --learning-rate"):
        next(training.events())


def test_values_that_follow_from_the_tokenizer_cannot_be_set(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vocab_size: follows from the tokenizer; eos_id: follows from the tokenizer"):
        Training(plan(changes={"vocab_size": 9, "eos_id": 3}), parts(), tmp_path, resume=False)
    with pytest.raises(ConfigError, match="--draw-threshold needs a hybrid model, transformer-tiny is not"):
        Training(plan("transformer-tiny", draw_threshold=True), parts(), tmp_path, resume=False)
    with pytest.raises(ConfigError, match="--guided-attention needs an attention to the source, at-tiny has none"):
        Training(plan("at-tiny", guided_attention=1.0), parts(), tmp_path, resume=False)


def test_wrong_settings_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"training refused: epochs: must lie in 1….*learning_rate: must lie in 0…1"):
        TrainSettings(epochs=0, learning_rate=2.0)
    with pytest.raises(ConfigError, match="clip: must lie in 0…, found nan; seed: expected int, found 'x'"):
        TrainSettings(clip=float("nan"), seed="x")  # type: ignore[arg-type]


def test_the_rate_rises_over_the_warm_up_and_falls_to_zero() -> None:
    settings = TrainSettings(learning_rate=1.0, warmup=4)
    assert [settings.rate(step, 12) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    assert settings.rate(4, 12) == 1.0
    assert settings.rate(8, 12) == pytest.approx(0.5)
    assert settings.rate(12, 12) == pytest.approx(0.0)
