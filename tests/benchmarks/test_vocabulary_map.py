"""CTranslate2's form of a shortlist."""

from pathlib import Path

import numpy as np

from benchmarks.peers.vocabulary_map import FILE, vocabulary_map, write_mapped_model
from fatdeploy.runtimes.shortlist.table import LexicalTable

TOKENS = ["</s>", "<unk>", "a", "b", "c d", "", "e"]


def table(*, copies: bool) -> LexicalTable:
    return LexicalTable(np.array([2, 3]), np.array([2, 6]), np.array([0, 2, 3]), np.array([4, 6, 1]), copies)


def test_a_line_per_source_token_and_one_for_every_source() -> None:
    assert vocabulary_map(table(copies=False), TOKENS) == "\ta b\na\te\ne\t<unk>\n"


def test_a_token_that_may_be_copied_is_its_own_entry() -> None:
    lines = vocabulary_map(table(copies=True), TOKENS).splitlines()
    assert lines == ["\ta b", "</s>\t</s>", "<unk>\t<unk>", "a\te", "e\t<unk> e"]


def test_the_model_is_linked_beside_the_map(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.bin").write_bytes(b"weights")
    for _ in range(2):
        write_mapped_model(tmp_path / "model", tmp_path / "mapped", table(copies=False), TOKENS)
    assert (tmp_path / "mapped" / "model.bin").read_bytes() == b"weights"
    assert (tmp_path / "mapped" / FILE).read_text() == "\ta b\na\te\ne\t<unk>\n"
