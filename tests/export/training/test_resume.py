"""The files of a training, whenever it ends: states to resume from, complete files, one writer."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fatdeploy.errors import CheckpointError, ConfigError, TrainingFailed
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, WEIGHTS
from fatdeploy.export.training.curve import COLOURS, HEIGHT, MARGIN, WIDTH, curve_svg
from fatdeploy.export.training.folder import NEW, FolderLock, replaced_file
from fatdeploy.export.training.resume import STATE
from fatdeploy.export.training.run import CURVE, REPORT, Training
from fatdeploy.export.training.trainer import Epoch, ValidationScore
from tests.support.trainings import parts, plan, trained

ONE = plan(changes={"dropout": 0.1}, scheduled_sampling=0.5, draw_threshold=True, save_seconds=1e9)
SVG = "{http://www.w3.org/2000/svg}"


def begun(folder: Path, n_events: int = 0, *, saved: bool = False) -> Training:
    """Return a training that was stopped after this many events and has released its folder."""
    training = Training(ONE, parts(), folder, resume=False)
    for _ in islice(training.events(), n_events):
        pass
    if saved:
        training.trainer.save()
    training.close()
    return training


def resumed(folder: Path) -> Training:
    """Return a training that was resumed to its end, with another random state of the process."""
    torch.manual_seed(99)
    training = Training(ONE, parts(), folder, resume=True)
    for _ in training.events():
        pass
    training.finish()
    return training


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training that nothing stopped."""
    return trained(tmp_path_factory.mktemp("training") / "whole", ONE, parts()).folder


def epochs_of(folder: Path) -> list[dict[str, object]]:
    """Return the report of every epoch without its duration."""
    return [{**epoch, "seconds": None} for epoch in json.loads((folder / REPORT).read_text())["epochs"]]


def assert_same(folder: Path, whole: Path) -> None:
    for name in (WEIGHTS, CONFIG, TOKENIZER):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()
    assert epochs_of(folder) == epochs_of(whole)
    assert sorted(path.name for path in folder.iterdir()) == sorted([WEIGHTS, CONFIG, TOKENIZER, REPORT, CURVE])


# Steps 1 to 18 are the first 18 events, the end of their epoch is the next; 0 is before the first step.
@pytest.mark.parametrize("stopped_after", [0, 1, 7, 18, 19, 30])
def test_a_resumed_training_ends_with_the_same_weights(tmp_path: Path, whole: Path, stopped_after: int) -> None:
    begun(tmp_path, stopped_after, saved=stopped_after > 0)
    resumed(tmp_path)
    assert_same(tmp_path, whole)


def test_a_training_that_was_killed_after_the_best_weights_were_written_writes_them_again(
    tmp_path: Path, whole: Path
) -> None:
    # The weights are those of the first epoch, the state is the initial one, and a file is half written.
    training = begun(tmp_path, 19)
    assert training.trainer.progress.best is not None
    first = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / NEW).mkdir()
    (tmp_path / NEW / WEIGHTS).write_bytes(first[:100])
    again = Training(ONE, parts(), tmp_path, resume=True)
    assert again.trainer.progress.step == 0
    for _ in islice(again.events(), 19):
        pass
    assert (tmp_path / WEIGHTS).read_bytes() == first
    again.close()
    assert_same(resumed(tmp_path).folder, whole)


def test_a_training_that_was_killed_while_it_chose_its_threshold_chooses_it_again(tmp_path: Path, whole: Path) -> None:
    training = begun(tmp_path, 40)
    assert len(training.trainer.progress.epochs) == 2
    # The weights already have the chosen threshold, and the state from before the choice is still there.
    assert (tmp_path / WEIGHTS).read_bytes() != (whole / WEIGHTS).read_bytes()
    shutil.copyfile(whole / WEIGHTS, tmp_path / WEIGHTS)
    assert_same(resumed(tmp_path).folder, whole)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:1000])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def replace_by_weights(path: Path) -> None:
    save_file(load_file(path), path)


def record_otherwise(path: Path, **changes: object) -> None:
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        record = json.loads(file.metadata()["record"])
    save_file(tensors, path, metadata={"record": json.dumps(record | changes)})


