"""Rows of different lengths in one step: processors give each row what they give it alone."""

import numpy as np
import pytest

from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.processors.protocol import rectangular
from tests.support.decoding.processors import OPTIONS, ROWS, applied, processors, ragged_history
from tests.support.engines.tables import WORDS


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_row_among_rows_of_other_lengths_has_the_scores_it_has_alone(options: DecodeOptions) -> None:
    chain = processors(options)
    scores = np.random.default_rng(3).normal(0, 2, (len(ROWS), WORDS.vocab_size)).astype(np.float32)
    together = applied(chain, ragged_history(), scores)
    for index, row in enumerate(ROWS):
        alone = applied(chain, rectangular(np.array([row]), np.array([index])), scores[index : index + 1])
        np.testing.assert_array_equal(together[index], alone[0])
    assert (together != scores).any()


def test_all_processors_but_a_callers_own_take_rows_of_different_lengths() -> None:
    assert all(processor.ragged for options in OPTIONS.values() for processor in processors(options))
    own = processors(DecodeOptions(processors=[lambda _, scores: scores], suppress_tokens=[4]))
    assert [processor.ragged for processor in own] == [True, False]
