"""The options of ``fatdeploy run`` that say how to decode, and what they become."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

import click

from fatdeploy.errors import ConfigError

if TYPE_CHECKING:
    # Not at run time: a command's help must not need numpy.
    from fatdeploy.runtimes.decoding.options import DecodeOptions

Command = TypeVar("Command", bound=Callable[..., Any])

EARLY_STOPPING: dict[str, bool | str] = {"yes": True, "no": False, "never": "never"}


class DecodeArguments(TypedDict):
    """What the options below become; the names are those of DecodeOptions."""

    max_new_tokens: int | None
    min_new_tokens: int
    num_beams: int
    length_penalty: float
    early_stopping: str
    num_return_sequences: int
    sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    prefix: str
    repetition_penalty: float
    no_repeat_ngram_size: int
    suppress_tokens: tuple[int, ...]
    forced_tokens: tuple[tuple[int, int], ...]
    bad_words: tuple[str, ...]
    stop: tuple[str, ...]
    shortlist: Path | None
    length_candidates: int
    timeout_s: float | None


POSITIVE, WHOLE = click.FloatRange(0, min_open=True), click.IntRange(0)

OPTIONS = (
    click.option(
        "--max-new-tokens", type=click.IntRange(1), help="Most tokens a target; the model's limit unless said."
    ),
    click.option(
        "--min-new-tokens", type=WHOLE, default=0, show_default=True, help="Fewest tokens a target, EOS not counted."
    ),
    click.option(
        *("--beams", "--num-beams", "num_beams"),
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Beams of a beam search, with Hugging Face's semantics; 1 is greedy.",
    ),
    click.option(
        "--length-penalty", type=float, default=1.0, show_default=True, help="Above 1 beams prefer long targets."
    ),
    click.option(
        "--early-stopping",
        type=click.Choice(list(EARLY_STOPPING)),
        default="no",
        show_default=True,
        help="Stop when as many targets as beams are complete; 'never': only when none can become better.",
    ),
    click.option(
        *("--n-best", "--num-return-sequences", "num_return_sequences"),
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Targets of each source: the best of its beams, or so many samples.",
    ),
    click.option("--sample", is_flag=True, help="Draw tokens instead of taking the best."),
    click.option(
        "--temperature", type=POSITIVE, default=1.0, show_default=True, help="Below 1 samples are more likely ones."
    ),
    click.option("--top-k", type=WHOLE, default=0, show_default=True, help="Draw among so many best tokens; 0 is all."),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        default=1.0,
        show_default=True,
        help="Draw among the fewest tokens that reach this probability together.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1, max_open=True),
        default=0.0,
        show_default=True,
        help="Draw among tokens with at least this part of the best one's probability.",
    ),
    click.option("--seed", type=WHOLE, default=0, show_default=True, help="Of the samples."),
    click.option("--prefix", default="", metavar="TEXT", help="What every target begins with; token ids with --ids."),
    click.option(
        "--repetition-penalty",
        type=POSITIVE,
        default=1.0,
        show_default=True,
        help="Above 1 makes what was said less likely.",
    ),
    click.option(
        "--no-repeat-ngram",
        "no_repeat_ngram_size",
        type=WHOLE,
        default=0,
        show_default=True,
        metavar="N",
        help="Say no N tokens in a row twice.",
    ),
    click.option(
        "--suppress", "suppress_tokens", type=WHOLE, multiple=True, metavar="ID", help="Never say this token."
    ),
    click.option(
        "--force",
        "forced_tokens",
        type=(WHOLE, WHOLE),
        multiple=True,
        metavar="N ID",
        help="Say this token after N new ones.",
    ),
    click.option(
        "--bad-word", "bad_words", multiple=True, metavar="IDS", help="Never say these token ids in a row, in quotes."
    ),
    click.option(
        "--stop", multiple=True, metavar="TEXT", help="End a target where it says this; token ids with --ids."
    ),
    click.option(
        "--shortlist",
        type=click.Path(path_type=Path),
        help="A file with the only token ids that may be said, beside EOS: quicker than all of them.",
    ),
    click.option(
        "--length-candidates",
        type=click.IntRange(1),
        default=1,
        show_default=True,
        help="Lengths to try, of parallel models with a length head.",
    ),
    click.option(
        *("--timeout", "timeout_s"),
        type=POSITIVE,
        metavar="SECONDS",
        help="Give up what is not complete by then: of each --batch-size sources, or of each one with --stream.",
    ),
)


def decode_options(command: Command) -> Command:
    """Add the options that say how to decode."""
    for option in reversed(OPTIONS):
        command = option(command)
    return command


def options_from_arguments(arguments: DecodeArguments, *, as_ids: bool, scores: bool) -> "DecodeOptions":
    """Return what was typed as DecodeOptions."""
    from fatdeploy.runtimes.decoding.options import DecodeOptions
    from fatdeploy.runtimes.decoding.sources import ids_from_text

    given: dict[str, Any] = {**arguments}
    stop, prefix = arguments["stop"], arguments["prefix"]
    given["early_stopping"] = EARLY_STOPPING[arguments["early_stopping"]]
    given["bad_words"] = [ids_from_text("--bad-word", word) for word in arguments["bad_words"]]
    given["stop"] = [ids_from_text("--stop", one) for one in stop] if as_ids else list(stop)
    # An empty text is no prefix: it needs no tokenizer.
    given["prefix"] = ids_from_text("--prefix", prefix) if as_ids or not prefix else prefix
    given["forced_tokens"] = list(arguments["forced_tokens"])
    given["shortlist"] = None if arguments["shortlist"] is None else _listed_ids(arguments["shortlist"])
    return DecodeOptions(**given, scores=scores)


def _listed_ids(path: Path) -> list[int]:
    from fatdeploy.runtimes.decoding.sources import ids_from_text

    try:
        return ids_from_text(f"--shortlist {path}", path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --shortlist {path}: {error}") from error
