"""Arguments of a model's calls, checked before any work."""

from collections.abc import Iterable

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.decoding.options import DecodeOptions


def check_list(sources: object) -> None:
    """Raise unless there is a list of sources."""
    if isinstance(sources, str):
        raise ConfigError("generate takes a list of sources, found one text: pass [text]")
    if not isinstance(sources, Iterable):
        raise ConfigError(f"generate takes a list of sources, found {sources!r}")


def check_call(
    options: object, truncate: object, batch_tokens: object = None, progress: object = None, split: object = None
) -> None:
    """Raise, with every reason, unless the arguments are what their names say."""
    reasons = []
    if not isinstance(options, DecodeOptions | None):
        reasons.append(f"options must be DecodeOptions, found {options!r}")
    if not isinstance(truncate, bool):
        reasons.append(f"truncate must be True or False, found {truncate!r}")
    if batch_tokens is not None and (type(batch_tokens) is not int or batch_tokens < 1):
        reasons.append(f"batch_tokens must be a whole number from 1 up, found {batch_tokens!r}")
    if progress is not None and not callable(progress):
        reasons.append(f"progress must be a function of a number, found {progress!r}")
    if split not in (None, "sentences"):
        reasons.append(f"split must be 'sentences' or None, found {split!r}")
    if reasons:
        raise ConfigError(in_one_line("call refused", reasons))


def check_streamed(options: DecodeOptions) -> None:
    """Raise unless options give one target per source, whose tokens are final once they are chosen."""
    wrong = [
        f"{name} = {value}"
        for name, value in {
            "num_beams": options.num_beams,
            "num_return_sequences": options.num_return_sequences,
        }.items()
        if value > 1
    ]
    if wrong:
        raise ConfigError(
            f"stream refused: it needs num_beams = 1 and num_return_sequences = 1, found {', '.join(wrong)}; beams "
            "change earlier tokens: use generate for them, or pass num_beams=1 (--beams 1)"
        )


def check_shortlist(options: DecodeOptions, bundle: Bundle, table: object | None) -> None:
    """Raise, with what to type, if a bundle's own shortlist is wanted and there is none."""
    # A parallel model has another reason against any shortlist.
    if options.shortlist == "auto" and table is None and bundle.spec.decoding == "autoregressive":
        raise ConfigError(
            f"shortlist='auto' refused: {bundle.path} has no shortlist; build one from texts: "
            f"fatdeploy shortlist {bundle.path} FILE"
        )
