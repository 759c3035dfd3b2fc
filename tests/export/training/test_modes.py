"""Ways to train, at the level of a whole training: what a step does, which epoch is kept, and resuming any of them."""

import math
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch.nn import functional

from fatdeploy.errors import BackendUnavailable, ConfigError
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, WEIGHTS
from fatdeploy.export.training import run
from fatdeploy.export.training.batches import Batch, batch_of, epoch_order
from fatdeploy.export.training.data import ids_of_parts
from fatdeploy.export.training.resume import STATE
from fatdeploy.export.training.run import Training
from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.export.training.start import untrained_model
from fatdeploy.export.training.trainer import Step, ValidationScore
from tests.support.trainings import parts, plan, trained

SAMPLING = {"scheduled_sampling": 0.6}
MODES: dict[str, dict[str, Any]] = {
    "two-pass drawn": {**SAMPLING, "own_choice": "drawn"},
    "parallel": {**SAMPLING, "sampling_form": "parallel", "sampling_passes": 3, "ramp": "exponential"},
    "sequential": {**SAMPLING, "sampling_form": "sequential", "own_choice": "drawn", "ramp": "inverse-sigmoid"},
    "free running": {"free_running": True},
    "reward": {"reward": "bleu", "reward_after": 0.2},
    "rewards of tokens, own words": {**SAMPLING, "reward": "token_error_rate", "reward_after": 0.2},
    "updates per token": {"updates": "token", "clip": 0.0},
    "step, by BLEU": {"schedule": "step", "gamma": 0.5, "select_by": "bleu"},
}
FEW = 80  # pairs, which are five steps of 16 each epoch
DROPOUT = {"dropout": 0.1}


def begun(folder: Path, settings: dict[str, Any], n_events: int) -> None:
    """Leave a training that was stopped after this many events."""
    training = Training(plan("transformer-tiny", DROPOUT, **settings), parts(FEW), folder, resume=False)
    for _ in islice(training.events(), n_events):
        pass
    training.trainer.save()
    training.close()


@pytest.mark.parametrize("mode", MODES)
def test_every_way_of_training_resumes_byte_for_byte(tmp_path: Path, mode: str) -> None:
    settings = MODES[mode]
    whole = trained(tmp_path / "whole", plan("transformer-tiny", DROPOUT, **settings), parts(FEW))
    begun(tmp_path / "resumed", settings, 8)  # five steps, an epoch, two steps
    torch.manual_seed(99)
    resumed = Training(plan("transformer-tiny", DROPOUT, **settings), parts(FEW), tmp_path / "resumed", resume=True)
    assert len(list(resumed.events())) == 4
    resumed.finish()
    for name in (WEIGHTS, CONFIG, TOKENIZER):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()
    scores, expected = ([epoch.score for epoch in one.trainer.progress.epochs] for one in (resumed, whole))
    assert scores == expected
    rewards, expected_rewards = ([epoch.reward for epoch in one.trainer.progress.epochs] for one in (resumed, whole))
    assert rewards == expected_rewards
    assert (rewards[0] is not None) == ("reward" in settings)


def losses_of(folder: Path, n_steps: int = 2, **settings: Any) -> list[float]:
    """Return the token losses of the first steps."""
    training = Training(plan("transformer-tiny", **settings), parts(FEW), folder, resume=False)
    steps = [event for event in islice(training.events(), n_steps) if isinstance(event, Step)]
    training.close()
    return [step.loss for step in steps]


@pytest.mark.parametrize("form", ["two-pass", "parallel", "sequential"])
def test_a_step_with_a_share_of_zero_is_teacher_forcing_and_the_next_is_not(tmp_path: Path, form: str) -> None:
    # Ramps begin at zero.
    forced = losses_of(tmp_path / "forced", 3)
    sampled = losses_of(tmp_path / "sampled", 3, scheduled_sampling=1.0, sampling_form=form, ramp="exponential")
    assert sampled[:1] == forced[:1]
    assert sampled[1:] != forced[1:]


def first_batch(training: Training, seed: int = 0) -> Batch:
    """Return what the first step of a training learns from."""
    ids, _ = ids_of_parts(parts(FEW), training.coder, training.config)
    return batch_of([ids[index] for index in epoch_order(ids, 16, seed, 0)[0]], training.config)


