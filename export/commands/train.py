"""``fatdeploy train``: options, the live line, and what is printed at the end."""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import click

from fatdeploy.export.training.settings import TrainSettings
from fatdeploy.exporter import need_export_packages
from fatdeploy.runtimes.commands.progress import is_quiet

if TYPE_CHECKING:
    # Not at run time: a command's help must not need torch.
    from fatdeploy.export.training.run import Training
    from fatdeploy.export.training.trainer import Epoch, ValidationScore

Command = TypeVar("Command", bound=Callable[..., Any])


class Change(click.ParamType[tuple[str, Any]]):
    """``name=value`` for a field of the configuration; the value is JSON or plain text."""

    name = "name=value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        name, equals, text = str(value).partition("=")
        if not equals:
            self.fail(f"{value!r} is not name=value", param, ctx)
        try:
            return name, json.loads(text)
        except json.JSONDecodeError:
            return name, text


def _setting(name: str, text: str) -> Callable[[Command], Command]:
    """Return the option of a field of TrainSettings, with its type and default; the settings check their ranges."""
    field = TrainSettings.__dataclass_fields__[name]
    kind = click.Choice(get_args(field.type)) if get_origin(field.type) is Literal else field.type
    return click.option(
        f"--{name.replace('_', '-')}",
        default=field.default,
        show_default=field.type is not bool,
        is_flag=field.type is bool,
        type=kind,
        help=text,
    )


@click.command(
    epilog="""\b
Examples:
  fatdeploy train pairs.tsv --preset fat-small --out my-model
  fatdeploy train words.tsv --tokenizer symbols --preset fat-small --set width=128 --set decoder_layers=1 --out words
  fatdeploy train pairs.tsv --validation held-out.tsv --tokenizer bpe --vocab-size 4000 --epochs 40 --out my-model
  fatdeploy train pairs.tsv --preset transformer-small --schedule step --gamma 0.9 --select-by bleu --out my-model
  fatdeploy train pairs.tsv --scheduled-sampling 0.3 --sampling-form parallel --ramp inverse-sigmoid --out my-model
  fatdeploy train pairs.tsv --reward bleu --reward-after 0.7 --select-by bleu --out my-model
  fatdeploy train pairs.tsv --preset fat-small --out my-model --resume
"""
)
@click.argument("pairs", type=click.Path(path_type=Path))
@click.option("--out", required=True, type=click.Path(path_type=Path), help="The checkpoint's folder.")
@click.option(
    "--validation", type=click.Path(path_type=Path), help="Pairs to validate with (default: 1 source in 50 of PAIRS)."
)
@click.option("--preset", default="fat-small", show_default=True, help="The model to train; see: fatdeploy presets")
@click.option(
    "--set",
    "changes",
    multiple=True,
    type=Change(),
    help="Change a value of the preset, such as width=128. May be repeated.",
)
@click.option(
    "--tokenizer",
    type=click.Choice(["characters", "symbols", "bpe"]),
    default="characters",
    show_default=True,
    help="characters; symbols: targets are symbols between blanks, such as phonemes; bpe: learned pieces of words.",
)
@click.option("--vocab-size", type=click.IntRange(1), help="Largest number of tokens for bpe (default: 8000).")
@_setting("epochs", "Number of passes over all pairs.")
@_setting("batch_size", "Pairs per step.")
@_setting("learning_rate", "Peak learning rate.")
@_setting("schedule", "After the warm-up: half a cosine to zero, or a factor per epoch (step).")
@_setting("gamma", "Factor per epoch of --schedule step.")
@_setting("warmup", "Steps until the peak learning rate.")
@_setting("weight_decay", "Weight decay of matrices per step.")
@_setting("clip", "Largest norm of gradients; 0 sets no limit.")
@_setting("updates", "Change the weights per batch, or per target position.")
@_setting("label_smoothing", "Probability spread over all other tokens.")
@_setting("scheduled_sampling", "Share of its own tokens that the model reads at the end.")
@_setting(
    "sampling_form",
    "How own tokens come about: two-pass, from one reading of the true ones; parallel, in several passes; sequential, "
    "one after another.",
)
@_setting("sampling_passes", "Passes of --sampling-form parallel.")
@_setting("own_choice", "Own tokens are the best ones, or drawn.")
@_setting("ramp", "How the share of own tokens rises.")
@_setting("free_running", "Read only own tokens, from the start.")
@_setting("reward", "Self-critical training on a metric of whole targets.")
@_setting("reward_weight", "Weight of the self-critical loss; the token loss has the rest.")
@_setting("reward_after", "Share of training without rewards.")
@_setting("guided_attention", "Weight of the loss on attention off the diagonal.")
@_setting("draw_threshold", "Train with random hybrid thresholds, then choose the lowest good one.")
@_setting("select_by", "Validation metric that chooses the epoch to keep; with equal values the loss does.")
@_setting("seed", "Random seed for weights and order.")
@_setting("device", "Where to train.")
@_setting("threads", "Number of torch threads.")
@_setting("save_seconds", "Seconds between saved states to resume from; every epoch also saves one.")
@click.option("--half", is_flag=True, help="Store the final weights in half precision.")
@click.option("--resume", is_flag=True, help="Continue a stopped training in this folder.")
@click.option("--force", is_flag=True, help="Start over in an existing folder.")
@click.option("--json", "as_json", is_flag=True, help="Print the report of the training as JSON.")
def train(
    pairs: Path, out: Path, validation: Path | None, resume: bool, force: bool, as_json: bool, **options: Any
) -> None:
    """Train a model on pairs of texts.

    Each line of PAIRS is source, TAB, target. After every epoch the folder holds the best checkpoint so far (for
    fatdeploy export), a report, and curve.svg. A stopped training continues with --resume and ends with the same
    weights as an uninterrupted one.
    """
    need_export_packages()
    from fatdeploy.errors import ConfigError
    from fatdeploy.export.models.loading import typed_folder
    from fatdeploy.export.training.data import read_parts
    from fatdeploy.export.training.run import REPORT, Training, TrainingPlan

    if resume and force:
        raise click.UsageError("--resume and --force exclude each other")
    if out.exists() and not (resume or force):
        raise ConfigError(f"{out} exists: continue with --resume, start over with --force, or choose another folder")
    half = options.pop("half")
    chosen = {name: options.pop(name) for name in ("preset", "tokenizer", "vocab_size")}
    changes = dict(options.pop("changes"))
    plan = TrainingPlan(**chosen, changes=changes, settings=TrainSettings(**options))
    with closing(Training(plan, read_parts(pairs, validation), out, resume=resume)) as training:
        _warn_about_unknown(training)
        _train(training)
        score = training.finish(_say_threshold, half=half)
    if as_json:
        click.echo((out / REPORT).read_text(encoding="utf-8"), nl=False)
        return
    click.echo(f"{out}: {_score_line(score)}. Next: fatdeploy export {typed_folder(out)} --out {out}.bundle")


