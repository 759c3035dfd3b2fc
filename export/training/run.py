"""A training from data files to checkpoint: what is read, checked and written around the loop."""

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from fatdeploy.errors import BackendUnavailable, CheckpointError, ConfigError, in_one_line
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, WEIGHTS, load_checkpoint, save_weights
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.training.curve import curve_svg
from fatdeploy.export.training.data import Parts, ids_of_parts
from fatdeploy.export.training.folder import AGAIN, FolderLock, replaced_file
from fatdeploy.export.training.resume import STATE, load_record
from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.export.training.start import untrained_model
from fatdeploy.export.training.tokenizers import TextCoder, built_tokenizer
from fatdeploy.export.training.trainer import Epoch, Step, Trainer, ValidationScore, set_threshold
from fatdeploy.export.training.validation import Validation
from fatdeploy.machine import this_machine
from fatdeploy.runtimes.evaluation.metrics import OF_TEXT, need_sacrebleu
from fatdeploy.runtimes.text.tokenizer_json import Kind

REPORT, CURVE = "training.json", "curve.svg"
# Thresholds of the hybrid forward pass to try, and the error in points that a lower one may cost.
THRESHOLDS = tuple(step / 20 for step in range(21))
THRESHOLD_COST = 0.05


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """What to train: a preset with changes, a tokenizer, and settings."""

    preset: str
    changes: dict[str, Any]
    tokenizer: Kind
    vocab_size: int | None
    settings: TrainSettings

    def config(self, coder: TextCoder) -> ModelConfig:
        """Return the model's configuration, with the vocabulary of the tokenizer."""
        fixed = {"vocab_size": coder.n_tokens, "pad_id": coder.pad_id, "bos_id": coder.bos_id, "eos_id": coder.eos_id}
        wrong = [f"{name}: follows from the tokenizer" for name in self.changes if name in fixed]
        if wrong:
            raise ConfigError(in_one_line("configuration refused", wrong))
        config = config_from_preset(self.preset, **self.changes, **fixed)
        if wrong := self._misfits(config):
            raise ConfigError(in_one_line("training refused", wrong))
        return config

    def _misfits(self, config: ModelConfig) -> list[str]:
        """Return which ways of training this model cannot use."""
        settings, wrong = self.settings, []
        if settings.draw_threshold and not config.hybrid:
            wrong.append(f"--draw-threshold needs a hybrid model, {self.preset} is not")
        one_by_one = {
            "--scheduled-sampling": settings.scheduled_sampling > 0,
            "--free-running": settings.free_running,
            "--reward": settings.reward != "none",
            "--updates token": settings.updates == "token",
        }
        if config.parallel:
            # All its tokens come from one call: none reads another, and none comes before another.
            wrong += [
                f"{name} needs an autoregressive model, {self.preset} is not" for name in one_by_one if one_by_one[name]
            ]
        if settings.guided_attention and config.cross_attention == "none":
            wrong.append(f"--guided-attention needs an attention to the source, {self.preset} has none")
        return wrong


