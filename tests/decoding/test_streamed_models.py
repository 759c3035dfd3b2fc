"""Streams of models: they send what generate returns, in ids and in text; stops and prefixes as text."""

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fatdeploy
from fatdeploy import BackendUnavailable, ConfigError, DecodeOptions, Event, Hypothesis, Model, SpecMismatch
from tests.support.bundles import bundle_of
from tests.support.engines.gated import collected, eventually
from tests.support.text.spellings import KINDS, byte_level_spelling, byte_spelling, tokenizer_of
from tests.support.text.texts import bundle_with_text, words

TINY = "transformer-tiny"


@cache
def loaded(preset: str) -> Model:
    return fatdeploy.load(bundle_of(preset).path, threads=1, spinning=False)


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    bundle = bundle_with_text(tmp_path_factory.mktemp("text") / "bundle")
    return fatdeploy.load(bundle.path, threads=1, spinning=False)


OPTIONS = {
    "greedy": DecodeOptions(max_new_tokens=12),
    "scores": DecodeOptions(max_new_tokens=12, scores=True),
    "samples": DecodeOptions(max_new_tokens=12, sample=True, seed=3),
    "controls": DecodeOptions(max_new_tokens=12, no_repeat_ngram_size=2, min_new_tokens=5),
    "prefix": DecodeOptions(max_new_tokens=12, prefix=(9, 30)),
}


def joined(events: list[Event]) -> tuple[tuple[int, ...], str | None, Hypothesis | None]:
    """Return the tokens, text and hypothesis of all events of a stream together."""
    texts = [event.text for event in events]
    assert all(event.hypothesis is None for event in events[:-1])
    assert all((text is None) == (texts[0] is None) for text in texts)
    tokens = tuple(token for event in events for token in event.tokens)
    return tokens, None if texts[0] is None else "".join(text or "" for text in texts), events[-1].hypothesis


@pytest.mark.parametrize("choice", OPTIONS)
@pytest.mark.parametrize("preset", [TINY, "fat-tiny"])
def test_a_stream_gives_what_generate_gives(preset: str, choice: str) -> None:
    model, source = loaded(preset), [9, 30, 12, 7]
    [whole] = model.generate([source], OPTIONS[choice])
    events = list(model.stream(np.array(source, np.int32), OPTIONS[choice]))
    assert joined(events) == (whole.tokens, None, whole)
    assert len(events) >= 12
    assert asyncio.run(collected(model.stream(source, OPTIONS[choice]))) == events


def test_a_parallel_model_sends_everything_in_one_event() -> None:
    model = loaded("transformer-nat-tiny")
    [whole] = model.generate([[9, 30, 12]])
    assert list(model.stream([9, 30, 12])) == [Event(whole.tokens, None, whole)]
    assert len(whole.tokens) > 1


def test_text_is_sent_in_pieces(text_model: Model) -> None:
    options = DecodeOptions(max_new_tokens=6)
    events = list(text_model.stream("w9 w30 w12", options))
    assert [event.text for event in events] == ["w31", " w8", " w31", " w8", " w31", " w8"]
    assert joined(events)[1:] == (words(events[-1].hypothesis.tokens), text_model.generate(["w9 w30 w12"], options)[0])


def test_the_text_of_a_prefix_is_part_of_the_first_piece(text_model: Model) -> None:
    by_text, by_ids = (DecodeOptions(max_new_tokens=4, prefix=prefix) for prefix in ("w9 w30", (9, 30)))
    [whole] = text_model.generate([[9, 30, 12, 2]], by_ids)
    assert whole.tokens[:2] == (9, 30)
    assert text_model.generate(["w9 w30 w12"], by_text) == [whole]
    events = list(text_model.stream("w9 w30 w12", by_text))
    assert events[0].tokens == whole.tokens[:3]
    assert events[0].text == words(whole.tokens[:3])
    assert joined(events) == (whole.tokens, whole.text, whole)


def test_text_is_cut_before_a_stop_and_no_part_of_the_stop_is_sent(text_model: Model) -> None:
    # Greedily: w31 w8 w31 w8 w31 w8 w31 w26 w39 w36 w51 w28. The stop ends in the middle of a word.
    options = DecodeOptions(max_new_tokens=12, stop=["1 w8 w31 w26 w3", "w8 w40"])
    [result] = text_model.generate(["w9 w30 w12"], options)
    assert (result.finish, result.text) == ("stop", "w31 w8 w31 w8 w3")
    assert result.tokens == (31, 8, 31, 8, 31, 8, 31, 26, 39)
    events = list(text_model.stream("w9 w30 w12", options))
    assert joined(events) == (result.tokens, result.text, result)


