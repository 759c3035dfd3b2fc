"""Options that come with a bundle: used without a word, changed by the caller, refused where they are impossible."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fatdeploy
from fatdeploy import BundleError, ConfigError, DecodeOptions, Hypothesis
from fatdeploy.bundle import read_bundle, write_manifest
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.manifest import GenerationRecord
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import OPTIONS
from fatdeploy.runtimes.defaults import changed_options, default_options, options_from_record, stated_options
from fatdeploy.runtimes.model import Model
from tests.support.bundles import bundle_of, bundle_with_defaults, model_of, shared_bundle

TINY = "transformer-tiny"

SOURCES = [[9, 30, 12], [40, 41], [20, 33, 8, 50]]
BEAMS = {
    "num_beams": 4,
    "num_return_sequences": 2,
    "max_new_tokens": 12,
    "suppress_tokens": [2, 31],
    "length_penalty": 0.6,
}
GROUPS = {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}
SAMPLES = {"sample": True, "temperature": 0.7, "top_k": 9, "num_return_sequences": 3, "max_new_tokens": 12}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bundle = bundle_with_defaults(tmp_path_factory.mktemp("beams") / "bundle", BEAMS)
    with fatdeploy.load(bundle.path, threads=1, spinning=False) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    bundle = bundle_with_defaults(tmp_path_factory.mktemp("samples") / "bundle", SAMPLES)
    with fatdeploy.load(bundle.path, threads=1, spinning=False) as loaded:
        yield loaded


def expected(**values: Any) -> list[tuple[int, ...]]:
    return tokens(decode(EagerEngine(model_of(TINY)), SOURCES, DecodeOptions(**values)))


def tokens(results: list[Hypothesis]) -> list[tuple[int, ...]]:
    return [hypothesis.tokens for result in results for hypothesis in (result, *result.alternatives)]


# A bundle carries them.


def test_an_export_writes_them_and_a_reader_finds_them(tmp_path: Path) -> None:
    record = GenerationRecord({**BEAMS, "stop": [[5], "text"]}, {"top_h": 0.5, "later": {"key": [None, "x"]}})
    origin = Origin(name=TINY, generation=record)
    bundle = shared_bundle("with-generation", lambda folder: write_bundle(model_of(TINY), folder, origin=origin))
    assert bundle.manifest.generation == record
    assert default_options(bundle) == DecodeOptions(**{**BEAMS, "stop": [[5], "text"]})
    assert bundle.digest != bundle_of(TINY).digest
    # Whoever writes the manifest again keeps them.
    shutil.copytree(bundle.path, tmp_path / "copy")
    assert write_manifest(tmp_path / "copy", replace(bundle.manifest, opset=1)).manifest.generation == record


def test_a_bundle_without_them_is_greedy() -> None:
    assert bundle_of(TINY).manifest.generation is None
    assert default_options(bundle_of(TINY)) == DecodeOptions()
    with fatdeploy.load(bundle_of(TINY).path, threads=1, spinning=False) as model:
        assert model.options == DecodeOptions()
        assert tokens(model.generate(SOURCES, max_new_tokens=12)) == expected(max_new_tokens=12)


def test_an_export_with_impossible_options_stops_before_anything_is_written(tmp_path: Path) -> None:
    record = GenerationRecord({"num_beams": 0, "beams": 4})
    with pytest.raises(
        ConfigError, match="there is no option beams; num_beams must be a whole number from 1 up, found 0"
    ):
        write_bundle(model_of(TINY), tmp_path / "bundle", origin=Origin(name=TINY, generation=record))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_beam": 4}, "there is no option num_beam"),
        ({"a\nb": 4}, r"there is no option 'a\\nb'"),
        (
            {"num_beams": "4", "top_p": 3},
            "num_beams must be a whole number from 1 up, found '4'; top_p must be a number",
        ),
        ({"temperature": 0.5}, r"temperature must be 1.0 without sample \(--sample\), found 0.5"),
        ({"suppress_tokens": [64]}, "suppress_tokens must be ids in 0…63, found 64"),
        ({"processors": ["print"]}, r"processors must be callables in a list, found \['print'\]"),
        ({"length_penalty": 10**400}, "length_penalty must be a number from -8 to 8, found 1000"),
        ({"num_beams": 33}, r"num_beams must lie in 1…32 \(half the vocabulary\), found 33"),
        ({"length_candidates": 3}, "length_candidates must be 1: this model has no length head"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_bundle_with_impossible_options_is_refused_by_name(tmp_path: Path, options: dict, reason: str) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", options)
    with pytest.raises(
        BundleError, match=f"refused: manifest.json: generation: .*{reason}.*Export it again: fatdeploy"
    ):
        fatdeploy.load(bundle.path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=3), values, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from(sorted(OPTIONS)) | st.text(max_size=4), JSON, min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_any_json_is_options_or_one_refusal(values: dict[str, Any]) -> None:
    bundle = bundle_of(TINY)
    described = replace(bundle, manifest=replace(bundle.manifest, generation=GenerationRecord(values)))
    try:
        options = default_options(described)
    except BundleError:
        return
    assert {*values} <= {*OPTIONS}
    assert stated_options(options).keys() <= {*values}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ([], "generation: expected an object, found []"),
        ({"options": {}}, "generation.ignored: missing"),
        ({"options": [], "ignored": {}}, "generation.options: expected an object, found []"),
        ({"options": {}, "ignored": {}, "more": 1}, "generation.more: unknown"),
    ],
    ids=str,
)
def test_a_record_of_another_shape_is_refused(tmp_path: Path, change: object, reason: str) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", {})
    with pytest.raises(BundleError) as caught:
        write_manifest(bundle.path, replace(bundle.manifest, generation=change))  # type: ignore[arg-type]
    assert f"manifest.json: {reason}" in str(caught.value).replace("'", "")
    with pytest.raises(BundleError):
        read_bundle(bundle.path)


def test_lengths_beyond_the_model_are_lowered() -> None:
    spec = bundle_of(TINY).spec
    record = GenerationRecord({"max_new_tokens": 999, "min_new_tokens": 998})
    assert options_from_record(record, spec) == DecodeOptions(max_new_tokens=256, min_new_tokens=256)


# A model decodes with them, and a caller changes them.


def test_a_model_decodes_with_its_defaults_and_a_caller_replaces_or_changes_them(model: Model) -> None:
    assert model.options == DecodeOptions(**BEAMS)
    assert tokens(model.generate(SOURCES)) == expected(**BEAMS)
    assert tokens(model.generate(SOURCES, DecodeOptions(max_new_tokens=8))) == expected(max_new_tokens=8)
    changed = {**BEAMS, "length_penalty": 2.0, "max_new_tokens": 9}
    assert tokens(model.generate(SOURCES, length_penalty=2.0, max_new_tokens=9)) == expected(**changed)
    assert model.options_with(length_penalty=2.0, max_new_tokens=9) == DecodeOptions(**changed)
    plain = model.generate(SOURCES, DecodeOptions(max_new_tokens=8), num_beams=2)
    assert tokens(plain) == expected(max_new_tokens=8, num_beams=2)
    assert model.options == DecodeOptions(**BEAMS)


def test_fewer_beams_drop_the_number_of_targets_that_the_bundle_asked_for(model: Model) -> None:
    greedy = {"max_new_tokens": 12, "suppress_tokens": [2, 31], "length_penalty": 0.6}
    assert model.options_with(num_beams=1) == DecodeOptions(**greedy)
    assert tokens(model.generate(SOURCES, num_beams=1)) == expected(**greedy)
    assert model.options_with(num_beams=2).num_return_sequences == 2
    with pytest.raises(ConfigError, match=r"num_return_sequences must lie in 1…1 \(num_beams\), found 2"):
        model.generate(SOURCES, num_beams=1, num_return_sequences=2)
    with pytest.raises(ConfigError, match=r"num_return_sequences must lie in 1…4 \(num_beams\), found 5"):
        model.generate(SOURCES, num_return_sequences=5)


def test_no_sampling_drops_what_only_sampling_needs(sampler: Model) -> None:
    assert tokens(sampler.generate(SOURCES)) == expected(**SAMPLES)
    assert sampler.options_with(sample=False) == DecodeOptions(max_new_tokens=12)
    assert tokens(sampler.generate(SOURCES, sample=False)) == expected(max_new_tokens=12)
    assert sampler.options_with(sample=False, num_beams=3) == DecodeOptions(
        max_new_tokens=12, num_beams=3, num_return_sequences=3
    )
    with pytest.raises(ConfigError, match=r"temperature must be 1.0 without sample \(--sample\), found 0.5"):
        sampler.generate(SOURCES, sample=False, temperature=0.5)
    # Options of the caller are not dropped.
    with pytest.raises(ConfigError, match=r"temperature must be 1\.0 without sample"):
        sampler.generate(SOURCES, DecodeOptions(sample=True, temperature=0.5), sample=False)


@pytest.mark.parametrize(
    ("defaults", "changes", "options"),
    [
        # As in Hugging Face's generate: EOS stays forbidden up to the caller's limit.
        (
            {"min_new_tokens": 20, "max_new_tokens": 40},
            {"max_new_tokens": 10},
            {"min_new_tokens": 10, "max_new_tokens": 10},
        ),
        ({"min_new_tokens": 20, "max_new_tokens": 40}, {"min_new_tokens": 50}, {"min_new_tokens": 50}),
        ({"max_new_tokens": 40}, {"max_new_tokens": None}, {}),
        ({"suppress_tokens": [4]}, {"suppress_tokens": ()}, {}),
        ({"early_stopping": True, "num_beams": 4}, {"num_beams": 1}, {"early_stopping": True}),
        (GROUPS, {"num_beams": 3}, {"num_beams": 3}),
        (GROUPS, {"num_beams": 6}, {**GROUPS, "num_beams": 6}),
        (GROUPS, {"sample": True}, {"num_beams": 4, "sample": True}),
        (GROUPS, {"num_beam_groups": 1}, {"num_beams": 4}),
        (GROUPS, {"diversity_penalty": 0.0}, {"num_beams": 4}),
        ({"sample": True, "top_k": 5, "num_beams": 4}, {"sample": False}, {"num_beams": 4}),
        ({"suppress_tokens": [4]}, {"suppress_tokens": np.array([5, 6])}, {"suppress_tokens": [5, 6]}),
    ],
    ids=str,
)
def test_what_the_caller_says_wins(defaults: dict, changes: dict, options: dict) -> None:
    result = changed_options(DecodeOptions(**defaults), changes)
    assert stated_options(result) == options


def test_changes_that_contradict_a_default_are_refused_if_they_need_another_change() -> None:
    with pytest.raises(ConfigError, match="diversity_penalty must be above 0 with several num_beam_groups, found 0"):
        changed_options(DecodeOptions(num_beams=4), {"num_beam_groups": 2})
    with pytest.raises(ConfigError, match="num_beam_groups must divide num_beams = 4, found 3"):
        changed_options(DecodeOptions(**GROUPS), {"num_beam_groups": 3})


def test_wrong_changes_are_refused_with_every_reason(model: Model) -> None:
    with pytest.raises(
        ConfigError, match=r"num_beams must be .* found 'x'; .*sample must be True or False, found 1; top_p"
    ):
        model.generate(SOURCES, num_beams="x", sample=1, top_p=7)
    with pytest.raises(ConfigError, match="min_new_tokens must lie in 0…3"):
        model.generate(SOURCES, min_new_tokens=4, max_new_tokens=3)


@pytest.mark.parametrize("options", [None, DecodeOptions()], ids=["defaults", "options"])
def test_an_unknown_change_is_refused_with_near_matches(model: Model, options: DecodeOptions | None) -> None:
    near = "there is no option num_beam; there is num_beams"
    with pytest.raises(ConfigError, match=near):
        model.generate(SOURCES, options, num_beam=4)
    with pytest.raises(ConfigError, match=near):
        model.stream(SOURCES[0], options, num_beam=4)
    with pytest.raises(ConfigError, match="there is no option xyz; there is bad_words, "):
        model.generate(SOURCES, options, xyz=4)


def test_a_prefix_takes_its_room_from_the_default_length_and_not_from_the_callers(tmp_path: Path) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", {"max_new_tokens": 256, "min_new_tokens": 255})
    with fatdeploy.load(bundle.path, threads=1, spinning=False) as model:
        [result] = model.generate([[9, 30, 12]], prefix=[7, 8])
        assert (result.tokens[:2], len(result.tokens), result.finish) == ((7, 8), 256, "length")
        with pytest.raises(ConfigError, match=r"max_new_tokens must lie in 1…254 \(the model's max_target without"):
            model.generate([[9, 30, 12]], prefix=[7, 8], max_new_tokens=255)


def test_a_prefix_per_source_takes_its_room_and_no_other_sources(tmp_path: Path) -> None:
    bundle = bundle_with_defaults(tmp_path / "bundle", {"max_new_tokens": 255, "suppress_tokens": [2]})
    prefixes = [None, [7], [7, 8, 9]]
    with fatdeploy.load(bundle.path, threads=1, spinning=False) as model:
        together = model.generate(SOURCES, prefixes=prefixes)
        assert [len(result.tokens) for result in together] == [255, 256, 256]
        alone = [
            model.generate([source], prefixes=[prefix])[0] for source, prefix in zip(SOURCES, prefixes, strict=True)
        ]
        assert together == alone
        # The same for a limit that the caller states.
        stated = model.generate(SOURCES, prefixes=prefixes, max_new_tokens=254)
        assert [len(result.tokens) for result in stated] == [254, 255, 256]


def test_a_stream_needs_one_beam_and_says_how_to_ask_for_it(model: Model, sampler: Model) -> None:
    with pytest.raises(
        ConfigError, match=r"found num_beams = 4, num_return_sequences = 2; .* pass num_beams=1 \(--beams 1"
    ):
        model.stream(SOURCES[0])
    with model.stream(SOURCES[0], num_beams=1) as stream:
        streamed = tuple(token for event in stream for token in event.tokens)
    assert streamed == model.generate(SOURCES[:1], num_beams=1)[0].tokens
    with pytest.raises(ConfigError, match="found num_return_sequences = 3"):
        sampler.stream(SOURCES[0])
    assert [*sampler.stream(SOURCES[0], num_return_sequences=1)]