def _train(training: "Training") -> None:
    from fatdeploy.export.training.trainer import Epoch

    with _live_line(training) as line, stop_signal() as stop:
        for event in training.events():
            if isinstance(event, Epoch):
                line.clear()
                _say_epoch(training.trainer.progress.epochs, training.trainer.settings.epochs)
            else:
                line.show(event.epoch, event.step, event.loss)
            if stop.is_set():
                training.trainer.save()
                line.clear()
                raise click.ClickException("stopped; the training is saved, continue with --resume")


@contextmanager
def stop_signal() -> Iterator[Event]:
    """Yield an event that the first Ctrl-C or SIGTERM sets, so that no step is cut short; the second acts at once."""
    stop = Event()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore(*_: object) -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request_stop(*_: object) -> None:
        stop.set()
        restore()

    for number in before:
        signal.signal(number, request_stop)
    try:
        yield stop
    finally:
        restore()


class _Line:
    """A line on a terminal that is rewritten in place; invisible elsewhere."""

    def __init__(self, training: "Training", *, visible: bool) -> None:
        self._per_epoch, self._visible = training.trainer.steps_per_epoch, visible
        self._n_epochs = training.trainer.settings.epochs
        self._loss: float | None = None

    def show(self, epoch: int, step: int, loss: float) -> None:
        self._loss = loss if self._loss is None else 0.98 * self._loss + 0.02 * loss
        if self._visible and (step % 5 == 0 or step == 1):
            done = step - (epoch - 1) * self._per_epoch
            bar = ("#" * (20 * done // self._per_epoch)).ljust(20, "-")
            text = f"epoch {epoch}/{self._n_epochs} [{bar}] {done}/{self._per_epoch}  loss {self._loss:.3f}"
            click.echo(f"\r{text}\x1b[K", nl=False, err=True)

    def clear(self) -> None:
        if self._visible:
            click.echo("\r\x1b[K", nl=False, err=True)


@contextmanager
def _live_line(training: "Training") -> Iterator[_Line]:
    line = _Line(training, visible=not is_quiet() and sys.stderr.isatty())
    try:
        yield line
    finally:
        line.clear()


def _say(text: str) -> None:
    if not is_quiet():
        click.echo(text, err=True)


def _say_epoch(epochs: "Sequence[Epoch]", n_epochs: int) -> None:
    """Print the result of the last of these epochs; their seconds are cumulative."""
    epoch = epochs[-1]
    seconds = epoch.seconds - (epochs[-2].seconds if len(epochs) > 1 else 0)
    kept = "  kept" if epoch.best else ""
    reward = "" if epoch.reward is None else f"reward {epoch.reward:.4f}  "
    _say(
        f"epoch {epoch.number}/{n_epochs}  {seconds:.1f} s, {epoch.seconds:.1f} s total  "
        f"training loss {epoch.train_loss:.4f}  {reward}validation loss {epoch.score.loss:.4f}, "
        f"{_score_line(epoch.score)}{kept}"
    )


def _say_threshold(threshold: float, score: "ValidationScore") -> None:
    _say(f"threshold {threshold:.2f}: {_score_line(score)}")


def _score_line(score: "ValidationScore") -> str:
    of_text = {"BLEU": score.bleu, "chrF": score.chrf}
    more = "".join(f", {name} {value:.2f}" for name, value in of_text.items() if value is not None)
    return f"token errors {score.token_error_rate:.2f} %, sources with errors {score.sequence_error_rate:.2f} %{more}"


def _warn_about_unknown(training: "Training") -> None:
    pairs = [(pair.source, pair.target) for pair in training.validation.pairs]
    unknown = training.coder.unknown(pairs)
    if unknown:
        named = ", ".join(repr(token) for token, _ in unknown.most_common(5))
        _say(f"the validation pairs have {len(unknown)} tokens that no training pair has: {named}")
