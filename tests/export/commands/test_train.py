"""``fatdeploy train`` as a user runs it: learning, exporting, being killed, and everything that can be wrong."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import accumulate, islice
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from fatdeploy.cli import main
from fatdeploy.export.commands.train import stop_signal
from fatdeploy.export.commands.train import train as train_command
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, WEIGHTS, load_checkpoint
from fatdeploy.export.training.data import read_parts
from fatdeploy.export.training.folder import NEW, FolderLock
from fatdeploy.export.training.resume import STATE, load_record
from fatdeploy.export.training.run import CURVE, REPORT, Training
from fatdeploy.export.training.tokenizers import loaded_tokenizer
from fatdeploy.runtimes.decoding.loop import decode
from tests.support.pages import prose
from tests.support.terminal import on_a_terminal
from tests.support.trainings import plan, spelled

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0
# The plan of tests.support.trainings as command-line options.
CHANGES = {"max_source": 8, "max_target": 16, "encoder_layers": 1, "decoder_layers": 1}
OPTIONS = [
    *("--preset", "fat-tiny", "--tokenizer", "symbols"),
    *(text for name, value in CHANGES.items() for text in ("--set", f"{name}={value}")),
    *("--epochs", "2", "--batch-size", "16", "--learning-rate", "5e-3", "--warmup", "10"),
]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.tsv"
    path.write_text("".join(f"{pair.source}\t{pair.target}\n" for pair in spelled(320)))
    return path


@pytest.fixture(scope="module")
def whole(pairs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a training that nothing stopped."""
    folder = tmp_path_factory.mktemp("training") / "whole"
    result = train(pairs, folder)
    assert result.exit_code == 0, result.stderr
    return folder


def train(pairs: Path, folder: Path, *more: str, before: tuple[str, ...] = ()) -> Result:
    """Train in this process: the test does not need a separate one."""
    return CliRunner().invoke(main, [*before, "train", str(pairs), "--out", str(folder), *OPTIONS, *more])


def error_of(result: Result, code: int = 1) -> str:
    """Return the error of a command, which must be its only output and one line."""
    assert (result.exit_code, result.stdout) == (code, "")
    *_, line = result.stderr.splitlines()
    assert code == 2 or result.stderr == f"{line}\n"
    return line.removeprefix("Error: ")


