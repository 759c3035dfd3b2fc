"""A prefix per source: rows whose prefixes differ in length decode together, and each is what it is alone."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.prompts import prompts_of
from fatdeploy.runtimes.engines.protocol import Floats, Want
from fatdeploy.spec import Tokens
from tests.support.engines.tables import ALIGNED, WORDS, TableEngine

EOS = 2
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PARALLEL = type(WORDS)(**{**WORDS.__dict__, "decoding": "parallel", "length": "eos"})


def text_of(tokens: object) -> str:
    return "".join(LETTERS[token] for token in tokens)  # type: ignore[attr-defined]


def shy(tokens: Tokens, scores: Floats) -> Floats:
    """Make the first token of each row and its last less likely: a row that reads another's tokens shows."""
    rows = np.arange(len(tokens))
    scores[rows, tokens[:, min(1, tokens.shape[1] - 1)]] -= 1.5
    scores[rows, tokens[:, -1]] -= 1
    return scores


def drawn_options(random: np.random.Generator) -> dict[str, Any]:
    """Return a search and some controls, many of which count from the end of the prompt."""

    def maybe(value: object, otherwise: object) -> Any:
        return value if random.random() < 0.3 else otherwise

    beams = int(random.integers(1, 5))
    sampled = bool(random.random() < 0.4)
    grouped = not sampled and beams in (2, 4) and random.random() < 0.4
    limit = int(random.integers(1, 13))
    return {
        "num_beams": beams,
        "num_beam_groups": int(random.choice([2, beams])) if grouped else 1,
        "diversity_penalty": 1.5 if grouped else 0.0,
        "num_return_sequences": int(random.integers(1, 4 if sampled and beams == 1 else beams + 1)),
        "sample": sampled,
        "top_p": 0.9 if sampled else 1.0,
        "early_stopping": [True, False, "never"][random.integers(3)],
        "length_penalty": maybe(float(random.uniform(-0.5, 2)), 1.0),
        "max_new_tokens": maybe(None, limit),
        "min_new_tokens": maybe(int(random.integers(1, limit + 1)), 0),
        "forced_tokens": maybe([(int(random.integers(3)), 7), (3, 8)], ()),
        "bad_words": maybe([[4], [5, 6]], ()),
        "stop": maybe([[9, 10], [11], "kl", "p"], ()),
        "repetition_penalty": maybe(1.4, 1.0),
        "no_repeat_ngram_size": maybe(2, 0),
        "processors": maybe([shy], ()),
        "shortlist": maybe(list(range(3, 20)), None),
        "forced_bos_id": maybe(6, None),
        "forced_eos_id": maybe(EOS, None),
        "begin_suppress_tokens": maybe([3, 12], ()),
        "exponential_decay_length_penalty": maybe((2, 1.3), None),
        "encoder_no_repeat_ngram_size": maybe(2, 0),
        "encoder_repetition_penalty": maybe(1.5, 1.0),
        "sequence_bias": maybe([([7], 2.0), ([8, 9], 1.0)], ()),
        "eos_ids": maybe([EOS, 20], ()),
        "renormalize": bool(random.random() < 0.3),
        "start_id": maybe(int(random.integers(24)), None),
        "scores": bool(random.random() < 0.5),
    }


def decoded(sources: list[list[int]], options: DecodeOptions, prefixes: list[Any] | None = None) -> list[Hypothesis]:
    engine = TableEngine(spec=ALIGNED)
    with Decoding(engine, sources, options, prefixes=prefixes, text_of=text_of) as decoding:
        results = decoding.run()
    assert engine.n_states == 0
    return results


def weights_of(result: Hypothesis) -> list[Any]:
    targets = (result, *result.alternatives)
    return [target.alignments.tolist() for target in targets if target.alignments is not None]


@pytest.mark.parametrize("seed", range(300))
def test_sources_with_prefixes_of_any_lengths_are_what_they_are_alone(seed: int) -> None:
    random = np.random.default_rng(seed)
    options = DecodeOptions(**drawn_options(random))
    count, longest = int(random.integers(2, 7)), int(random.integers(1, 15))
    sources = [random.integers(3, 24, random.integers(1, 8)).tolist() for _ in range(count)]
    # EOS and stop sequences may be part of a prefix, where they end nothing.
    prefixes = [random.integers(0, 24, random.integers(longest + 1)).tolist() for _ in range(count)]
    together = decoded(sources, options, prefixes)
    for result, source, prefix in zip(together, sources, prefixes, strict=True):
        [alone] = decoded([source], replace(options, prefix=prefix))
        assert result == alone
        assert weights_of(result) == weights_of(alone)
        assert result.tokens[: len(prefix)] == tuple(prefix)


def test_the_common_length_is_read_in_one_call_and_the_rest_while_others_choose() -> None:
    engine = TableEngine()
    prefixes = [[9, 8, 7, 6, 5], [3, 4], [10, 11, 12]]
    options = DecodeOptions(max_new_tokens=6, min_new_tokens=6)
    results = decode(engine, [[5], [6], [7]], options, prefixes=prefixes)
    # BOS and one token, which nobody chooses from; then one place after the other, until the longest row ends.
    assert engine.calls[:2] == [((3, 2), Want.HIDDEN), ((3, 1), Want.LOGITS)]
    assert len(engine.calls) == 1 + 6 + 3
    assert engine.capacity.target_positions == 5 + 6
    assert [len(result.tokens) for result in results] == [11, 8, 9]