def forget_identity(path: Path) -> None:
    record_otherwise(path, identity=None)


def forget_progress(path: Path) -> None:
    record_otherwise(path, progress={"step": 1})


def lose_a_tensor(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["model.decoder.norm.weight"]
    save_file(tensors, path, metadata=metadata)


def shrink_a_tensor(path: Path) -> None:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    tensors["model.decoder.norm.weight"] = tensors["model.decoder.norm.weight"][:5].clone()
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, r"cannot read .*state.safetensors: .*; start over with --force"),
        (empty, r"cannot read .*state.safetensors: .*; start over with --force"),
        (replace_by_weights, r"state.safetensors is not the state of this training \(it has no record\)"),
        (forget_identity, r"is a different one: it has no record; give the same files"),
        (forget_progress, r"state.safetensors is from another version of fatdeploy \('epochs'\); start over"),
        (lose_a_tensor, r"is not the state of this training \('model.decoder.norm.weight'\); start over with --force"),
        (shrink_a_tensor, r"is not the state of this training \(The size of tensor a \(32\) must match"),
    ],
)
def test_a_state_that_cannot_be_used_is_refused_and_the_folder_is_free(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    begun(tmp_path, 1)
    damage(tmp_path / STATE)
    with pytest.raises((CheckpointError, ConfigError), match=reason):
        Training(ONE, parts(), tmp_path, resume=True)
    FolderLock(tmp_path).close()


def test_a_state_of_another_model_is_refused_with_what_differs(tmp_path: Path) -> None:
    begun(tmp_path)
    other = plan(changes={"dropout": 0.2, "width": 64}, epochs=3)
    message = (
        r"epochs was 2, is 3; scheduled_sampling was 0.5, is 0.0; draw_threshold was True, is False; "
        r"width was 32, is 64; dropout was 0.1, is 0.2; give the same files and options, or start over with --force"
    )
    with pytest.raises(ConfigError, match=message):
        Training(other, parts(), tmp_path, resume=True)


def test_there_is_nothing_to_resume_before_a_training_and_after_its_end(tmp_path: Path, whole: Path) -> None:
    for folder in (tmp_path / "none", whole):
        with pytest.raises(CheckpointError, match=r"has no state.safetensors to resume from: no training was started"):
            Training(ONE, parts(), folder, resume=True)
    assert not (tmp_path / "none").exists()


def test_a_file_that_cannot_be_written_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def fail(new: Path) -> None:
        new.write_text("half of")
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"cannot write .*file: .*No space left on device; what was saved before"):
        replaced_file(path, fail)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["old"]


@contextmanager
def files_no_larger_than(n_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("finished", [True, False])
def test_a_new_training_that_cannot_write_its_first_state_leaves_the_old_one(
    tmp_path: Path, whole: Path, finished: bool
) -> None:
    if finished:
        shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    else:
        begun(tmp_path, 20, saved=True)
    before = bytes_of(tmp_path)
    message = (
        r"cannot write .*state.safetensors: .*; what was there before is untouched: free .* the same command again"
    )
    with files_no_larger_than(10_000), pytest.raises(CheckpointError, match=message):
        Training(plan(seed=5), parts(), tmp_path, resume=False)
    assert bytes_of(tmp_path) == before
    # Do what the message advises: run the same again.
    Training(plan(seed=5), parts(), tmp_path, resume=False).close()
    assert sorted(bytes_of(tmp_path)) == sorted([CONFIG, TOKENIZER, STATE])
    assert bytes_of(tmp_path)[STATE] != before.get(STATE)


def test_a_new_folder_is_removed_if_nothing_could_be_written_to_it(tmp_path: Path) -> None:
    with (
        files_no_larger_than(10_000),
        pytest.raises(CheckpointError, match="run the same command again, or choose another"),
    ):
        Training(ONE, parts(), tmp_path / "new", resume=False)
    assert not (tmp_path / "new").exists()


def test_a_new_training_that_was_killed_after_its_first_state_resumes_without_the_old_files(
    tmp_path: Path, whole: Path
) -> None:
    # Another model's files and the new state, as between two writes.
    folder = trained(tmp_path / "old", plan(changes={"width": 64}, epochs=1)).folder
    shutil.copyfile(begun(tmp_path / "new").folder / STATE, folder / STATE)
    training = Training(ONE, parts(), folder, resume=True)
    assert sorted(bytes_of(folder)) == sorted([CONFIG, TOKENIZER, STATE])
    training.close()
    assert_same(resumed(folder).folder, whole)


def test_other_users_may_read_the_files(tmp_path: Path, whole: Path) -> None:
    begun(tmp_path, 1, saved=True)
    files = [*whole.iterdir(), *tmp_path.iterdir()]
    assert {path.name for path in files} >= {WEIGHTS, STATE, CONFIG}
    mask = os.umask(0)
    os.umask(mask)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: oct(0o666 & ~mask) for path in files
    }


