"""How to decode: every option with its bounds and its help. Errors come before any work."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.decoding.bounds import (
    Flag,
    Number,
    Rule,
    Whole,
    all_fit,
    are_biased_ids,
    are_ids,
    are_start_and_factor,
    records_of,
)
from fatdeploy.runtimes.decoding.model_limits import wrong_for_model

if TYPE_CHECKING:
    # Not at run time: the command line makes its options from this file, and help must not need numpy.
    from fatdeploy.runtimes.engines.protocol import Floats
    from fatdeploy.spec import ModelSpec, Tokens

EarlyStopping = bool | Literal["never"]
Ids = Sequence[int]

POSITIVE = Number(low=0, low_open=True, expected="a number above 0")
FRACTION = Number(low=0, low_open=True, high=1, expected="a number above 0, at most 1")
# To the power of more, the lengths of long targets are beyond a float32.
PENALTY = Number(low=-8, high=8, expected="a number from -8 to 8")
FROM_ZERO = Number(low=0, high=1, high_open=True, expected="a number from 0, below 1")
IDS = Rule("token ids", are_ids)


class LogitsProcessor(Protocol):
    """Changes scores before a token is chosen. Rows are independent: the result of one must not depend on another."""

    def __call__(self, tokens: "Tokens", scores: "Floats") -> "Floats":
        """Return scores [R, V] for rows that have read ``tokens`` [R, n], including BOS; may change them in place."""
        ...


def _is_auto(value: object) -> bool:
    return isinstance(value, str) and value == "auto"


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How to decode. Defaults are greedy; names and meanings are those of Hugging Face's ``generate``.

    ``max_new_tokens`` counts EOS; the default is what the model has room for. A ``prefix`` begins every target: ids in
    the order of generation, or text if there is a tokenizer. ``stop`` sequences, ids or text, end a target and are not
    part of it. ``eos_ids`` are all tokens that end a target; the default is the model's EOS. A ``shortlist`` contains
    the only tokens that may be chosen, besides EOS; "auto" is the bundle's own, a list per source. ``forced_tokens``
    are pairs: a number of new tokens, and the token that follows them; ``forced_bos_id`` is the first token if there is
    no prefix, ``forced_eos_id`` the last one at the limit. ``sequence_bias`` adds to the scores of tokens that complete
    a sequence. ``exponential_decay_length_penalty`` is a pair: after that number of new tokens, EOS becomes more likely
    by a factor per token. ``renormalize`` matters to beams alone: the probabilities that processors leave sum to 1
    again. ``scores`` requests log-probabilities where choosing tokens does not need them (beams always have them).
    ``seed`` makes samples repeatable: each source has its own generators, whatever else is in its batch. ``timeout_s``
    limits a call: unfinished targets are then ``cancelled``.
    """

    max_new_tokens: Annotated[int | None, Whole(1), "Most new tokens per target (default: the model's limit)."] = None
    min_new_tokens: Annotated[int, Whole(0), "Fewest new tokens per target, not counting EOS."] = 0
    num_beams: Annotated[int, Whole(1), "Beams of a beam search, with Hugging Face's semantics; 1 is greedy."] = 1
    length_penalty: Annotated[
        float, PENALTY, "Beams compare scores divided by their length to this power: above 1 prefers long targets."
    ] = 1.0
    early_stopping: Annotated[
        EarlyStopping,
        Rule(
            "True, False or 'never'",
            lambda value: isinstance(value, bool) or (isinstance(value, str) and value == "never"),
        ),
        "Stop when as many targets as beams are complete; 'never': only when none can improve.",
    ] = False
    num_beam_groups: Annotated[int, Whole(1), "Groups of beams, each of which avoids the tokens of the others."] = 1
    diversity_penalty: Annotated[
        float,
        Number(low=0, expected="a number from 0 up"),
        "Subtract this from a token's score for each beam of an earlier group that chooses it at the same step.",
    ] = 0.0
    num_return_sequences: Annotated[int, Whole(1), "Targets per source: the best beams, or this number of samples."] = 1
    sample: Annotated[bool, Flag(), "Draw tokens at random instead of taking the best."] = False
    temperature: Annotated[float, POSITIVE, "Below 1, samples are more likely ones."] = 1.0
    top_k: Annotated[int, Whole(0), "Draw from this number of best tokens; 0 is all."] = 0
    top_p: Annotated[float, FRACTION, "Draw from the fewest tokens that reach this probability together."] = 1.0
    min_p: Annotated[
        float, FROM_ZERO, "Draw from tokens with at least this fraction of the best token's probability."
    ] = 0.0
    typical_p: Annotated[
        float, FRACTION, "Draw from the tokens of most typical probability that reach this probability together."
    ] = 1.0
    epsilon_cutoff: Annotated[float, FROM_ZERO, "Draw from tokens with at least this probability."] = 0.0
    eta_cutoff: Annotated[
        float, FROM_ZERO, "Draw from tokens with at least this probability, less where many tokens are likely."
    ] = 0.0
    seed: Annotated[int, Whole(0), "Random seed for sampling."] = 0
    prefix: Annotated[
        Ids | str,
        Rule("token ids or text", lambda value: isinstance(value, str) or are_ids(value)),
        "Beginning of every target; token ids with --ids.",
    ] = ()
    start_id: Annotated[int | None, Whole(0), "First token that a target reads (default: the model's start)."] = None
    repetition_penalty: Annotated[float, POSITIVE, "Above 1, earlier tokens become less likely."] = 1.0
    encoder_repetition_penalty: Annotated[float, POSITIVE, "Above 1, tokens of the source become more likely."] = 1.0
    no_repeat_ngram_size: Annotated[int, Whole(0), "Never repeat a sequence of N tokens."] = 0
    encoder_no_repeat_ngram_size: Annotated[int, Whole(0), "Never repeat a sequence of N tokens of the source."] = 0
    suppress_tokens: Annotated[Ids, IDS, "Never choose this token."] = ()
    begin_suppress_tokens: Annotated[Ids, IDS, "Never choose this token first."] = ()
    forced_bos_id: Annotated[int | None, Whole(0), "Choose this token first, if there is no prefix."] = None
    forced_eos_id: Annotated[int | None, Whole(0), "Choose this token last, where a target reaches its limit."] = None
    forced_tokens: Annotated[
        Sequence[tuple[int, int]],
        Rule(
            "pairs: number of tokens before, token id",
            lambda value: all_fit(value, lambda pair: are_ids(pair) and len(pair) == 2),
        ),
        "Choose this token after N new ones.",
    ] = ()
    bad_words: Annotated[
        Sequence[Ids],
        Rule("lists of token ids, none empty", lambda value: all_fit(value, lambda word: are_ids(word, 1))),
        "Never choose these token ids in a row; put them in quotes.",
    ] = ()
    sequence_bias: Annotated[
        Sequence[tuple[Ids, float]],
        Rule("pairs: token ids, number to add", lambda value: all_fit(value, are_biased_ids)),
        "Add a number to the score of the last of these token ids after the others; put the ids in quotes.",
    ] = ()
    exponential_decay_length_penalty: Annotated[
        tuple[int, float] | None,
        Rule("a number of tokens and a factor above 0", are_start_and_factor),
        "After N new tokens, make EOS more likely by this factor per token.",
    ] = None
    renormalize: Annotated[bool, Flag(), "Let the probabilities of beams sum to 1 after the options above."] = False
    eos_ids: Annotated[Ids, IDS, "Token that ends a target, in place of the model's EOS."] = ()
    stop: Annotated[
        Sequence[Ids | str],
        Rule(
            "texts or lists of token ids, none empty",
            lambda value: all_fit(value, lambda stop: stop != "" if isinstance(stop, str) else are_ids(stop, 1)),
        ),
        "End a target where this text begins; token ids with --ids.",
    ] = ()
    shortlist: Annotated[
        Ids | Literal["auto"] | None,
        Rule("token ids, at least one, or 'auto'", lambda value: are_ids(value, 1) or _is_auto(value)),
        "File with the only token ids that may be chosen, besides EOS, or 'auto' for what the bundle's own shortlist "
        "allows each source (fatdeploy shortlist); faster than the whole vocabulary.",
    ] = None
    processors: Annotated[
        Sequence[LogitsProcessor],
        Rule("callables in a list", lambda value: all_fit(value, callable)),
        "Functions that change scores before a token is chosen.",
    ] = ()
    scores: Annotated[bool, Flag(), "Compute log-probabilities even where choosing tokens does not need them."] = False
    length_candidates: Annotated[int, Whole(1), "Lengths to try, for parallel models with a length head."] = 1
    timeout_s: Annotated[
        float | None,
        Number(low=0, low_open=True, expected="seconds above 0"),
        "Cancel targets that are not complete by then: per --batch-size sources, or per source with --stream.",
    ] = None

    def __post_init__(self) -> None:
        for name in ID_OPTIONS:
            # As lists: the truth and the equality of arrays are ambiguous.
            object.__setattr__(self, name, _without_arrays(getattr(self, name)))
        reasons = [reason for name, record in OPTIONS.items() if (reason := record.wrong(name, getattr(self, name)))]
        reasons += [] if reasons else self._wrong_together()
        if reasons:
            raise ConfigError(in_one_line("decode options refused", reasons))

    @property
    def prefix_ids(self) -> tuple[int, ...]:
        """The prefix as tokens; a text must have been tokenised before."""
        if not self.prefix:
            return ()
        if isinstance(self.prefix, str):
            raise ConfigError("prefix refused: text needs a tokenizer and there is none; pass token ids")
        return tuple(int(token) for token in self.prefix)

    def rows_per_source(self, spec: "ModelSpec") -> int:
        """Return how many targets of a source are decoded in parallel."""
        if spec.decoding == "parallel":
            return self.length_candidates
        return max(self.num_beams, self.num_return_sequences)

    def end_ids(self, spec: "ModelSpec") -> tuple[int, ...]:
        """Return the tokens that end a target."""
        return tuple(dict.fromkeys(int(token) for token in self.eos_ids)) or (spec.eos_id,)

    def n_candidates(self, spec: "ModelSpec") -> int:
        """Return how many continuations a beam search compares: enough to go on if every beam could end in any way."""
        return (1 + len(self.end_ids(spec))) * self.num_beams

    def limit(self, spec: "ModelSpec") -> int:
        """Return the limit of new tokens for a model; one ConfigError lists everything that it cannot do."""
        if reasons := wrong_for_model(self, spec):
            raise ConfigError(in_one_line("decode options refused", reasons))
        return self.limit_after(self.prefix_ids, spec)

    def limit_after(self, prefix: Ids, spec: "ModelSpec") -> int:
        """Return the limit of new tokens after a prefix, at most what the model has room for."""
        room = spec.max_target - len(prefix)
        return room if self.max_new_tokens is None else min(self.max_new_tokens, room)

    def _wrong_together(self) -> list[str]:
        reasons = []
        if self.num_return_sequences > self.num_beams and (self.num_beams > 1 or not self.sample):
            reasons.append(
                f"num_return_sequences must lie in 1…{self.num_beams} (num_beams), found {self.num_return_sequences}"
            )
        reasons += self._wrong_groups()
        if not self.sample:
            reasons += [
                f"{name} must be {default} without sample (--sample), found {value}"
                for name, default in SAMPLING.items()
                if (value := getattr(self, name)) != default
            ]
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            reasons.append(
                f"min_new_tokens must lie in 0…{self.max_new_tokens} (max_new_tokens), found {self.min_new_tokens}"
            )
        return reasons

    def _wrong_groups(self) -> list[str]:
        groups, penalty = self.num_beam_groups, self.diversity_penalty
        reasons = []
        if self.num_beams % groups:
            reasons.append(f"num_beam_groups must divide num_beams = {self.num_beams}, found {groups}")
        if groups > 1 and self.sample:
            reasons.append(f"num_beam_groups must be 1 with sample, found {groups}")
        if (groups > 1) != (penalty > 0):
            expected = "above 0 with several num_beam_groups" if groups > 1 else "0 without num_beam_groups"
            reasons.append(f"diversity_penalty must be {expected}, found {penalty}")
        return reasons


def _without_arrays(value: Any) -> Any:
    """Return ids with lists in place of arrays, also inside lists."""
    import numpy as np

    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        entries = [_without_arrays(entry) for entry in value]
        return value if all(new is old for new, old in zip(entries, value, strict=True)) else entries
    return value


OPTIONS = records_of(DecodeOptions)

# The options that contain token ids, and the values of sampling options that have no effect.
ID_OPTIONS = (
    "prefix",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_tokens",
    "bad_words",
    "sequence_bias",
    "eos_ids",
    "stop",
    "shortlist",
)
SAMPLING = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}
