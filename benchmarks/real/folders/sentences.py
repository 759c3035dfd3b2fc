"""Chinese sentences of Debian's manuals: real text under a free licence."""

import gzip
import re
from pathlib import Path

from benchmarks.real.folders.packages import Package, member

FAQ = Package(
    "deb",
    "debian-faq-zh-cn",
    "11.1",
    "debian-faq-zh-cn_11.1_all.deb",
    "3545356b1aa04d87e91dd15e8406210cf5b4f476662e597897bcb42234591758",
)
REFERENCE = Package(
    "deb",
    "debian-reference-zh-cn",
    "2.100",
    "debian-reference-zh-cn_2.100_all.deb",
    "6d2d8d9a646397e28b04cdff23d2e4374101ebf9be348e35961af62c8a2d0977",
)
# Each manual as one plain text.
TEXTS = {
    FAQ: "./usr/share/doc/debian/FAQ/debian-faq.zh-cn.txt.gz",
    REFERENCE: "./usr/share/debian-reference/debian-reference.zh-cn.txt.gz",
}
SHORTEST, LONGEST = 8, 60  # characters
FULL_STOP = "。"
CHINESE = re.compile("[\u4e00-\u9fff]")


def sentences_of(text: str) -> list[str]:
    """Return what full stops end, white space collapsed; no sentence twice, none too short, too long or not Chinese."""
    parts = [" ".join(f"{part}{FULL_STOP}".split()) for part in text.split(FULL_STOP)[:-1]]
    return list(dict.fromkeys(part for part in parts if SHORTEST <= len(part) <= LONGEST and CHINESE.search(part)))


def write_sentences(paths: dict[Package, Path], file: Path) -> None:
    """Write the sentences of all manuals, one per line."""
    texts = [gzip.decompress(member(paths[package], name)).decode() for package, name in TEXTS.items()]
    lines = dict.fromkeys(line for text in texts for line in sentences_of(text))
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