def test_free_running_learns_the_true_tokens_after_its_own(tmp_path: Path) -> None:
    training = Training(plan("transformer-tiny", free_running=True), parts(FEW), tmp_path, resume=False)
    batch, model = first_batch(training), untrained_model(training.config, 0)
    total, count = 0.0, 0
    with torch.no_grad():
        for row in range(len(batch.source)):
            source, mask = batch.source[row : row + 1], batch.source_mask[row : row + 1]
            read = [training.config.bos_id]
            for token in batch.target_out[row][batch.learned[row]].tolist():
                logits = model(source, mask, torch.tensor([read]))[0, -1]
                total, count = total - float(logits.log_softmax(-1)[token]), count + 1
                read.append(int(logits.argmax()))
    step = next(training.events())
    assert isinstance(step, Step)
    assert step.loss == pytest.approx(total / count, rel=1e-5)
    assert losses_of(tmp_path / "forced")[0] != pytest.approx(step.loss, rel=1e-5)


def test_updates_per_token_change_the_weights_after_every_position(tmp_path: Path) -> None:
    settings = {"updates": "token", "clip": 0.5, "warmup": 0, "label_smoothing": 0.1, "learning_rate": 1e-3}
    training = Training(plan("transformer-tiny", **settings), parts(FEW), tmp_path, resume=False)
    # In double precision: AdamW makes whole steps of rounding errors where a gradient is zero, as for biases of keys.
    training.trainer.model.double()
    batch, model = first_batch(training), untrained_model(training.config, 0).double().train()
    optimiser = torch.optim.AdamW(
        [
            {"params": [parameter for parameter in model.parameters() if parameter.ndim > 1], "weight_decay": 0.01},
            {"params": [parameter for parameter in model.parameters() if parameter.ndim <= 1], "weight_decay": 0.0},
        ],
        lr=1e-3,
        betas=(0.9, 0.98),
    )
    n_positions = batch.target_out.shape[1]
    assert n_positions == 5
    for t in range(n_positions):
        # The whole target is read, so that nothing depends on how a position is cut out.
        logits = model(batch.source, batch.source_mask, batch.target_in)[:, t]
        targets = batch.target_out[:, t]
        optimiser.zero_grad()
        functional.cross_entropy(logits, targets, label_smoothing=0.1).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimiser.step()
    next(training.events())
    for name, parameter in training.trainer.model.named_parameters():
        torch.testing.assert_close(parameter, dict(model.named_parameters())[name], rtol=1e-6, atol=1e-9)
    training.trainer.save()
    with safe_open(tmp_path / STATE, framework="pt") as file:
        assert float(file.get_tensor("step.source_embedding.weight")) == n_positions
    assert training.trainer.progress.step == 1
    assert training.trainer.progress.n_tokens == batch.n_tokens


def test_a_batch_of_positions_learns_every_token_once() -> None:
    training_batch = batch_of_two()
    parts_of_it = list(training_batch.positions())
    assert [part.n_tokens for part in parts_of_it] == [2, 2, 1]
    assert [part.target_in.shape[1] for part in parts_of_it] == [1, 2, 3]
    assert [part.target_out[:, -1].tolist() for part in parts_of_it] == [[9, 7], [8, 2], [2, -100]]
    assert all((part.target_out[:, :-1] < 0).all() for part in parts_of_it)


def batch_of_two() -> Batch:
    rows = {"target_in": [[1, 9, 8], [1, 7, 0]], "target_out": [[9, 8, 2], [7, 2, -100]]}
    source = torch.tensor([[5, 6], [7, 0]])
    return Batch(
        source, source > 0, **{name: torch.tensor(ids) for name, ids in rows.items()}, lengths=torch.tensor([2, 1])
    )


def test_the_rate_falls_by_gamma_after_every_epoch() -> None:
    settings = TrainSettings(epochs=4, learning_rate=1.0, warmup=2, schedule="step", gamma=0.9)
    # Three steps each epoch.
    expected = [0.5, 1, 1, *[0.9] * 3, *[0.81] * 3, *[0.729] * 3]
    assert [settings.rate(step, 12) for step in range(12)] == pytest.approx(expected)
    assert TrainSettings(epochs=3, learning_rate=1.0, warmup=0, schedule="step").rate(99, 100) == pytest.approx(0.81)
    with pytest.raises(ConfigError, match="gamma: does nothing with schedule = cosine, use step"):
        TrainSettings(gamma=0.5)


SCORES = [
    ValidationScore(2.0, 50.0, 80.0, bleu=20.0, chrf=50.0),
    ValidationScore(1.5, 60.0, 70.0, bleu=30.0, chrf=50.0),
    ValidationScore(1.8, 40.0, 90.0, bleu=30.0, chrf=40.0),
]