class Training:
    """One training in a folder, alone there until it is finished or closed: new, or resumed from a saved state."""

    def __init__(self, plan: TrainingPlan, parts: Parts, folder: Path, *, resume: bool) -> None:
        self.folder, self._plan, self._parts = folder, plan, parts
        need_backends(plan.settings)
        self.coder = built_tokenizer(
            [(pair.source, pair.target) for pair in parts.train.pairs], plan.tokenizer, vocab_size=plan.vocab_size
        )
        self.config = plan.config(self.coder)
        ids, apart = ids_of_parts(parts, self.coder, self.config)
        self.validation = Validation(parts.validation.pairs, apart, self.coder, plan.settings.select_by)
        model = untrained_model(self.config, plan.settings.seed)
        self.trainer = Trainer(model, ids, plan.settings, folder, self.validation, self._identity())
        is_new = not folder.exists()
        self._lock = self._locked(resume)
        try:
            if resume:
                self._check_identity()
                self.trainer.resume()
            else:
                # So that a training killed in its first minutes can be resumed too.
                self.trainer.save(advice=AGAIN)
            self._settle()
        except BaseException:
            self.close()
            if is_new:
                # The same command must not fail because the folder exists; one that holds a state stays.
                with suppress(OSError):
                    folder.rmdir()
            raise

    def close(self) -> None:
        """Let others train in the folder."""
        self._lock.close()

    def events(self) -> Iterator[Step | Epoch]:
        """Train to the end, yielding each step and epoch; the checkpoint is complete after every epoch."""
        for event in self.trainer.events():
            if isinstance(event, Epoch):
                self._report()
            yield event

    def finish(
        self, tried: Callable[[float, ValidationScore], None] = lambda *_: None, *, half: bool = False
    ) -> ValidationScore:
        """Choose the hybrid threshold if it was drawn, remove the state, and return the score of the kept weights.

        ``half`` stores the weights in half precision; the score is the one before that.
        """
        best = self.trainer.progress.best
        if best is None:
            raise CheckpointError(f"{self.folder} has no finished epoch")
        if self._plan.settings.draw_threshold:
            best = self._choose_threshold(tried)
        if half:
            model = load_checkpoint(self.folder)
            replaced_file(self.folder / WEIGHTS, lambda path: save_weights(model, path, half=True))
        self._report(best)
        (self.folder / STATE).unlink(missing_ok=True)
        self.close()
        return best

    def _choose_threshold(self, tried: Callable[[float, ValidationScore], None]) -> ValidationScore:
        """Keep the lowest threshold that costs next to nothing on the validation pairs; training used all of them."""
        model = load_checkpoint(self.folder)
        scores: dict[float, ValidationScore] = {}
        score_of: dict[bytes, ValidationScore] = {}
        for threshold in (value for value in THRESHOLDS if value >= self.config.hybrid_threshold):
            set_threshold(model, threshold)
            kept = model.keep.numpy().tobytes()
            # Thresholds beyond the tokens of targets keep the same tokens, and need no second validation.
            if kept not in score_of:
                score_of[kept] = self.validation(model)
            scores[threshold] = score_of[kept]
            tried(threshold, scores[threshold])
        most = min(score.token_error_rate for score in scores.values()) + THRESHOLD_COST
        chosen = min(threshold for threshold, score in scores.items() if score.token_error_rate <= most)
        set_threshold(model, chosen)
        self.config = replace(self.config, hybrid_threshold=chosen)
        replaced_file(self.folder / WEIGHTS, lambda path: save_weights(model, path))
        self._write_text(CONFIG, self.config.to_json())
        return scores[chosen]

    def _identity(self) -> dict[str, Any]:
        """Return everything the weights depend on, as JSON values."""
        settings = asdict(self._plan.settings)
        # More threads sum in another order, but that is up to whoever resumes.
        for name in ("threads", "save_seconds"):
            settings.pop(name)
        return {
            "settings": settings,
            "config": json.loads(self.config.to_json()),
            "tokenizer": self._plan.tokenizer,
            "vocab_size": self._plan.vocab_size,
            "pairs": self._parts.digest,
        }

    def _locked(self, resume: bool) -> FolderLock:
        if resume and not (self.folder / STATE).exists():
            raise CheckpointError(
                f"{self.folder} has no {STATE} to resume from: no training was started there, or it has finished; "
                "train without --resume"
            )
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return FolderLock(self.folder)
        except CheckpointError:
            raise
        except OSError as error:
            raise CheckpointError(f"cannot train in {self.folder}: {error}; choose another folder") from error

    def _check_identity(self) -> None:
        differing = _differing(load_record(self.folder / STATE).get("identity"), self._identity())
        if differing:
            message = in_one_line(f"the training in {self.folder} is a different one", differing)
            raise ConfigError(f"{message}; give the same files and options, or start over with --force")

    def _settle(self) -> None:
        """Write configuration and tokenizer, and remove the files of an earlier training.

        The state is saved before: until then the earlier training has lost nothing.
        """
        try:
            for name in (WEIGHTS, REPORT, CURVE) if self.trainer.progress.best is None else ():
                (self.folder / name).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot train in {self.folder}: {error}; choose another folder") from error
        self._write_text(CONFIG, self.config.to_json())
        replaced_file(self.folder / TOKENIZER, self.coder.save)

    def _report(self, final: ValidationScore | None = None) -> None:
        progress = self.trainer.progress
        report = {
            "preset": self._plan.preset,
            "changes": self._plan.changes,
            "settings": asdict(self._plan.settings),
            "tokenizer": self._plan.tokenizer,
            "parameters": sum(parameter.numel() for parameter in self.trainer.model.parameters()),
            "pairs": {"train": len(self._parts.train.pairs), "validation": len(self._parts.validation.pairs)},
            "pairs_sha256": self._parts.digest,
            "epochs": [asdict(epoch) for epoch in progress.epochs],
            "seconds": progress.seconds,
            "final": None if final is None else {**asdict(final), "hybrid_threshold": self.config.hybrid_threshold},
            "versions": {package: version(package) for package in ("fatdeploy", "torch")},
            "machine": this_machine().as_dict(),
        }
        self._write_text(REPORT, json.dumps(report, indent=2) + "\n")
        self._write_text(CURVE, curve_svg(progress.epochs))

    def _write_text(self, name: str, text: str) -> None:
        replaced_file(self.folder / name, lambda path: path.write_text(text, encoding="utf-8"))


def need_backends(settings: TrainSettings) -> None:
    """Raise if the device is not here, or what the metric that selects needs."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        reason = "finds no CUDA device" if torch.version.cuda else "is built without CUDA"
        raise BackendUnavailable(
            f"--device cuda is not available: torch {torch.__version__} here {reason}; install a build of torch with "
            "CUDA that fits the driver (pip install --force-reinstall torch), or use --device cpu"
        )
    if settings.select_by in OF_TEXT:
        try:
            need_sacrebleu()
        except BackendUnavailable as error:
            raise BackendUnavailable(
                f"--select-by {settings.select_by} needs sacrebleu: pip install 'fatdeploy[eval]', or use --select-by "
                "token_error_rate"
            ) from error


def _differing(old: Any, new: dict[str, Any]) -> list[str]:
    """Return how an earlier training differs from a new one."""
    if not isinstance(old, dict):
        return ["it has no record"]
    reasons = []
    for name in (name for name in new if old.get(name) != new[name]):
        if isinstance(new[name], dict):
            reasons += _differing(old.get(name), new[name])
        else:
            reasons.append("the pairs differ" if name == "pairs" else f"{name} was {old.get(name)}, is {new[name]}")
    return reasons
