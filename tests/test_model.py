"""What an application embeds: ids and text in, hypotheses out, from many threads at once, without torch."""

import json
import logging
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import fatdeploy
from fatdeploy import BackendUnavailable, BundleError, ConfigError, DecodeOptions, Hypothesis, SpecMismatch
from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.training.tokenizers import built_tokenizer
from fatdeploy.manifest import TOKENIZER
from fatdeploy.runtimes.decoding import sources
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.engines.ort.buffers import MOST_WAITING
from fatdeploy.runtimes.text.tokenizer_json import Kind
from tests.support.bundles import bundle_of, model_of
from tests.support.text.texts import bundle_with_coder, bundle_with_text, words

TINY = "transformer-tiny"
SHORT = DecodeOptions(max_new_tokens=12)
ROOT = Path(__file__).parent.parent


def drawn_sources(count: int) -> list[list[int]]:
    draw = np.random.default_rng(5)
    return [draw.integers(3, 64, draw.integers(1, 40)).tolist() for _ in range(count)]


@pytest.fixture(scope="module")
def text_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_with_text(tmp_path_factory.mktemp("text") / "bundle")


@pytest.mark.parametrize("preset", [TINY, "fat-tiny"])
def test_a_loaded_model_gives_the_references_tokens(preset: str) -> None:
    sources = drawn_sources(5)
    expected = decode(EagerEngine(model_of(preset)), sources, SHORT)
    with fatdeploy.load(bundle_of(preset).path, threads=1, spinning=False) as model:
        assert model.generate(sources, SHORT) == expected
        assert model.generate([np.array(sources[0], np.int32)], SHORT) == expected[:1]
        assert model.spec == bundle_of(preset).spec
        assert model.bundle.digest == bundle_of(preset).digest


@pytest.mark.parametrize("kind", ["characters", "symbols"])
def test_unknown_characters_are_logged_once_per_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: Kind
) -> None:
    coder = built_tokenizer([("abc", "D")], kind)
    with fatdeploy.load(bundle_with_coder(coder, tmp_path / "bundle").path, threads=1, spinning=False) as model:
        model.generate(["abc", "cab", [4, 5]], SHORT)
        list(model.stream("abc", SHORT))
        assert not caplog.messages
        model.generate(["aéb", "Xé", "abc"], SHORT)
        list(model.stream("\n", SHORT))
        model.generate(["0123456789KL"], SHORT)
    beginning = "unknown characters are read as <unk>: "
    named = ["'é', 'X'", r"'\n'", "'0', '1', '2', '3', '4', '5', '6', '7', '8', '9' and 2 more"]
    assert caplog.messages == [beginning + names for names in named]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("preset", [TINY, "fat-tiny"])
def test_many_threads_decode_at_once_and_each_gets_what_it_would_get_alone(preset: str) -> None:
    model = fatdeploy.load(bundle_of(preset).path, threads=1, spinning=False)
    sources, options = drawn_sources(48), DecodeOptions(max_new_tokens=24)
    # Batches of one to three, so that threads compete for buffers of equal and of different shapes.
    batches = [sources[start : start + 1 + start % 3] for start in range(len(sources) - 2)]
    alone = [model.generate(batch, options) for batch in batches]
    assert len({result.tokens for batch in alone for result in batch}) > 40
    with ThreadPoolExecutor(12) as threads:
        together = list(threads.map(lambda batch: model.generate(batch, options), batches * 3))
    assert together == alone * 3
    assert 1 <= len(model._engine.pool) <= MOST_WAITING


