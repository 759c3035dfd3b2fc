"""Write the tables and pictures of README and docs from the committed results, so that no number is typed by hand."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.readme.engine_tables import beam_rows_lines, beams_table, engines_table, quantized_table, speed_table
from benchmarks.readme.family_tables import family_tables
from benchmarks.readme.integer_tables import agreement_table, integer_fidelity_table, integer_speed_table
from benchmarks.readme.other_tables import export_lines, g2p_lines, load_lines, loop_table, reference_table
from benchmarks.readme.phrases import ENGINES, STEP
from benchmarks.readme.pictures import architecture_picture, lengths_picture, speed_picture
from benchmarks.readme.real_tables import real_export_lines, real_speed_table

Table = Callable[[dict[str, Any]], str]

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- {block}: generated from benchmarks/results -->", "<!-- end of {block} -->"

# Page -> block between two marks -> the results it shows, in order. A result that nobody measured yet has no table.
PAGES: dict[str, dict[str, dict[str, Table]]] = {
    "README.md": {"speed": {"quantized.json": speed_table}},
    "docs/benchmarks.md": {
        "quantized": {"quantized.json": quantized_table},
        "real": {"real_models.json": real_speed_table, "real_export.json": real_export_lines},
        "real-quantized": {"real_quantized.json": integer_speed_table},
        "greedy": {"engines_greedy.json": engines_table},
        "family": {"family.json": family_tables},
        "beams": {"engines_beam.json": beams_table, "beam_rows.json": beam_rows_lines},
        "loop": {"loop_overhead.json": loop_table},
        "load": {"load.json": load_lines},
        "g2p": {"g2p.json": g2p_lines},
        "export": {"export_time.json": export_lines},
        "reference": {"reference_greedy.json": reference_table},
    },
    "docs/quantize.md": {
        "real-fidelity": {"real_quantized.json": integer_fidelity_table},
        "agreement": {"real_agreement.json": agreement_table},
    },
}


def with_tables(page: str) -> str:
    """Return a page with everything between its marks generated again."""
    text = (ROOT / page).read_text()
    for block, tables in PAGES[page].items():
        marks = BEGIN.format(block=block), END.format(block=block)
        before, begin, rest = text.partition(marks[0])
        _, end, after = rest.partition(marks[1])
        if not begin or not end:
            raise SystemExit(f"{page} lacks the marks {marks[0]!r} and {marks[1]!r}")
        measured = {name: RESULTS / name for name in tables if (RESULTS / name).exists()}
        written = "\n\n".join(tables[name](json.loads(path.read_text())) for name, path in measured.items())
        text = f"{before}{begin}\n{written}\n{end}{after}"
    return text


def speeds() -> str:
    """Return the picture of all engines of the committed result, each in its best setting."""
    result = json.loads((RESULTS / "quantized.json").read_text())
    return speed_picture([row for row in result["results"] if row["best_setting"]], ENGINES, STEP)


def lengths() -> str:
    """Return the picture of steps by length of the target."""
    result = json.loads((RESULTS / "family.json").read_text())
    return lengths_picture(result["decoders"], result["targets"])


def generated() -> dict[str, str]:
    """Return every generated file and its text."""
    pictures = {
        "docs/speed.svg": speeds(),
        "docs/lengths.svg": lengths(),
        "docs/architecture.svg": architecture_picture(),
    }
    return {**{page: with_tables(page) for page in PAGES}, **pictures}


def main() -> None:
    """Rewrite the pages and their pictures; with --check only report whether they are what the results give."""
    files = generated()
    if "--check" not in sys.argv[1:]:
        for name, text in files.items():
            (ROOT / name).write_text(text)
        return
    old = [name for name, text in files.items() if not (ROOT / name).exists() or (ROOT / name).read_text() != text]
    sys.exit(f"not what the results give: {', '.join(old)}; run python -m benchmarks.readme.run" if old else 0)


if __name__ == "__main__":
    main()