def test_beams_of_a_source_do_not_branch_inside_its_prefix() -> None:
    rows: list[Any] = []

    def seen(tokens: Tokens, scores: Floats) -> Floats:
        rows.append(tokens.tolist())
        return scores

    options = DecodeOptions(num_beams=3, max_new_tokens=2, processors=[seen])
    decode(TableEngine(), [[5], [6]], options, prefixes=[[], [3, 4]])
    # The first source has chosen twice and is gone when the second begins, in three rows that are still alike.
    assert [len(read) for read in rows] == [3, 3, 3, 3]
    assert rows[2] == [[1, 3, 4]] * 3
    assert len({tuple(row) for row in rows[3]}) == 3


def test_a_source_without_a_prefix_of_its_own_has_that_of_the_options() -> None:
    options = DecodeOptions(prefix=[9, 8], max_new_tokens=5)
    results = decode(TableEngine(), [[5], [5], [5]], options, prefixes=[None, [7], np.array([], np.int64)])
    assert [result.tokens[:2] for result in results[:1]] == [(9, 8)]
    assert results[0] == decode(TableEngine(), [[5]], options)[0]
    assert results[1] == decode(TableEngine(), [[5]], replace(options, prefix=[7]))[0]
    assert results[2] == decode(TableEngine(), [[5]], replace(options, prefix=()))[0]


@pytest.mark.parametrize("beams", [1, 2])
def test_the_default_limit_is_the_room_that_a_prefix_leaves(beams: int) -> None:
    endless = TableEngine(lambda source, tokens: 30 * np.eye(24, dtype=np.float32)[5])
    results = decode(endless, [[5], [6]], DecodeOptions(num_beams=beams), prefixes=[[7] * 30, []])
    assert [result.tokens for result in results] == [(7,) * 30 + (5, 5), (5,) * 32]


def test_a_deadline_inside_a_prefix_leaves_the_prefix() -> None:
    with Decoding(TableEngine(), [[5], [6]], DecodeOptions(min_new_tokens=4), prefixes=[[], [9, 8, 7]]) as decoding:
        assert decoding.advance()
        assert [len(decoding.tokens_so_far(source)) for source in range(2)] == [1, 3]
        short, long = decoding.results()
    assert (len(short.tokens), short.finish) == (1, "cancelled")
    assert (long.tokens, long.finish) == ((9, 8, 7), "cancelled")


def test_a_start_takes_the_place_of_the_models() -> None:
    read: list[Any] = []

    def seen(tokens: Tokens, scores: Floats) -> Floats:
        read.append(tokens[:, 0].tolist())
        return scores

    results = decode(TableEngine(), [[5], [6]], DecodeOptions(start_id=17, max_new_tokens=6, processors=[seen]))
    assert {token for starts in read for token in starts} == {17}
    plain = decode(TableEngine(), [[5], [6]], DecodeOptions(max_new_tokens=6))
    assert all(result.tokens != other.tokens for result, other in zip(results, plain, strict=True))
    assert decode(TableEngine(), [[5]], DecodeOptions(start_id=1)) == decode(TableEngine(), [[5]])


@pytest.mark.parametrize(
    ("prefixes", "reason"),
    [
        ([[3]], "prefixes refused: expected one per source, 2 in all, found 1"),
        ("ab", "prefixes refused: expected a list with one prefix per source, found 'ab'"),
        ([[3, 24], None], "prefixes refused: source 0: prefix must be ids in 0…23, found 24$"),
        ([[], [3] * 32], r"source 1: prefix must have 0…31 tokens \(below max_target\), found 32"),
        ([[1.5], "text"], r"source 0: prefix must be token ids, found \[1.5\]; source 1: .* found 'text'"),
    ],
    ids=str,
)
def test_a_prefix_that_cannot_be_read_is_refused_before_anything_runs(prefixes: Any, reason: str) -> None:
    engine = TableEngine()
    with pytest.raises(ConfigError, match=reason):
        decode(engine, [[5], [6]], DecodeOptions(max_new_tokens=7), prefixes=prefixes)
    assert (engine.n_states, engine.calls) == (0, [])


def test_a_prefix_lowers_the_limit_of_its_own_source_to_the_room_that_it_leaves() -> None:
    options = DecodeOptions(max_new_tokens=7)
    prompts = prompts_of(options, TableEngine().spec, [[], [3] * 25, [3] * 26, None], 4)
    assert [prompt.limit for prompt in prompts] == [7, 7, 6, 7]
    # A least number of tokens is a promise: it is not lowered.
    reason = r"source 1: min_new_tokens must lie in 0…6 \(the model's max_target without the prefix\), found 7"
    with pytest.raises(ConfigError, match=reason):
        prompts_of(replace(options, min_new_tokens=7), TableEngine().spec, [[], [3] * 26], 2)


@pytest.mark.parametrize("start_id", [0, 5])
def test_a_parallel_model_has_neither_a_prefix_nor_a_start(start_id: int) -> None:
    engine = TableEngine(spec=PARALLEL)
    with pytest.raises(ConfigError, match=r"source 1: prefix has no meaning for a parallel model[^;]*$"):
        decode(engine, [[5], [6]], prefixes=[[], [3]])
    with pytest.raises(ConfigError, match=r"refused: start_id has no meaning for a parallel model[^;]*$"):
        decode(engine, [[5]], DecodeOptions(start_id=start_id))
    with pytest.raises(ConfigError, match=r"refused: prefix has no meaning for a parallel model[^;]*$"):
        decode(engine, [[5]], DecodeOptions(prefix=[3]))
