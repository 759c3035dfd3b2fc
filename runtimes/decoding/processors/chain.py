"""The processors that options request, in the order of ``transformers``."""

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import numpy as np

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.options import DecodeOptions, LogitsProcessor
from fatdeploy.runtimes.decoding.processors.biases import (
    AtLeast,
    BiasedSequences,
    Diverse,
    Forced,
    GrowingEnd,
    Suppressed,
    SuppressedAt,
)
from fatdeploy.runtimes.decoding.processors.protocol import NEG_INF, History, Processor
from fatdeploy.runtimes.decoding.processors.repetition import (
    NoRepeatedNgram,
    NoSourceNgram,
    RepetitionPenalty,
    SourcePenalty,
)
from fatdeploy.runtimes.decoding.prompts import Prompt
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.runtimes.shortlist.lists import without_never_chosen


def processors_of(task: Task) -> list[Processor]:
    """Return the processors for the options; usually there are none, which costs nothing."""
    if task.options.shortlist == "auto":
        task = replace(task, options=without_never_chosen(task.options, task.spec))
    return [*_of_sequences(task), *_of_places(task), *(Custom(processor) for processor in task.options.processors)]


def _of_sequences(task: Task) -> Iterator[Processor]:
    """Return the processors that look at the tokens so far and at the source."""
    options = task.options
    if options.sequence_bias:
        yield BiasedSequences({tuple(sequence): bias for sequence, bias in options.sequence_bias})
    if options.diversity_penalty:
        yield Diverse(options.diversity_penalty)
    if options.encoder_repetition_penalty != 1.0:
        yield SourcePenalty(options.encoder_repetition_penalty, task.sources)
    if options.repetition_penalty != 1.0:
        yield RepetitionPenalty(options.repetition_penalty)
    if options.no_repeat_ngram_size:
        yield NoRepeatedNgram(options.no_repeat_ngram_size)
    if options.encoder_no_repeat_ngram_size:
        yield NoSourceNgram(options.encoder_no_repeat_ngram_size, task.sources)
    if options.bad_words:
        yield BiasedSequences({tuple(word): float(NEG_INF) for word in options.bad_words})


def _of_places(task: Task) -> Iterator[Processor]:
    """Return the processors that look at the number of tokens so far."""
    options, begins = task.options, task.begins
    if options.min_new_tokens:
        yield AtLeast(begins + options.min_new_tokens, np.array(task.eos_ids))
    forced = [_forced_tokens(options, prompt) for prompt in task.prompts]
    if any(forced):
        yield Forced(forced)
    if options.exponential_decay_length_penalty is not None:
        start, factor = options.exponential_decay_length_penalty
        yield GrowingEnd(begins + start, factor, np.array(task.eos_ids))
    if options.suppress_tokens:
        yield Suppressed(np.array(options.suppress_tokens))
    if options.begin_suppress_tokens:
        # As in transformers: what is forced first does not count as the beginning.
        places = begins + ((begins == 1) & (options.forced_bos_id is not None))
        yield SuppressedAt(places, np.array(options.begin_suppress_tokens))


def _forced_tokens(options: DecodeOptions, prompt: Prompt) -> dict[int, int]:
    """Return the only token that may follow, per number of tokens so far; ``forced_tokens`` win."""
    begin = len(prompt.tokens)
    forced = {}
    if options.forced_bos_id is not None and not prompt.prefix:
        # As in transformers: a prefix takes the place of the forced first token.
        forced[begin] = options.forced_bos_id
    if options.forced_eos_id is not None:
        forced[prompt.end - 1] = options.forced_eos_id
    return forced | {begin + place: token for place, token in options.forced_tokens}


class Custom:
    """A caller's own processor, which sees the tokens alone: rows must be equally long."""

    ragged: ClassVar[bool] = False
    relative: ClassVar[bool] = False

    def __init__(self, processor: LogitsProcessor) -> None:
        self._processor = processor

    def __call__(self, history: History, scores: Floats) -> Floats:
        result = self._processor(history.tokens, scores)
        if getattr(result, "shape", None) != scores.shape:
            raise ConfigError(
                f"processors refused: {self._processor!r} must return scores of shape {scores.shape}, "
                f"found {getattr(result, 'shape', type(result).__name__)}"
            )
        return result