def started(pairs: Path, folder: Path, *more: str, first: str = "") -> subprocess.Popen[str]:
    """Start a training in its own process, which runs ``first`` before it."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{first}\nfrom fatdeploy.cli import main\nmain()"
    arguments = ["-q", "train", str(pairs), "--out", str(folder), *OPTIONS, *more]
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def states_of(folder: Path, process: subprocess.Popen[str]) -> Iterator[int]:
    """Yield whenever the state was replaced, until the process ends."""
    deadline, before = time.monotonic() + PATIENCE, None
    while process.poll() is None:
        assert time.monotonic() < deadline
        try:
            status = (folder / STATE).stat()
        except FileNotFoundError:
            continue
        now = (status.st_ino, status.st_mtime_ns)
        if before not in (None, now):
            yield 1
        before = now
        time.sleep(0.001)


def is_writing(folder: Path) -> bool:
    try:
        return any((folder / NEW).iterdir())
    except FileNotFoundError:
        return False


def test_a_training_learns_is_exported_and_runs(pairs: Path, tmp_path: Path) -> None:
    folder, bundle = tmp_path / "model", tmp_path / "bundle"
    more = ["--epochs", "12", "--preset", "transformer-tiny"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "fatdeploy", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)

    trained = run("train", str(pairs), "--out", str(folder), *OPTIONS, *more)
    last = re.escape(f"{folder}: token errors ") + r"(\S+) %, sources with errors \S+ %\. Next: fatdeploy export .*\n"
    matched = re.fullmatch(last, trained.stdout)
    assert matched is not None
    assert float(matched[1]) < 30
    epochs = trained.stderr.splitlines()
    assert len(epochs) == 12
    assert re.fullmatch(
        r"epoch 1/12  \d+\.\d s, \d+\.\d s total  training loss \S+  validation loss \S+, token errors .* %  kept",
        epochs[0],
    )
    times = [re.search(r"  (\S+) s, (\S+) s total  ", line) for line in epochs]
    alone, in_all = ([float(matched[number]) for matched in times if matched] for number in (1, 2))
    assert in_all == pytest.approx(list(accumulate(alone)), abs=0.1 * 12)
    assert max(alone[1:]) < in_all[-1] / 2
    assert sorted(path.name for path in folder.iterdir()) == sorted([WEIGHTS, CONFIG, TOKENIZER, REPORT, CURVE])
    next_command = trained.stdout.partition("Next: fatdeploy ")[2].split()
    assert next_command == ["export", str(folder), "--out", f"{folder}.bundle"]
    run(*next_command[:-1], str(bundle))
    words = ["abcd", "hag", "e"]
    texts = run("run", str(bundle), *words).stdout.splitlines()
    coder = loaded_tokenizer(folder / TOKENIZER)
    rows = decode(EagerEngine(load_checkpoint(folder)), [coder.source_ids(word) for word in words])
    assert texts == [coder.text(row.tokens) for row in rows]
    assert set(" ".join(texts).split()) <= set("ABCDEFGH")
    assert all(texts)


def test_a_training_that_is_killed_again_and_again_ends_with_the_same_bytes(
    pairs: Path, whole: Path, tmp_path: Path
) -> None:
    folder, draw, n_killed = tmp_path / "model", random.Random(0), 0
    more = ["--save-seconds", "0"]
    while True:
        process = started(pairs, folder, *more)
        more = ["--save-seconds", "0", "--resume"]
        for _ in islice(states_of(folder, process), draw.randint(5, 15)):
            pass
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0, 0.01))
        else:
            while process.poll() is None and not is_writing(folder):
                pass
        if process.poll() is None:
            process.kill()
        out, error = process.communicate(timeout=PATIENCE)
        if not (folder / STATE).exists():  # a training removes it at the very end
            break
        assert (process.returncode, out, error) == (-signal.SIGKILL, "", "")
        n_killed += 1
    assert n_killed >= 2
    for name in (WEIGHTS, CONFIG, TOKENIZER):
        assert (folder / name).read_bytes() == (whole / name).read_bytes()


def test_ctrl_c_saves_a_whole_step(pairs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    process = started(pairs, folder, "--epochs", "60", "--save-seconds", "0")
    next(states_of(folder, process))
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=PATIENCE)
    message = "Error: stopped; the training is saved, continue with --resume\n"
    assert (process.returncode, out, error) == (1, "", message)
    n_steps = load_record(folder / STATE)["progress"]["step"]
    assert 1 <= n_steps < 60 * 20
    # The same steps without any signal, in this process.
    training = Training(plan(epochs=60, save_seconds=1e9), read_parts(pairs, None), tmp_path / "other", resume=False)
    for event in training.events():
        if getattr(event, "step", 0) == n_steps:
            break
    training.trainer.save()
    expected, state = (load_file(path / STATE) for path in (tmp_path / "other", folder))
    assert expected.keys() == state.keys()
    assert all(expected[name].equal(state[name]) for name in expected)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_one_acts(number: signal.Signals) -> None:
    before = [signal.getsignal(handled) for handled in (signal.SIGINT, signal.SIGTERM)]
    with stop_signal() as stop:
        assert not stop.is_set()
        os.kill(os.getpid(), number)
        assert stop.is_set()
        assert [signal.getsignal(handled) for handled in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_full_disk_loses_nothing(pairs: Path, whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    size = (whole / WEIGHTS).stat().st_size
    # Room for the weights and for the first state, but not for the state of the optimiser after a step.
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_FSIZE, ({2 * size}, {2 * size}))"
    process = started(pairs, folder, "--save-seconds", "0", first=limit)
    out, error = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, "")
    message = rf"Error: cannot write {re.escape(str(folder / STATE))}: .*File too large.*; what was saved before is "
    assert re.fullmatch(
        rf"{message}untouched: free some space and continue with --resume, or choose another folder\n", error
    )
    assert sorted(path.name for path in folder.iterdir()) == sorted([CONFIG, TOKENIZER, STATE])
    assert load_record(folder / STATE)["progress"]["step"] == 0
    assert train(pairs, folder, "--resume").exit_code == 0
    assert (folder / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()


def test_a_terminal_shows_epoch_steps_and_loss(pairs: Path, tmp_path: Path) -> None:
    out, shown = on_a_terminal("train", str(pairs), "--out", str(tmp_path / "model"), *OPTIONS, "--epochs", "1")
    n_steps = json.loads((tmp_path / "model" / REPORT).read_text())["pairs"]["train"] // 16 + 1
    lines = re.findall(rf"\repoch 1/1 \[(#*)(-*)\] (\d+)/{n_steps}  loss \d\.\d{{3}}\x1b\[K", shown)
    assert [int(step) for _, _, step in lines] == [1, *range(5, n_steps + 1, 5)]
    assert all(len(done) == 20 * int(step) // n_steps and len(done + left) == 20 for done, left, step in lines)
    # It is erased when the epoch is reported.
    assert re.search(r"\r\x1b\[Kepoch 1/1  (\d+\.\d) s, \1 s total  training loss", shown)
    assert out.startswith(f"{tmp_path / 'model'}: token errors ")


def test_rewards_and_bleu_are_reported(pairs: Path, tmp_path: Path) -> None:
    rewards = [
        "--reward",
        "token_error_rate",
        "--reward-after",
        "0.5",
        "--own-choice",
        "drawn",
        "--ramp",
        "exponential",
    ]
    sampling = ["--scheduled-sampling", "0.5", "--sampling-form", "parallel", "--sampling-passes", "2"]
    result = train(pairs, tmp_path / "model", *rewards, *sampling, "--select-by", "bleu", "--schedule", "step")
    assert result.exit_code == 0, result.stderr
    first, second = result.stderr.splitlines()
    assert re.search(
        r"training loss \S+  validation loss \S+, token errors \S+ %, sources with errors \S+ %, BLEU \d", first
    )
    assert re.search(r"training loss \S+  reward -?\d\.\d{4}  validation loss \S+, .*, BLEU \d+\.\d\d", second)
    assert re.search(r", BLEU \d+\.\d\d\. Next: ", result.stdout)
    report = json.loads((tmp_path / "model" / REPORT).read_text())
    assert [epoch["reward"] is None for epoch in report["epochs"]] == [True, False]
    assert report["settings"]["sampling_form"] == "parallel"
    assert report["final"]["bleu"] == max(epoch["score"]["bleu"] for epoch in report["epochs"])


def test_quiet_prints_only_the_result(pairs: Path, tmp_path: Path) -> None:
    result = train(pairs, tmp_path / "model", "--epochs", "1", before=("--quiet",))
    assert (result.exit_code, result.stderr) == (0, "")
    assert len(result.stdout.splitlines()) == 1


def test_the_next_command_names_the_folder_even_if_a_model_has_the_same_name(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(pairs, Path("g2p"), "--epochs", "1")
    assert result.stdout.endswith("Next: fatdeploy export ./g2p --out g2p.bundle\n")


def test_json_is_the_report(pairs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    apart = tmp_path / "apart.tsv"
    apart.write_text("zz\tZ Z\nzz\tZ\n")
    handler = signal.getsignal(signal.SIGINT)
    result = train(pairs, folder, "--epochs", "1", "--json", "--validation", str(apart), "--seed", "7")
    assert signal.getsignal(signal.SIGINT) is handler
    report = json.loads(result.stdout)
    assert report == json.loads((folder / REPORT).read_text())
    assert report["pairs"] == {"train": 320, "validation": 2}
    assert report["settings"]["seed"] == 7
    assert [epoch["number"] for epoch in report["epochs"]] == [1]
    unknown, epoch = result.stderr.splitlines()
    assert unknown == "the validation pairs have 2 tokens that no training pair has: 'z', 'Z'"
    assert epoch.startswith("epoch 1/1 ")


def test_an_existing_folder_is_neither_overwritten_nor_resumed_by_default(pairs: Path, tmp_path: Path) -> None:
    message = f"{tmp_path} exists: continue with --resume, start over with --force, or choose another folder"
    assert error_of(train(pairs, tmp_path)) == message
    assert not list(tmp_path.iterdir())
    assert error_of(train(pairs, tmp_path, "--resume", "--force"), 2) == "--resume and --force exclude each other"


def test_force_starts_again(pairs: Path, whole: Path, tmp_path: Path) -> None:
    for name in (WEIGHTS, REPORT, STATE, CONFIG):
        (tmp_path / name).write_text("old")
    assert train(pairs, tmp_path, "--force").exit_code == 0
    assert (tmp_path / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert (tmp_path / CONFIG).read_bytes() == (whole / CONFIG).read_bytes()


def test_nothing_is_resumed_without_a_state_or_with_other_options(pairs: Path, whole: Path, tmp_path: Path) -> None:
    over = error_of(train(pairs, whole, "--resume"))
    assert over.startswith(f"{whole} has no {STATE} to resume from: no training was started there, or it has finished")
    training = Training(plan(), read_parts(pairs, None), tmp_path, resume=False)
    training.close()
    message = error_of(train(pairs, tmp_path, "--resume", "--epochs", "5", "--set", "width=64"))
    assert message == (
        f"the training in {tmp_path} is a different one: epochs was 2, is 5; width was 32, is 64; give the same files "
        "and options, or start over with --force"
    )


def test_two_trainings_do_not_write_to_one_folder(pairs: Path, tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    message = f"another training is running in {tmp_path}: wait for it, stop it, or choose another folder"
    assert error_of(train(pairs, tmp_path, "--force")) == message
    assert not list(tmp_path.iterdir())
    lock.close()


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--set", "widht=64"], 1, r"configuration refused: widht: unknown; .* vocab_size, width, .*"),
        (
            ["--set", "width=wide", "--set", "norm=3"],
            1,
            r".*: width: expected int, found 'wide'; norm: expected one .*",
        ),
        (["--set", "width"], 2, r"Invalid value for '--set': 'width' is not name=value"),
        (["--set", "vocab_size=9"], 1, r"configuration refused: vocab_size: follows from the tokenizer"),
        (["--preset", "fat-huge"], 1, r"no preset 'fat-huge'; .* See: fatdeploy presets"),
        (["--epochs", "0", "--clip", "-1"], 1, r"training refused: epochs: must lie in 1…, found 0; clip: must lie .*"),
        (["--save-seconds", "inf"], 1, r"training refused: save_seconds: must lie in 0…, found inf"),
        (["--epochs", "many"], 2, r"Invalid value for '--epochs': 'many' is not a valid integer\."),
        (["--schedule", "root"], 2, r"Invalid value for '--schedule': 'root' is not one of 'cosine', 'step'\."),
        (["--gamma", "0.5"], 1, r"training refused: gamma: does nothing with schedule = cosine, use step"),
        (
            ["--free-running", "--scheduled-sampling", "1"],
            1,
            r"training refused: free_running: reads no true tokens, .*",
        ),
        (
            ["--preset", "transformer-nat-tiny", "--reward", "bleu", "--updates", "batch"],
            1,
            r"training refused: --reward needs an autoregressive model, transformer-nat-tiny is not",
        ),
        (["--vocab-size", "300"], 1, r"no tokenizer: vocab_size is for bpe, symbols keep every.*"),
        (["--set", "max_source=3"], 1, r".*pairs.tsv: \d+ of 320 lines cannot be used: source has 4 tokens at line .*"),
    ],
)
def test_a_wrong_option_is_reported_and_nothing_is_written(
    pairs: Path, tmp_path: Path, more: list[str], code: int, message: str
) -> None:
    result = train(pairs, tmp_path / "model", *more)
    assert re.fullmatch(message, error_of(result, code))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            b"a\tb\nno tab\n\tc\nd\t\n",
            r"3 of 4 lines cannot be used: has no TAB at line 2; has an empty source at line 3; ",
        ),
        (b"", r" is empty, expected a file of pairs: a line is a source, one TAB and a target, in UTF-8"),
        ("a\tb\nc\td\n".encode("utf-16"), r"lines cannot be used: is not UTF-8 at line 1 \("),
        ("Zürich\tb\n".encode("latin-1"), r"1 of 1 lines cannot be used: is not UTF-8 at line 1 \(byte 0xfc\)"),
        (
            b"a\tb\n",
            r" has only one source, and one must be kept apart for validation: add pairs, or pass --validation",
        ),
    ],
)
def test_a_file_that_cannot_be_trained_on_is_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "pairs.tsv"
    path.write_bytes(data)
    line = error_of(train(path, tmp_path / "model"))
    assert line.startswith(str(path))
    assert re.search(message, line)
    assert not (tmp_path / "model").exists()


def test_bad_lines_of_both_files_are_reported_together(tmp_path: Path) -> None:
    path, apart = tmp_path / "pairs.tsv", tmp_path / "apart.tsv"
    path.write_bytes(b"a\tb\nno tab\n")
    apart.write_bytes(b"c\td\n\nno tab either\n")
    form = "a line is a source, one TAB and a target, in UTF-8: fix or remove them"
    assert error_of(train(path, tmp_path / "model", "--validation", str(apart))) == (
        f"{path}: 1 of 2 lines cannot be used: has no TAB at line 2; {form}; "
        f"{apart}: 2 of 3 lines cannot be used: is blank at line 2; has no TAB at line 3; {form}"
    )
    message = error_of(train(path, tmp_path / "model", "--validation", str(tmp_path / "none.tsv")))
    assert f"{path}: 1 of 2 lines" in message
    assert "none.tsv does not exist, expected a file of pairs" in message
    assert not (tmp_path / "model").exists()


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "none.tsv does not exist, expected a file" in error_of(train(tmp_path / "none.tsv", tmp_path / "model"))


def test_a_folder_that_cannot_be_written_is_refused(pairs: Path, tmp_path: Path) -> None:
    for folder, reason in [(pairs / "model", "Not a directory"), (Path("/proc/none/model"), "No such file")]:
        message = error_of(train(pairs, folder))
        assert message.startswith(f"cannot train in {folder}: ")
        assert reason in message
        assert message.endswith("; choose another folder")
    # A folder that exists and accepts no files, whatever the rights of the user.
    message = error_of(train(pairs, Path("/proc/self"), "--force"))
    assert message.startswith(f"cannot write /proc/self/{STATE}: ")
    assert message.endswith(
        "; what was there before is untouched: free some space and run the same command again, or choose another folder"
    )
    assert os.path.lexists("/proc/self")
    assert error_of(train(pairs, pairs, "--force")).startswith(f"cannot train in {pairs}: ")


def test_its_page_names_every_option() -> None:
    # Not its blocks of code: they also call other programs.
    named = set(re.findall(r"--[a-z][a-z-]*", prose(ROOT / "docs" / "training.md")))
    assert named == {option for param in train_command.params for option in param.opts if option.startswith("--")}
