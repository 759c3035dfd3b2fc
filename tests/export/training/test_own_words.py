"""The model's own tokens in training, against the published forms of scheduled sampling written out as loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fatdeploy.errors import ConfigError
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.training.batches import NOTHING, Batch, IdPair, batch_of
from fatdeploy.export.training.own_words import OwnWords, gumbel, written
from fatdeploy.export.training.settings import TrainSettings, inverse_sigmoid_k
from fatdeploy.export.training.start import untrained_model
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.choices import AUTOREGRESSIVE

PAIRS = [IdPair([15, 16, 17], [18, 19]), IdPair([14], [11]), IdPair([20, 33], [40, 41, 15, 9])]
FORMS = {"two-pass": OwnWords(1), "parallel": OwnWords(3), "sequential": OwnWords(None)}
# Caches, sums of constant size, cells with and without an attention to the source.
PRESETS = ["transformer", "fat", "at-linear", "rnn", "at"]


def model_and_batch(preset: str, **changes: Any) -> tuple[ReferenceModel, Batch]:
    config = config_from_preset(f"{preset}-tiny", max_source=16, max_target=12, **changes)
    return untrained_model(config, seed=3), batch_of(PAIRS, config)


def best_after(model: ReferenceModel, batch: Batch, row: int, read: list[int]) -> int:
    """Return the best token of one row alone after the tokens read."""
    source, mask = batch.source[row : row + 1], batch.source_mask[row : row + 1]
    with torch.no_grad():
        return int(model(source, mask, torch.tensor([read]))[0, -1].argmax())


def in_passes(model: ReferenceModel, batch: Batch, n_passes: int) -> list[list[int]]:
    """Return what is read after some passes that replace every true token."""
    rows = batch.target_in.tolist()
    for _ in range(n_passes):
        rows = [
            [row[0], *(best_after(model, batch, b, row[:t]) if true else 0 for t, true in enumerate(row) if t > 0)]
            for b, row in enumerate(rows)
        ]
    return rows


def one_after_another(model: ReferenceModel, batch: Batch) -> list[list[int]]:
    """Return what is read if each own token follows the own ones before it."""
    rows = []
    for b, row in enumerate(batch.target_in.tolist()):
        read = row[:1]
        for true in row[1:]:
            read.append(best_after(model, batch, b, read) if true else 0)
        rows.append(read)
    return rows


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("drawn", [False, True])
def test_without_a_share_the_model_reads_the_true_tokens(form: str, drawn: bool) -> None:
    model, batch = model_and_batch("transformer")
    words = OwnWords(FORMS[form].n_passes, drawn)
    assert torch.equal(words.mixed(model, batch, 0.0).target_in, batch.target_in)


@pytest.mark.parametrize("preset", PRESETS)
def test_with_a_share_of_one_it_reads_its_own_tokens_after_its_own_tokens(preset: str) -> None:
    model, batch = model_and_batch(preset)
    own = OwnWords(None).mixed(model, batch, 1.0)
    assert own.target_in.tolist() == one_after_another(model, batch)
    assert own.target_in[:, 0].tolist() == [1, 1, 1]
    assert torch.equal(own.target_in == 0, batch.target_in == 0)
    assert not torch.equal(own.target_in, batch.target_in)
    assert torch.equal(own.target_out, batch.target_out)


@pytest.mark.parametrize("preset", ["transformer", "fat", "rnn"])
@pytest.mark.parametrize("n_passes", [1, 2])
def test_each_pass_reads_what_the_pass_before_it_chose(preset: str, n_passes: int) -> None:
    model, batch = model_and_batch(preset)
    assert OwnWords(n_passes).mixed(model, batch, 1.0).target_in.tolist() == in_passes(model, batch, n_passes)


@pytest.mark.parametrize("preset", AUTOREGRESSIVE)
@pytest.mark.parametrize("drawn", [False, True])
def test_as_many_passes_as_tokens_are_the_sequential_form(preset: str, drawn: bool) -> None:
    model, _ = model_and_batch(preset)
    pairs = [IdPair([15, 16, 17], [30, 31, 32, 33, 34, 35]), IdPair([9], [40, 41])] * 8
    batch = batch_of(pairs, model.config)
    read = {}
    for n_passes in (3, 6, None):
        torch.manual_seed(5)
        read[n_passes] = OwnWords(n_passes, drawn).mixed(model, batch, 0.7).target_in
    assert torch.equal(read[6], read[None])
    # BOS and the first three tokens.
    assert torch.equal(read[3][:, :4], read[None][:, :4])


def test_a_single_pass_is_not() -> None:
    model, batch = model_and_batch("transformer")
    read = {n_passes: OwnWords(n_passes).mixed(model, batch, 1.0).target_in for n_passes in (1, 4, None)}
    assert [torch.equal(read[n_passes], read[None]) for n_passes in (1, 4)] == [False, True]


def test_a_share_of_one_half_replaces_about_half_of_the_words() -> None:
    model, _ = model_and_batch("transformer")
    batch = batch_of([IdPair([15, 16], [30, 31, 32, 33, 34, 35, 36, 37])] * 64, model.config)
    torch.manual_seed(0)
    half, every = (OwnWords(1).mixed(model, batch, share).target_in for share in (0.5, 1.0))
    own, true = (half == every)[:, 1:], (half == batch.target_in)[:, 1:]
    assert (own | true).all()
    assert 0.4 < float(own.float().mean()) < 0.6


def test_noise_makes_the_best_token_a_draw_from_the_softmax() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -3.0])
    torch.manual_seed(0)
    drawn = (logits + gumbel(torch.zeros(40_000, dtype=torch.int64), 4)).argmax(-1)
    shares = drawn.bincount(minlength=4) / len(drawn)
    assert shares.tolist() == pytest.approx(logits.softmax(-1).tolist(), abs=0.01)


def test_own_words_are_chosen_without_dropout_and_the_model_learns_on() -> None:
    model, batch = model_and_batch("transformer", dropout=0.5)
    model.train()
    for words in FORMS.values():
        expected = words.mixed(model.eval(), batch, 1.0).target_in
        assert torch.equal(words.mixed(model.train(), batch, 1.0).target_in, expected)
        assert model.training


@pytest.mark.parametrize("preset", PRESETS)
def test_the_best_tokens_written_are_those_that_a_device_decodes(preset: str) -> None:
    model, batch = model_and_batch(preset)
    expected = decode(EagerEngine(model), [pair.source for pair in PAIRS], DecodeOptions(max_new_tokens=9))
    rows = written(model, batch, 9, drawn=False)
    tokens = [tuple(token for token in row if token not in (NOTHING, 2)) for row in rows.tolist()]
    assert tokens == [hypothesis.tokens for hypothesis in expected]


def test_nothing_is_written_after_the_end() -> None:
    model, _ = model_and_batch("transformer")
    torch.manual_seed(1)
    rows = written(model, batch_of(PAIRS * 40, model.config), 12, drawn=True).tolist()
    ended = [row for row in rows if 2 in row]
    assert ended
    assert all(set(row[row.index(2) + 1 :]) <= {NOTHING} for row in ended)
    assert all(NOTHING not in row for row in rows if 2 not in row)


def shares(ramp: str, n_steps: int = 1000) -> Tensor:
    settings = TrainSettings(scheduled_sampling=0.8, ramp=ramp)  # type: ignore[arg-type]
    return torch.tensor([settings.own_share(step, n_steps) for step in range(n_steps + 1)], dtype=torch.float64)


def test_the_ramps_are_the_published_ones() -> None:
    steps = torch.arange(1001, dtype=torch.float64)
    # ε_i = max(ε, k − c·i), k^i and k / (k + exp(i / k)); the share of own tokens is what they leave.
    k = inverse_sigmoid_k(1000)
    expected = {
        "linear": 0.8 * (1 - (1 - steps / 1000)),
        "exponential": 0.8 * (1 - (0.01 ** (1 / 1000)) ** steps),
        "inverse-sigmoid": 0.8 * (1 - k / (k + torch.exp(steps / k))),
    }
    for ramp, values in expected.items():
        result = shares(ramp)
        torch.testing.assert_close(result, values, rtol=1e-9, atol=1e-12)
        assert (result.diff() > 0).all()
    assert k * math.log(k) == pytest.approx(500)
    assert shares("inverse-sigmoid")[500] == pytest.approx(0.4, rel=1e-6)
    assert shares("exponential")[1000] == pytest.approx(0.8 * 0.99)
    assert shares("linear")[600] == pytest.approx(0.48)


@pytest.mark.parametrize("n_steps", [1, 2, 5, 1_000_000])
def test_the_inverse_sigmoid_exists_for_any_length_of_training(n_steps: int) -> None:
    settings = TrainSettings(scheduled_sampling=1.0, ramp="inverse-sigmoid")
    assert 0 <= settings.own_share(0, n_steps) <= 0.5 <= settings.own_share(n_steps, n_steps) <= 1
    assert settings.own_share(n_steps, n_steps) + settings.own_share(0, n_steps) == pytest.approx(1, abs=1e-6)


def test_free_running_reads_no_true_token_from_the_start() -> None:
    settings = TrainSettings(free_running=True)
    assert [settings.own_share(step, 10) for step in (0, 9)] == [1.0, 1.0]
    assert OwnWords.of(settings) == OwnWords(None)


def test_the_settings_name_the_forms() -> None:
    forms = {"two-pass": 1, "parallel": 2, "sequential": None}
    for form, n_passes in forms.items():
        settings = TrainSettings(scheduled_sampling=0.5, sampling_form=form, own_choice="drawn")  # type: ignore[arg-type]
        assert OwnWords.of(settings) == OwnWords(n_passes, drawn=True)
    settings = TrainSettings(scheduled_sampling=0.5, sampling_form="parallel", sampling_passes=5)
    assert OwnWords.of(settings) == OwnWords(5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ramp": "square"}, r"ramp: expected one of \['linear', 'exponential', 'inverse-sigmoid'\], found 'square'"),
        ({"ramp": "exponential"}, "ramp: does nothing without scheduled_sampling"),
        (
            {"sampling_form": "sequential", "sampling_passes": 3},
            "sampling_form: does nothing without scheduled_sampling; sampling_passes: does nothing with ",
        ),
        ({"scheduled_sampling": 0.5, "sampling_passes": 3}, "with sampling_form = two-pass, use parallel"),
        ({"sampling_passes": 0}, "sampling_passes: must lie in 1…, found 0"),
        ({"own_choice": "drawn"}, "own_choice: does nothing without scheduled_sampling or free_running"),
        ({"free_running": True, "scheduled_sampling": 0.1}, "free_running: reads no true tokens, so there is no share"),
    ],
)
def test_settings_that_do_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSettings(**wrong)
