"""Chinese sentences of Debian's manuals with their English originals.

Both languages come from one source, paragraph by paragraph: pages with as many paragraphs in both are aligned, and so
are paragraphs with as many sentences in both. Everything else is left out.
"""

import html
import re
from pathlib import Path

from benchmarks.real.folders.packages import Package, member
from benchmarks.real.folders.sentences import FAQ, REFERENCE, sentences_of

FAQ_ENGLISH = Package(
    "deb",
    "debian-faq",
    "11.1",
    "debian-faq_11.1_all.deb",
    "427426e0cfa6888622fc1d72631071cb4b5a1f86ccde722e7820bcef284de5d0",
)
REFERENCE_ENGLISH = Package(
    "deb",
    "debian-reference-en",
    "2.100",
    "debian-reference-en_2.100_all.deb",
    "9f31d3a17df505de09689ca255512ea58c1fc47c59bb1b0c7bf1c23362e9743f",
)
PACKAGES = (FAQ, REFERENCE, FAQ_ENGLISH, REFERENCE_ENGLISH)
FAQ_PAGES = (
    *("basic-defs", "choosing", "compatibility", "contributing", "customizing", "faqinfo", "ftparchives"),
    *("getting-debian", "kernel", "nextrelease", "pkg-basics", "pkgtools", "redistributing", "software", "support"),
    "uptodate",
)
REFERENCE_PAGES = ("pr01", *(f"ch{chapter:02}" for chapter in range(1, 13)))
PARAGRAPH, TAG = re.compile(r"<p\b[^>]*>(.*?)</p>", re.DOTALL), re.compile(r"<[^>]+>")
ENGLISH_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"“(])")
CHINESE_END = re.compile(r"(?<=[。！？])")


def paragraphs_of(page: str) -> list[str]:
    """Return the text of a page's paragraphs, white space collapsed."""
    return [" ".join(html.unescape(TAG.sub("", match)).split()) for match in PARAGRAPH.findall(page)]


def pairs_of(chinese: str, english: str) -> list[tuple[str, str]]:
    """Return the aligned sentences of a page in both languages; none if their paragraphs do not correspond."""
    paragraphs = paragraphs_of(chinese), paragraphs_of(english)
    if len(paragraphs[0]) != len(paragraphs[1]):
        return []
    pairs = []
    for ours, theirs in zip(*paragraphs, strict=True):
        parts = [part for part in CHINESE_END.split(ours) if part.strip()], ENGLISH_END.split(theirs)
        if len(parts[0]) == len(parts[1]):
            pairs += [(source.strip(), target.strip()) for source, target in zip(*parts, strict=True)]
    return [(source, target) for source, target in pairs if sentences_of(source) == [source] and target]


def write_pairs(paths: dict[Package, Path], file: Path) -> None:
    """Write all aligned sentences, a Chinese one and its original per line, divided by a tab."""
    faq, reference = "./usr/share/doc/debian/FAQ", "./usr/share/debian-reference"
    places = [
        *(((FAQ, f"{faq}/zh-cn/{name}.zh-cn.html"), (FAQ_ENGLISH, f"{faq}/{name}.en.html")) for name in FAQ_PAGES),
        *(
            ((REFERENCE, f"{reference}/{name}.zh-cn.html"), (REFERENCE_ENGLISH, f"{reference}/{name}.en.html"))
            for name in REFERENCE_PAGES
        ),
    ]
    pairs: dict[str, str] = {}
    for place in places:
        pages = [member(paths[package], name).decode() for package, name in place]
        for source, target in pairs_of(*pages):
            pairs.setdefault(source, target)
    file.write_text("".join(f"{source}\t{target}\n" for source, target in pairs.items()), encoding="utf-8")
