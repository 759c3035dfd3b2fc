"""Write the README's tables from the committed results, so that no number in it was typed by hand."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- generated from benchmarks/results by benchmarks/readme.py -->", "<!-- end of generated -->"


def machine_line(result: dict[str, Any]) -> str:
    """Return where a result was measured."""
    machine, versions = result["machine"], result["versions"]
    return (
        f"Measured on {result['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, torch {versions['torch']}, {result['threads']} threads; "
        f"source {result['source']} tokens, {result['target']} steps, fp32."
    )


def reference_table(result: dict[str, Any]) -> str:
    """Return the table of greedy decoding with the reference."""
    lines = [
        "| model (random weights) | engine | batch | encode, ms | ms a step, min / p50 / p95 | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        step, encode = row["phases"]["per_token"], row["phases"]["encode"]
        lines.append(
            f"| `{row['preset']}` | {result['engine']} | {row['batch']} | {encode['p50_ms']:.1f} "
            f"| {step['min_ms']:.1f} / {step['p50_ms']:.1f} / {step['p95_ms']:.1f} | are the reference |"
        )
    return "\n".join([*lines, "", machine_line(result)])


def with_tables(readme: str) -> str:
    """Return the README with everything between the two marks made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the marks {BEGIN!r} and {END!r}")
    result = json.loads((ROOT / "benchmarks" / "results" / "reference_greedy.json").read_text())
    return f"{before}{BEGIN}\n{reference_table(result)}\n{END}{after}"


def main() -> None:
    """Rewrite the README; with --check only say whether it is what the results give."""
    old = README.read_text()
    new = with_tables(old)
    if "--check" in sys.argv[1:]:
        sys.exit("README.md is not what the results give: run python benchmarks/readme.py" if old != new else 0)
    README.write_text(new)


if __name__ == "__main__":
    main()