def test_a_source_that_is_too_long_is_refused_unless_it_may_be_cut(caplog: pytest.LogCaptureFixture) -> None:
    model = fatdeploy.load(bundle_of(TINY).path)
    long, short = drawn_sources(1)[0] * 300, [7, 8]
    with pytest.raises(SpecMismatch, match=rf"source 1: has {len(long)} tokens, more than max_source = 256 \(truncate"):
        model.generate([short, long], SHORT)
    assert model.refusal(long).startswith(f"has {len(long)} tokens")
    assert model.refusal(long, truncate=True) == ""
    expected = model.generate([short, long[:256]], SHORT)
    assert not caplog.messages
    results = model.generate([short, long], SHORT, truncate=True)
    assert results == [expected[0], replace(expected[1], dropped=len(long) - 256)]
    assert caplog.messages == [f"sources cut to max_source = 256: tokens dropped [0, {len(long) - 256}]"]


def test_text_goes_in_and_comes_out(text_bundle: Bundle) -> None:
    model = fatdeploy.load(text_bundle.path)
    [expected] = decode(EagerEngine(model_of(TINY)), [[9, 30, 12, 2]], SHORT)
    [result] = model.generate(["w9 w30 w12"], SHORT)
    assert result == replace(expected, text=words(expected.tokens))
    assert result.text == "w31 w8 w31 w8 w31 w8 w31 w26 w39 w36 w51 w28"
    # The same source as ids, and both kinds in one batch.
    assert model.generate([[9, 30, 12, 2], "w9 w30 w12"], SHORT) == [result, result]


def test_truncation_and_padding_settings_of_the_tokenizer_file_are_ignored(text_bundle: Bundle) -> None:
    saved = json.loads(text_bundle.file(TOKENIZER).read_text())
    assert saved["truncation"]["max_length"] == 6
    assert saved["padding"] is not None
    model = fatdeploy.load(text_bundle.path)
    row = list(range(5, 25))
    assert model.generate([words(row)], SHORT)[0].tokens == model.generate([[*row, 2]], SHORT)[0].tokens


def test_a_text_that_is_cut_keeps_the_token_that_ends_every_source(text_bundle: Bundle) -> None:
    model = fatdeploy.load(text_bundle.path)
    row = (drawn_sources(1)[0] * 300)[:300]
    [expected] = model.generate([[*row[:255], 2]], SHORT)
    assert model.generate([words(row)], SHORT, truncate=True) == [replace(expected, dropped=45)]


