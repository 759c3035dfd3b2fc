"""Options that need every kind of processor, and rows of different lengths to try them on."""

from collections.abc import Sequence

import numpy as np

from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.chain import processors_of
from fatdeploy.runtimes.decoding.processors.protocol import History, Processor
from fatdeploy.runtimes.decoding.prompts import prompts_of
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.decoding.stops import Stops
from fatdeploy.runtimes.engines.protocol import Floats
from tests.support.engines.tables import WORDS

ROWS = [[1], [1, 3, 4, 3], [1, 5, 6, 5, 6, 5], [1, 3]]
SOURCES = [[5, 6, 7], [3, 4, 9], [8], [2, 3]]
GARBAGE = 3  # stands after the last token of a short row, and would change its scores if it counted
OPTIONS: dict[str, DecodeOptions] = {
    "single tokens": DecodeOptions(bad_words=[[7]], sequence_bias=[([8], 2.0)]),
    "sequences": DecodeOptions(bad_words=[[3, 4], [5, 6], [3, 3]], sequence_bias=[([4, 3, 9], 2.0), ([1, 3, 5], 1.0)]),
    "fewest tokens": DecodeOptions(min_new_tokens=3),
    "forced": DecodeOptions(forced_bos_id=9, forced_eos_id=2, max_new_tokens=6, forced_tokens=[(1, 11), (3, 12)]),
    "growing end": DecodeOptions(exponential_decay_length_penalty=(2, 1.5)),
    "suppressed": DecodeOptions(suppress_tokens=[4, 5], begin_suppress_tokens=[6]),
    "repetition": DecodeOptions(repetition_penalty=1.5, encoder_repetition_penalty=1.2),
    "n-grams": DecodeOptions(no_repeat_ngram_size=2, encoder_no_repeat_ngram_size=2),
}


def processors(options: DecodeOptions, sources: Sequence[Sequence[int]] = SOURCES) -> list[Processor]:
    """Return the processors for a model of few words."""
    prompts = prompts_of(options, WORDS, None, len(sources))
    return processors_of(Task(options, WORDS, [np.array(row) for row in sources], prompts, Stops(options, None)))


def applied(chain: list[Processor], history: History, scores: Floats) -> Floats:
    """Return scores after all processors; they stay as they are."""
    result = scores.copy()
    for processor in chain:
        result = processor(history, result)
    return result


def ragged_history() -> History:
    """Return what the rows have read."""
    tokens = np.full((len(ROWS), 6), GARBAGE)
    for index, row in enumerate(ROWS):
        tokens[index, : len(row)] = row
    return History(tokens, np.array([len(row) for row in ROWS]), np.arange(len(ROWS)))
