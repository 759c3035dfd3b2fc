"""The README and the pages of docs, parsed for tests: blocks of code, commands, links, anchors."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of code and its place."""

    page: Path
    line: int
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def page(name: str) -> str:
    """Return the text of a page, named from the root of the repository."""
    return (ROOT / name).read_text()


def section(name: str, title: str) -> str:
    """Return the text below a heading, up to the next heading of the same level."""
    return page(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def blocks(language: str) -> list[Block]:
    """Return every block of a language on all pages."""
    return [
        Block(path, text[: match.start()].count("\n") + 1, match[2])
        for path in PAGES
        for text in [path.read_text()]
        for match in FENCE.finditer(text)
        if match[1] == language
    ]


def commands(block: Block) -> list[list[str]]:
    """Return the calls of fatdeploy in a shell block, as arguments; comments and redirections are left out."""
    calls = []
    for line in block.code.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words and words[0].rpartition("/")[2] == "fatdeploy":
            calls.append(words[1 : words.index(">")] if ">" in words else words[1:])
    return calls


def prose(path: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", path.read_text())


def links(path: Path) -> list[str]:
    """Return the relative links of a page, pictures included."""
    targets = re.findall(r"\]\(([^)\s]+)\)", prose(path))
    return [target for target in targets if not re.match(r"https?:|mailto:", target)]


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