def test_a_stop_that_is_part_of_the_prefix_ends_nothing(text_model: Model) -> None:
    plain = DecodeOptions(max_new_tokens=6, prefix="w7 w8")
    [whole] = text_model.generate(["w9 w30 w12"], plain)
    for beams in (1, 2):
        options = replace(plain, stop=["w8", "7 w8"], num_beams=beams)
        [result] = text_model.generate(["w9 w30 w12"], options)
        assert (result.finish, result.text[:5]) == ("length", "w7 w8")
        assert result.tokens == whole.tokens or beams > 1
    # A stop may begin in the prefix: the model's first token completes it.
    first = words(whole.tokens[2:3])
    options = replace(plain, stop=["w7", f"8 {first}"])
    [result] = text_model.generate(["w9 w30 w12"], options)
    assert (result.finish, result.text, result.tokens) == ("stop", "w7 w", whole.tokens[:3])
    assert joined(list(text_model.stream("w9 w30 w12", options))) == (result.tokens, result.text, result)


def test_a_stop_in_ids_is_cut_out_of_text_and_tokens(text_model: Model) -> None:
    options = DecodeOptions(max_new_tokens=12, stop=[(8, 31, 26)])
    [result] = text_model.generate(["w9 w30 w12"], options)
    assert (result.tokens, result.text) == ((31, 8, 31, 8, 31), "w31 w8 w31 w8 w31")
    assert joined(list(text_model.stream("w9 w30 w12", options))) == (result.tokens, result.text, result)


# Bytes of two- to four-byte characters, so that random tokens sometimes form a character.
BYTES_OF_SOME = {
    "byte level": byte_level_spelling("éЖ€😀 \nab"),
    "byte fallback": ["▁a", "b", "▁", ".", "\n", *byte_spelling("éЖ€😀")],
}


@pytest.mark.parametrize("kind", BYTES_OF_SOME)
def test_sampled_bytes_are_streamed_as_generate_writes_them(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(TINY)
    tokenizer = tokenizer_of(BYTES_OF_SOME[kind], KINDS[kind][1], tmp_path)
    monkeypatch.setattr(model, "_tokenizer", tokenizer)
    monkeypatch.setattr(model._reader, "needed_tokenizer", lambda: tokenizer)
    others = [token for token in range(model.spec.vocab_size) if not 3 <= token < tokenizer.n_tokens]
    stops = ["b\n", ".\n", "\n ", "\ufffda"]
    characters, stopped = set(), 0
    for seed in range(60):
        options = DecodeOptions(
            max_new_tokens=16, sample=True, temperature=3.0, seed=seed, suppress_tokens=others, stop=stops
        )
        [whole] = model.generate([[9, 30]], options)
        assert joined(list(model.stream([9, 30], options))) == (whole.tokens, whole.text, whole)
        characters |= {*(whole.text or "")}
        stopped += whole.finish == "stop"
    assert characters >= {"é", "a", "b", "\ufffd"}
    assert stopped > 3


def test_alternatives_have_text_too(text_model: Model) -> None:
    options = DecodeOptions(max_new_tokens=5, num_beams=3, num_return_sequences=3)
    [hypothesis] = text_model.generate(["w9 w30 w12"], options)
    texts = [result.text for result in (hypothesis, *hypothesis.alternatives)]
    assert texts == [words(result.tokens) for result in (hypothesis, *hypothesis.alternatives)]
    assert len(set(texts)) == 3


def test_the_last_event_reports_a_source_that_was_cut(caplog: pytest.LogCaptureFixture) -> None:
    *_, last = loaded(TINY).stream([7] * 300, DecodeOptions(max_new_tokens=3), truncate=True)
    assert last.hypothesis is not None
    assert last.hypothesis.dropped == 44
    assert caplog.messages == ["sources cut to max_source = 256: tokens dropped [44]"]


def test_changing_a_source_before_the_first_event_has_no_effect() -> None:
    model, options = loaded(TINY), DecodeOptions(max_new_tokens=8)
    source = np.array([9, 30, 12])
    [whole] = model.generate([source], options)
    stream = model.stream(source, options)
    source[:] = 40
    assert joined(list(stream))[0] == whole.tokens


@pytest.mark.parametrize(
    ("source", "options", "error", "reason"),
    [
        ([], None, SpecMismatch, "source 0: is empty"),
        ([7] * 300, None, SpecMismatch, "has 300 tokens, more than max_source = 256"),
        ([7], DecodeOptions(max_new_tokens=9999), ConfigError, "max_new_tokens must lie in 1…"),
        ("w7", None, ConfigError, r"has no tokenizer\.json: pass token ids, not text"),
        ([7], DecodeOptions(stop=["w7"]), ConfigError, r"has no tokenizer\.json: pass token ids, not text"),
        ([7], DecodeOptions(prefix="w7"), ConfigError, r"has no tokenizer\.json: pass token ids, not text"),
        (
            [7],
            DecodeOptions(num_beams=4, num_return_sequences=2),
            ConfigError,
            "stream refused: it needs num_beams = 1 and num_return_sequences = 1, found num_beams = 4, "
            "num_return_sequences = 2; .* use generate",
        ),
        ([7], DecodeOptions(sample=True, num_return_sequences=2), ConfigError, "found num_return_sequences = 2"),
    ],
)
def test_sources_and_options_that_cannot_be_streamed_are_refused_at_once(
    source: str | list[int], options: DecodeOptions | None, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        loaded(TINY).stream(source, options)


@contextmanager
def spec_of(model: Model, **changes: Any) -> Iterator[None]:
    """Give a model another contract for a while."""
    bundle = model.bundle
    model.bundle = replace(bundle, manifest=replace(bundle.manifest, spec=replace(bundle.spec, **changes)))
    try:
        yield
    finally:
        model.bundle = bundle


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (DecodeOptions(stop=["w7"]), "stop"),
        (DecodeOptions(prefix="w7"), "prefix"),
        (DecodeOptions(prefix="w7", stop=["w7"]), "prefix and stop"),
    ],
)
def test_a_model_that_writes_from_right_to_left_takes_no_text_to_begin_or_stop_with(
    text_model: Model, options: DecodeOptions, named: str
) -> None:
    with (
        spec_of(text_model, target_order="right_to_left"),
        pytest.raises(ConfigError, match=f"^{named} refused: this model writes from right to left.*pass token ids"),
    ):
        text_model.generate(["w9"], options)