@pytest.mark.parametrize("resume", [False, True])
def test_a_second_training_in_a_folder_is_refused_until_the_first_is_over(tmp_path: Path, resume: bool) -> None:
    training = Training(ONE, parts(), tmp_path, resume=False)
    state = (tmp_path / STATE).read_bytes()
    with pytest.raises(CheckpointError, match=r"another training is running in .*: wait for it, stop it, or choose"):
        Training(ONE, parts(), tmp_path, resume=resume)
    assert (tmp_path / STATE).read_bytes() == state
    training.close()
    Training(ONE, parts(), tmp_path, resume=resume).close()


def test_a_nan_validation_loss_ends_the_training_and_keeps_no_weights(tmp_path: Path) -> None:
    training = Training(plan(epochs=1), parts(), tmp_path, resume=False)
    events = training.events()
    for _ in islice(events, 18):
        pass
    with torch.no_grad():
        training.trainer.model.source_embedding.weight.fill_(torch.nan)
    with pytest.raises(TrainingFailed, match="the validation loss is nan: lower --learning-rate"):
        next(events)
    assert not (tmp_path / WEIGHTS).exists()


def test_own_words_need_a_model_that_reads_them(tmp_path: Path) -> None:
    wrong = plan("transformer-nat-tiny", scheduled_sampling=0.5, draw_threshold=True)
    message = "--draw-threshold needs a hybrid model, .*; --scheduled-sampling needs an autoregressive model, tra"
    with pytest.raises(ConfigError, match=message):
        Training(wrong, parts(), tmp_path, resume=False)


def epoch(number: int, loss: float, rate: float, *, best: bool) -> Epoch:
    return Epoch(number, loss, ValidationScore(loss / 2, rate, 100.0), 1.0, best)


def test_the_curve_of_one_epoch_shows_three_points() -> None:
    picture = ElementTree.fromstring(curve_svg([epoch(1, 3.5, 250.0, best=True)]))
    circles = picture.findall(f"{SVG}circle")
    inside = HEIGHT - 2 * MARGIN
    # Scales end at 4 nats and 300 %.
    heights = [HEIGHT - MARGIN - inside * share for share in (3.5 / 4, 1.75 / 4, 250 / 300)]
    assert [float(circle.attrib["cy"]) for circle in circles] == pytest.approx(heights, abs=0.05)
    assert {float(circle.attrib["cx"]) for circle in circles} == {WIDTH / 2}
    assert [circle.attrib["fill"] for circle in circles] == list(COLOURS.values())
    texts = [text.text for text in picture.findall(f"{SVG}text")]
    assert "kept: epoch 1" in texts
    assert "token error rate: 250" in texts


def test_the_curve_marks_the_epoch_that_is_kept_and_stays_inside_the_picture() -> None:
    epochs = [epoch(1, 3.0, 90.0, best=True), epoch(2, 2.0, 40.0, best=True), epoch(3, 1.0, 50.0, best=False)]
    picture = ElementTree.fromstring(curve_svg(epochs))
    [line] = picture.findall(f"{SVG}line")
    assert float(line.attrib["x1"]) == float(line.attrib["x2"]) == WIDTH / 2
    first = ElementTree.fromstring(curve_svg([epochs[0], *(replace(epoch, best=False) for epoch in epochs[1:])]))
    [kept] = [text for text in first.findall(f"{SVG}text") if text.text == "kept: epoch 1"]
    assert (float(kept.attrib["x"]), kept.attrib["text-anchor"]) == (MARGIN, "start")
