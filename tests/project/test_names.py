"""What keeps the house in order: one meaning per class name, and files that fit on a few screens."""

import ast
import os
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_LINES = 350
# Files that are still too long. This list may only shrink.
TOO_LONG = {"benchmarks/readme/run.py", "export/quantize/rewrite_ort.py"}


def modules_of(*folders: str) -> list[Path]:
    """Return the modules in folders at any depth; links are not followed."""
    return sorted(
        Path(place, name)
        for folder in folders
        for place, _, names in os.walk(ROOT / folder)
        for name in names
        if name.endswith(".py")
    )


def repeated_classes(paths: list[Path]) -> dict[str, list[Path]]:
    """Return class names that several modules define at the top level, with the modules."""
    places: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    return {name: modules for name, modules in places.items() if len(modules) > 1}


def test_no_two_modules_define_a_class_of_the_same_name() -> None:
    paths = modules_of("fatdeploy", "runtimes", "export")
    assert len(paths) > 150
    assert repeated_classes(paths) == {}


def test_a_class_name_that_is_used_twice_is_noticed(tmp_path: Path) -> None:
    for name, text in (("a.py", "class Plan: ..."), ("b.py", "class Plan: ..."), ("c.py", "class Other: ...")):
        (tmp_path / name).write_text(text)
    assert repeated_classes(sorted(tmp_path.iterdir())) == {"Plan": [tmp_path / "a.py", tmp_path / "b.py"]}


def test_no_file_outside_tests_is_too_long() -> None:
    paths = modules_of("fatdeploy", "runtimes", "export", "benchmarks", "examples")
    long = {str(path.relative_to(ROOT)) for path in paths if len(path.read_text().splitlines()) > MOST_LINES}
    assert long == TOO_LONG