def test_a_model_that_writes_from_right_to_left_takes_no_text_as_a_sources_prefix(text_model: Model) -> None:
    with (
        spec_of(text_model, target_order="right_to_left"),
        pytest.raises(ConfigError, match=r"^prefix refused: this model writes from right to left.*pass token ids"),
    ):
        text_model.generate([[5, 6]], prefixes=["w5"])


def test_a_prefix_that_is_not_valid_unicode_is_refused(text_model: Model) -> None:
    with pytest.raises(SpecMismatch, match=r"a text must be valid Unicode, found 'w5 \\udc80'"):
        text_model.stream("w5", DecodeOptions(prefix="w5 \udc80"))


def test_stop_texts_without_the_tokenizers_package_say_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = bundle_with_text(tmp_path / "bundle")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    model = fatdeploy.load(bundle.path)
    with pytest.raises(BackendUnavailable, match=r"pip install 'fatdeploy\[text\]'"):
        model.stream([5], DecodeOptions(stop=["w7"]))
    assert list(model.stream([5], DecodeOptions(max_new_tokens=1)))[-1].text is None


@pytest.mark.parametrize("preset", [TINY, "fat-tiny"])
def test_many_concurrent_streams_match_single_ones_and_release_every_state(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, options = loaded(preset), DecodeOptions(max_new_tokens=16)
    engine: Any = model._engine
    states: list[str] = []
    encode, release = engine.encode, engine.release
    monkeypatch.setattr(engine, "encode", lambda *all_: (states.append("out"), encode(*all_))[1])
    monkeypatch.setattr(engine, "release", lambda state: (release(state), states.append("back"))[0])
    draw = np.random.default_rng(8)
    sources = [draw.integers(3, 64, draw.integers(1, 6)).tolist() for _ in range(24)]
    alone = [result.tokens for result in model.generate(sources, options, batch_tokens=1)]
    states.clear()

    async def some(index: int) -> tuple[int, ...]:
        """Read a stream to its end, or leave it on the way."""
        tokens: list[int] = []
        async for event in model.stream(sources[index], options):
            tokens += event.tokens
            if index % 3 == 1 and len(tokens) > index // 3:
                break
        return tuple(tokens)

    async def together() -> list[tuple[int, ...]]:
        tasks = [asyncio.create_task(some(index)) for index in range(len(sources))]
        await asyncio.sleep(0.01)
        for task in tasks[2::3]:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [() if isinstance(result, BaseException) else result for result in results]

    targets = asyncio.run(together())
    for index in range(len(sources)):
        assert alone[index][: len(targets[index])] == targets[index]
        assert index % 3 or len(targets[index]) == len(alone[index])
    assert eventually(lambda: states.count("out") == states.count("back"))
    assert states.count("out") >= 16
    # The buffers can be used again.
    assert [result.tokens for result in model.generate(sources, options, batch_tokens=1)] == alone