@pytest.mark.parametrize(
    ("select_by", "kept"),
    [
        ("token_error_rate", [True, False, True]),
        ("sequence_error_rate", [True, True, False]),
        ("loss", [True, True, False]),
        # The third has as much BLEU as the second and a greater loss.
        ("bleu", [True, True, False]),
        # The second has as much chrF as the first and a smaller loss.
        ("chrf", [True, True, False]),
    ],
)
def test_the_chosen_metric_chooses_the_epoch_that_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, select_by: str, kept: list[bool]
) -> None:
    scores = iter(SCORES)
    monkeypatch.setattr("fatdeploy.export.training.validation.Validation.__call__", lambda *_: next(scores))
    training = Training(plan(epochs=3, select_by=select_by), parts(FEW), tmp_path, resume=False)
    for _ in training.events():
        pass
    assert [epoch.best for epoch in training.trainer.progress.epochs] == kept
    assert training.finish() == SCORES[max(index for index in range(3) if kept[index])]


def test_bleu_and_chrf_are_those_of_the_decoded_validation_pairs(tmp_path: Path) -> None:
    import sacrebleu

    scores = {}
    for name in ("bleu", "chrf"):
        training = trained(tmp_path / name, plan("transformer-tiny", epochs=4, select_by=name), parts())
        scores[name] = training.trainer.progress.epochs[-1].score
        references: dict[str, list[str]] = {}
        for pair in parts().validation.pairs:
            references.setdefault(pair.source, []).append(pair.target)
        assert all(len(targets) == 1 for targets in references.values())
        sources = sorted(references, key=len)
        validation = training.validation
        texts = validation._decoded(
            training.trainer.model.eval(), [tuple(training.coder.source_ids(s)) for s in sources]
        )
        metric = {"bleu": sacrebleu.BLEU, "chrf": sacrebleu.CHRF}[name]()
        expected = metric.corpus_score(texts, [[references[source][0] for source in sources]]).score
        assert getattr(scores[name], name) == pytest.approx(expected)
        assert expected > 0
    assert scores["bleu"].chrf is None
    assert scores["chrf"].bleu is None


def test_a_parallel_model_is_refused_every_way_that_needs_an_order_of_tokens(tmp_path: Path) -> None:
    for settings, name in [
        ({"scheduled_sampling": 0.5}, "--scheduled-sampling"),
        ({"free_running": True}, "--free-running"),
        ({"reward": "bleu"}, "--reward"),
        ({"updates": "token"}, "--updates token"),
    ]:
        message = f"training refused: {name} needs an autoregressive model, transformer-nat-tiny is not"
        with pytest.raises(ConfigError, match=message):
            Training(plan("transformer-nat-tiny", **settings), parts(FEW), tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()


def test_guided_attention_needs_whole_targets() -> None:
    message = "updates: token needs losses of single positions, guided_attention has none: use batch"
    with pytest.raises(ConfigError, match=message):
        TrainSettings(updates="token", guided_attention=1.0)


@pytest.mark.parametrize(("build", "reason"), [(None, "is built without CUDA"), ("12.8", "finds no CUDA device")])
def test_a_device_that_is_not_there_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: str | None, reason: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", build)
    with pytest.raises(BackendUnavailable, match=rf"--device cuda is not available: torch \S+ here {reason}; install"):
        Training(plan(device="cuda"), parts(FEW), tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()


def test_selecting_by_bleu_needs_sacrebleu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise BackendUnavailable("no module")

    monkeypatch.setattr(run, "need_sacrebleu", missing)
    with pytest.raises(BackendUnavailable, match=r"--select-by bleu needs sacrebleu: pip install 'fatdeploy\[eval\]'"):
        Training(plan(select_by="bleu"), parts(FEW), tmp_path / "new", resume=False)
    trained(tmp_path / "other", plan(epochs=1), parts(FEW))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_training_on_a_gpu_learns_and_resumes(tmp_path: Path) -> None:
    settings = {"device": "cuda", "epochs": 4, **MODES["sequential"], "reward": "bleu"}
    begun(tmp_path, settings, 8)
    resumed = Training(plan("transformer-tiny", DROPOUT, **settings), parts(FEW), tmp_path, resume=True)
    assert all(parameter.is_cuda for parameter in resumed.trainer.model.parameters())
    for _ in resumed.events():
        pass
    epochs = resumed.trainer.progress.epochs
    assert epochs[-1].train_loss < epochs[0].train_loss
    assert all(math.isfinite(epoch.score.loss) for epoch in epochs)