def test_ids_need_no_tokenizers_package_and_text_says_what_to_install(
    text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    model = fatdeploy.load(text_bundle.path)
    assert model.generate([[5, 6, 7]], SHORT) == decode(EagerEngine(model_of(TINY)), [[5, 6, 7]], SHORT)
    with pytest.raises(BackendUnavailable, match=r"pip install 'fatdeploy\[text\]'"):
        model.generate(["w5"])


def test_a_damaged_tokenizer_is_a_bundle_error(tmp_path: Path) -> None:
    bundle = bundle_with_text(tmp_path / "bundle")
    bundle.file(TOKENIZER).write_text("{}")
    write_manifest(bundle.path, bundle.manifest)
    with pytest.raises(BundleError, match=r"cannot read .*tokenizer\.json: .*; export the bundle again"):
        fatdeploy.load(bundle.path)


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    bundle = bundle_with_text(tmp_path / "bundle", size=65)
    with pytest.raises(BundleError, match=r"tokenizer\.json has 65 tokens, the model 64: it belongs to another model"):
        fatdeploy.load(bundle.path)


def test_a_text_that_is_not_valid_unicode_is_refused(text_bundle: Bundle) -> None:
    with pytest.raises(SpecMismatch, match=r"a text must be valid Unicode, found 'w5 \\udc80'"):
        fatdeploy.load(text_bundle.path).generate(["w5 \udc80"])


def test_an_argument_that_is_not_a_list_of_sources_is_refused(text_bundle: Bundle) -> None:
    model = fatdeploy.load(text_bundle.path)
    with pytest.raises(ConfigError, match=r"takes a list of sources, found one text: pass \[text\]"):
        model.generate("w5 w6")
    with pytest.raises(ConfigError, match=r"takes a list of sources, found 5$"):
        model.generate(5)  # type: ignore[arg-type]
    with pytest.raises(SpecMismatch, match="source 0: expected one axis of ids"):
        model.generate([5, 6])  # type: ignore[list-item]
    with pytest.raises(SpecMismatch, match="source 1: ids must be integers, found object"):
        model.generate([[5], [[5], [6, 7]]])  # type: ignore[list-item]
    with pytest.raises(SpecMismatch, match="no source given"):
        model.generate([])
    with pytest.raises(SpecMismatch, match="source 1: is empty"):
        model.generate(["w5", []])


def test_text_for_a_bundle_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json: pass token ids, not text"):
        fatdeploy.load(bundle_of(TINY).path).generate(["w5"])


def test_a_closed_model_refuses_to_decode() -> None:
    with fatdeploy.load(bundle_of(TINY).path) as model:
        pass
    with pytest.raises(ConfigError, match="closed: load the bundle again"):
        model.generate([[5]])


def test_hashes_are_checked_by_default(tmp_path: Path) -> None:
    shutil.copytree(bundle_of(TINY).path, tmp_path / "bundle")
    certificate = tmp_path / "bundle" / "parity.json"
    certificate.write_bytes(certificate.read_bytes().replace(b'"', b"'", 1))
    with pytest.raises(BundleError, match=r"parity\.json: expected sha256"):
        fatdeploy.load(tmp_path / "bundle")
    assert len(fatdeploy.load(tmp_path / "bundle", check_hashes=False).generate([[5]], SHORT)) == 1


def test_an_export_records_the_onnxruntime_that_it_was_verified_with() -> None:
    assert bundle_of(TINY).manifest.onnxruntime == (onnxruntime.__version__, onnxruntime.__version__)


WITHOUT_TORCH = """
import json, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnx", "onnxsim", "onnxscript"} or name.startswith("fatdeploy.export"):
            raise ImportError(name)
sys.meta_path.insert(0, Blocked())
import fatdeploy
with fatdeploy.load(sys.argv[1]) as model:
    results = model.generate(json.loads(sys.argv[2]), fatdeploy.DecodeOptions(max_new_tokens=12))
print(json.dumps([result.tokens for result in results]))
"""


def test_a_bundle_is_loaded_and_decoded_where_torch_and_its_like_cannot_be_imported() -> None:
    sources = drawn_sources(3)
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, str(bundle_of("fat-tiny").path), json.dumps(sources)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert run.stderr == ""
    expected: list[Hypothesis] = decode(EagerEngine(model_of("fat-tiny")), sources, SHORT)
    assert json.loads(run.stdout) == [list(result.tokens) for result in expected]


def test_a_source_is_tokenised_once_and_checked_once_on_its_way_in(
    text_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fatdeploy.load(text_bundle.path, threads=1, spinning=False)
    expected = model.generate(["w9 w30", [5, 6]], SHORT)
    tokenised, checked = [], []
    encoded, wrong_source = model._tokenizer.encoded, sources.wrong_source
    monkeypatch.setattr(model._tokenizer, "encoded", lambda text: (tokenised.append(text), encoded(text))[1])
    for module in (sources, fatdeploy.runtimes.model):
        monkeypatch.setattr(
            module, "wrong_source", lambda row, spec: (checked.append(row.tolist()), wrong_source(row, spec))[1]
        )
    assert model.generate(["w9 w30", [5, 6]], SHORT) == expected
    assert (tokenised, checked) == (["w9 w30"], [[9, 30, 2], [5, 6]])
    tokenised.clear()
    checked.clear()
    readable = [model.read("w9 w30"), model.read([5, 6])]
    assert model.generate(readable, SHORT) == expected
    assert list(model.stream(readable[0], SHORT))[-1].hypothesis == expected[0]
    assert (tokenised, checked) == (["w9 w30"], [[9, 30, 2], [5, 6]])


def test_a_source_that_was_read_keeps_what_was_cut_and_one_that_cannot_be_read_is_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = fatdeploy.load(bundle_of(TINY).path)
    long = [7] * 300
    with pytest.raises(SpecMismatch, match=r"^has 300 tokens, more than max_source = 256 \(truncate"):
        model.read(long)
    assert not caplog.messages
    assert model.generate([model.read(long, truncate=True)], SHORT) == model.generate([long], SHORT, truncate=True)
    assert caplog.messages == ["sources cut to max_source = 256: tokens dropped [44]"] * 2


def test_sources_may_come_from_a_generator_and_are_checked_all_the_same() -> None:
    model = fatdeploy.load(bundle_of(TINY).path)
    assert model.generate((row for row in [[5], [6]]), SHORT) == model.generate([[5], [6]], SHORT)  # type: ignore[arg-type]
    with pytest.raises(SpecMismatch, match="source 1: ids must lie in 0…63, found 64"):
        model.generate((row for row in [[5], [64]]), SHORT)  # type: ignore[arg-type]


def test_every_source_has_a_prefix_of_its_own_in_batches_of_any_size(text_bundle: Bundle) -> None:
    sources = drawn_sources(8)
    draw = np.random.default_rng(7)
    prefixes = [draw.integers(3, 64, draw.integers(6)).tolist() for _ in sources]
    with fatdeploy.load(text_bundle.path, threads=1, spinning=False) as model:
        alone = [
            model.generate([source], replace(SHORT, prefix=prefix))[0]
            for source, prefix in zip(sources, prefixes, strict=True)
        ]
        assert model.generate(sources, SHORT, prefixes=prefixes) == alone
        assert model.generate(sources, SHORT, prefixes=prefixes, batch_tokens=120) == alone
        texts = [words(prefix) for prefix in prefixes]
        assert model.generate(sources, SHORT, prefixes=texts) == alone
        read = [model.read(source, prefix=text) for source, text in zip(sources, texts, strict=True)]
        assert model.generate(read, SHORT) == alone
        *_, last = model.stream(read[3], SHORT)
        assert last.hypothesis == alone[3]
    assert all(result.text.startswith(text) for result, text in zip(alone, texts, strict=True))


def test_a_stop_text_does_not_end_the_prefix_that_contains_it(text_bundle: Bundle) -> None:
    with fatdeploy.load(text_bundle.path, threads=1, spinning=False) as model:
        [plain] = model.generate([[9, 30, 12]], SHORT)
        stop = f" w{plain.tokens[2]}"
        stopped, other = model.generate([[9, 30, 12]] * 2, replace(SHORT, stop=[stop]), prefixes=["", "w4" + stop])
    assert (stopped.finish, stopped.text) == ("stop", plain.text.partition(stop)[0])
    assert other.text.startswith("w4" + stop)


@pytest.mark.parametrize(
    ("prefixes", "reason"),
    [
        (["w5"], "prefixes refused: expected one per source, 2 in all, found 1"),
        ("w5", "prefixes refused: expected a list with one prefix per source, found 'w5'"),
        ([None, [64]], "prefixes refused: source 1: prefix must be ids in 0…63, found 64"),
    ],
)
def test_prefixes_that_do_not_fit_the_sources_are_refused(
    text_bundle: Bundle, prefixes: list[str] | str, reason: str
) -> None:
    with fatdeploy.load(text_bundle.path, threads=1) as model, pytest.raises(ConfigError, match=reason):
        model.generate([[5], [6]], SHORT, prefixes=prefixes)


def test_a_text_as_prefix_of_a_source_needs_a_tokenizer_and_ids_those_of_the_model() -> None:
    with fatdeploy.load(bundle_of(TINY).path, threads=1) as model:
        with pytest.raises(ConfigError, match=r"has no tokenizer.json: pass token ids, not text"):
            model.generate([[5]], SHORT, prefixes=["w5"])
        with pytest.raises(SpecMismatch, match=r"^prefix must be ids in 0…63, found 64$"):
            model.read([5], prefix=[64])
