"""A bundle's shortlist: built from texts or pairs, measured on held-out lines, stored, and used on request."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

import fatdeploy
from fatdeploy import folders
from fatdeploy.bundle import read_bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import BundleError, ConfigError, DataError, SpecMismatch
from fatdeploy.manifest import FORMAT, MANIFEST, SHORTLIST, ShortlistRecord
from fatdeploy.runtimes.shortlist.build import Sizes
from fatdeploy.runtimes.shortlist.counting import AlignedLine, TokenCounts
from fatdeploy.runtimes.shortlist.table import LexicalTable, read_table, write_table
from tests.support.bundles import bundle_of
from tests.support.quantized import quantized_of
from tests.support.words import g2p_bundle

SIZES = Sizes(per_token=4, frequent=12)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """Return a copy of a tiny int8 bundle without a tokenizer."""
    shutil.copytree(quantized_of("transformer-tiny", "int8").path, tmp_path / "bundle")
    return tmp_path / "bundle"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Return a file with 40 sources as ids."""
    draw = np.random.default_rng(0)
    rows = [draw.integers(3, 64, draw.integers(1, 9)).tolist() for _ in range(40)]
    path = tmp_path / "sources.txt"
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def g2p(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the bundled model, which has a tokenizer and attention, with a shortlist."""
    folder = tmp_path_factory.mktemp("g2p")
    shutil.copytree(g2p_bundle().path, folder / "g2p")
    words = ["cat", "house", "window", "table", "phone", "bridge", "letter", "summer", "yellow", "garden", "planet"]
    (folder / "words.txt").write_text("\n".join(words) + "\n")
    fatdeploy.build_shortlist(folder / "g2p", [folder / "words.txt"], sizes=Sizes(6, 5))
    return folder / "g2p"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_source_tokens_find_the_choices_that_occur_with_them() -> None:
    def line(source: list[int], target: list[int]) -> AlignedLine:
        return AlignedLine(np.array(source), np.array(target)[:, None], np.ones((len(target), 1), np.float32))

    lines = [
        line([3, 4], [10, 11]),
        line([3, 5], [10, 12]),
        line([4, 5], [11, 12]),
        line([3], [10]),
        line([6], [13, 13]),
    ]
    table = TokenCounts(bundle_of("transformer-tiny").spec, lines).table(per_token=1, frequent=0, copies=False)
    assert {token: table.targets_of(np.array([token])).tolist() for token in range(3, 8)} == {
        3: [10],
        4: [11],
        5: [12],
        6: [13],
        7: [],
    }
    frequent = TokenCounts(bundle_of("transformer-tiny").spec, lines).table(per_token=3, frequent=1, copies=True)
    assert frequent.frequent.tolist() == [10]
    # The frequent one is not stored again, and a source token may be a target token.
    assert sorted(frequent.targets_of(np.array([3]))) == [3, 11, 12]


def test_attention_aligns_where_there_is_some() -> None:
    ids, weights = np.array([[10, 11]]), np.array([[0.6, 0.4]], np.float32)
    line = AlignedLine(np.array([3, 4]), ids, weights, np.array([[0.1, 0.9]], np.float32))
    # Alone the two source tokens could not be told apart.
    table = TokenCounts(bundle_of("transformer-tiny").spec, [line]).table(per_token=1, frequent=0, copies=False)
    assert table.targets_of(np.array([4])).tolist() == [10]
    keys, counts = TokenCounts(bundle_of("transformer-tiny").spec, [line])._pairs()
    assert dict(zip(keys.tolist(), counts.round(6).tolist(), strict=True)) == {
        3 * 64 + 10: 0.06,
        3 * 64 + 11: 0.04,
        4 * 64 + 10: 0.54,
        4 * 64 + 11: 0.36,
    }


def test_a_shortlist_is_built_measured_stored_and_used(bundle: Path, sources: Path) -> None:
    before = read_bundle(bundle)
    (bundle / "notes.txt").write_text("mine")
    steps: list[int] = []
    record = fatdeploy.build_shortlist(bundle, [sources], sizes=SIZES, as_ids=True, progress=steps.append)
    after = read_bundle(bundle)
    assert (after.manifest.shortlist, after.manifest.format) == (record, FORMAT)
    assert (record.lines, record.held_out, record.frequent, record.aligned_by) == (36, 4, 12, "co-occurrence")
    assert sum(steps) == 40 + 36
    assert set(after.manifest.files) == {*before.manifest.files, SHORTLIST}
    assert (bundle / "notes.txt").read_text() == "mine"
    table = read_table(after)
    assert table is not None
    assert len(table.targets) == record.entries <= 4 * record.source_tokens
    rows = [[int(token) for token in line.split()] for line in sources.read_text().splitlines()]
    held = rows[9::10]
    with fatdeploy.load(bundle) as model:
        plain, listed = model.generate(held), model.generate(held, shortlist="auto")
        together = model.generate(rows, shortlist="auto")
        assert together[9::10] == listed == [model.generate([row], shortlist="auto")[0] for row in held]
    lists = [{*table.frequent.tolist(), *table.targets_of(np.array(row)).tolist()} for row in held]
    assert all(set(result.tokens) <= allowed for result, allowed in zip(listed, lists, strict=True))
    assert record.mean_length == pytest.approx(np.mean([len(allowed) for allowed in lists]))
    assert record.tokens == sum(len(result.tokens) for result in plain)
    assert record.listed_tokens == sum(
        token in allowed for result, allowed in zip(plain, lists, strict=True) for token in result.tokens
    )
    assert record.same_targets == sum(one.tokens == other.tokens for one, other in zip(plain, listed, strict=True))


def test_given_targets_take_the_place_of_the_models_own(bundle: Path, tmp_path: Path) -> None:
    pairs = tmp_path / "pairs.tsv"
    pairs.write_text("".join(f"{token} {token}\t{token + 1}\n" for token in range(5, 25)))
    record = fatdeploy.build_shortlist(bundle, [pairs], sizes=Sizes(3, 4), as_ids=True)
    assert (record.lines, record.held_out) == (18, 2)


def test_words_are_aligned_by_attention(g2p: Path) -> None:
    record = read_bundle(g2p).manifest.shortlist
    assert record is not None
    assert (record.aligned_by, record.lines, record.held_out) == ("attention", 10, 1)
    shown = run("inspect", g2p).stdout
    assert "Shortlist" in shown
    assert "from 10 lines, aligned by attention" in shown
    assert f"{record.same_targets} of 1 held-out targets unchanged" in shown
    assert json.loads(run("inspect", g2p, "--json").stdout)["shortlist"]["lines"] == 10
    with fatdeploy.load(g2p) as model:
        expected = model.generate(["cat", "garden"], shortlist="auto")
    result = run("run", g2p, "--shortlist", "auto", "cat", "garden")
    assert result.stdout.splitlines() == [hypothesis.text for hypothesis in expected]


def test_the_command_prints_what_was_measured_and_replaces_only_with_force(bundle: Path, sources: Path) -> None:
    result = run("shortlist", bundle, sources, "--ids", "--frequent", 12, "--per-token", 4, "--json")
    assert result.exit_code == 0, result.output
    record = read_bundle(bundle).manifest.shortlist
    assert record is not None
    assert json.loads(result.stdout) == {"bundle": str(bundle), **vars(record)}
    refused = run("shortlist", bundle, sources, "--ids")
    assert refused.exit_code == 1
    assert "has a shortlist already: pass --force" in refused.output
    again = run("shortlist", bundle, sources, "--ids", "--frequent", 5, "--force")
    assert again.exit_code == 0
    assert again.stdout == f"{bundle}: {read_bundle(bundle).manifest.shortlist.line()}\n"
    assert read_bundle(bundle).manifest.shortlist.frequent == 5


def test_a_crash_leaves_the_bundle_as_it_was(bundle: Path, sources: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = (bundle / MANIFEST).read_bytes()

    def crash(*_: object, force: bool) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(folders, "_exchange", crash)
    with pytest.raises(OSError, match="no space left"):
        fatdeploy.build_shortlist(bundle, [sources], as_ids=True)
    assert (bundle / MANIFEST).read_bytes() == before
    assert not (bundle / SHORTLIST).exists()
    assert [path.name for path in bundle.parent.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty, expected a file of sources"),
        ("5 6\n", "needs at least 2 lines, one of them to measure it with, found 1"),
        (
            "5 6\n99 3\nx\n7 7\t64\n",
            r"3 of 4 lines cannot be used.*found 99 at line 2.*line 3.*0…63, found 64 at line 4",
        ),
    ],
)
def test_lines_that_cannot_be_used_are_one_error(bundle: Path, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "wrong.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        fatdeploy.build_shortlist(bundle, [tmp_path / "wrong.txt"], as_ids=True)


def test_text_needs_a_tokenizer(bundle: Path, sources: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no tokenizer.json: pass token ids, not text"):
        fatdeploy.build_shortlist(bundle, [sources])


def test_a_parallel_model_needs_no_shortlist(sources: Path) -> None:
    with pytest.raises(
        ConfigError, match="is a parallel model, which chooses all tokens at once: it needs no shortlist"
    ):
        fatdeploy.build_shortlist(bundle_of("transformer-nat-tiny").path, [sources], as_ids=True)


def test_a_bundle_without_a_shortlist_says_how_to_build_one() -> None:
    path = bundle_of("transformer-tiny").path
    with fatdeploy.load(path) as model:
        with pytest.raises(ConfigError, match=rf"{path} has no shortlist; build one from texts: fatdeploy shortlist"):
            model.generate([[5, 6]], shortlist="auto")
        with pytest.raises(ConfigError, match="must be token ids, at least one, or 'auto', found 'all'"):
            model.generate([[5, 6]], shortlist="all")
        assert model.options.shortlist is None


TABLE = LexicalTable(*(np.array(ids) for ids in ([2, 9], [3, 7], [0, 1, 3], [5, 6, 8])), copies=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frequent": [2, 64]}, "frequent must be ids in 0…63, found 64"),
        ({"frequent": [9, 2]}, "frequent must be in order, each once"),
        ({"sources": [3, 3]}, "sources must be in order, each once"),
        ({"sources": [3, 64]}, "sources must be ids in 0…63, found 64"),
        ({"targets": [5, 6, 64]}, "targets must be ids in 0…63, found 64"),
        ({"starts": [0, 3]}, "starts must be 3 numbers, found 2"),
        ({"starts": [0, 2, 1]}, "starts must rise from 0 to 3"),
        ({"starts": [1, 2, 3]}, "starts must rise from 0 to 3"),
        ({"starts": [0, 1, 4]}, "starts must rise from 0 to 3"),
    ],
)
def test_a_table_that_does_not_fit_is_refused(bundle: Path, changes: dict[str, list[int]], message: str) -> None:
    wrong = LexicalTable(**{**vars(TABLE), **{name: np.array(ids) for name, ids in changes.items()}})
    with pytest.raises(BundleError, match=rf"cannot read .*{message}; copy the bundle again, or build its shortlist"):
        stored(bundle, wrong)
    with pytest.raises(BundleError, match=message):
        fatdeploy.load(bundle)


def stored(bundle: Path, table: LexicalTable) -> LexicalTable | None:
    """Return a table as a bundle gives it back."""
    write_table(bundle / SHORTLIST, table, read_bundle(bundle).spec)
    return read_table(write_manifest(bundle, read_bundle(bundle).manifest))


def test_a_table_is_read_as_it_was_written(bundle: Path) -> None:
    table = stored(bundle, TABLE)
    assert table is not None
    assert sorted(table.targets_of(np.array([7, 1, 7, 63]))) == [1, 6, 7, 8, 63]
    assert table.entries_of(3).tolist() == [3, 5]
    assert table.frequent.tolist() == [2, 9]


def test_any_damage_is_our_error(bundle: Path) -> None:
    stored(bundle, TABLE)
    whole = (bundle / SHORTLIST).read_bytes()
    draw = np.random.default_rng(1)
    refused = 0
    for _ in range(60):
        content = bytearray(whole)
        content[int(draw.integers(len(whole)))] ^= int(draw.integers(1, 256))
        (bundle / SHORTLIST).write_bytes(bytes(content[: int(draw.integers(1, len(whole) + 1))]))
        with pytest.raises(BundleError, match="expected"):
            read_bundle(bundle)
        try:
            read_table(write_manifest(bundle, bundle_of("transformer-tiny").manifest))
        except BundleError:
            refused += 1
    assert refused > 30


def test_arrays_of_other_kinds_are_refused(bundle: Path) -> None:
    np.savez(bundle / SHORTLIST, frequent=np.array([1.5]), sources=[], starts=[], targets=[])
    with pytest.raises(BundleError, match=r"frequent must be unsigned integers \[n\], found float64 \[1\]"):
        read_table(write_manifest(bundle, bundle_of("transformer-tiny").manifest))


def test_the_line_of_a_record_has_size_and_agreement() -> None:
    record = ShortlistRecord(
        aligned_by="attention",
        lines=900,
        frequent=8000,
        per_token=20,
        source_tokens=3000,
        entries=42000,
        held_out=100,
        same_targets=81,
        tokens=2036,
        listed_tokens=2015,
        mean_length=8256.17,
    )
    assert record.line() == (
        "8256 tokens per source on average; 81 of 100 held-out targets unchanged, 98.97% of 2036 tokens listed"
    )


def test_a_source_that_is_too_long_is_cut_on_request(bundle: Path, tmp_path: Path) -> None:
    longest = read_bundle(bundle).spec.max_source
    (tmp_path / "long.txt").write_text("5 6\n" + "7 " * (longest + 1) + "\n")
    with pytest.raises((DataError, SpecMismatch), match=f"more than max_source = {longest}"):
        fatdeploy.build_shortlist(bundle, [tmp_path / "long.txt"], as_ids=True)
    assert fatdeploy.build_shortlist(bundle, [tmp_path / "long.txt"], as_ids=True, truncate=True).lines == 1
