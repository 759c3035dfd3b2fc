"""Write the README's tables from the committed results, so that no number in it was typed by hand."""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- generated from benchmarks/results by benchmarks/readme.py -->", "<!-- end of generated -->"


ENGINES = {"fatdeploy": "fatdeploy, ONNX Runtime", "ctranslate2": "CTranslate2", "reference": "PyTorch reference"}
# What engines are compared by; the difference of a long and a short decode, because CTranslate2 tells no more.
STEP = "per_token_by_difference"


def machine_line(result: dict[str, Any], packages: tuple[str, ...], threads: str) -> str:
    """Return where and with what a result was measured."""
    machine, versions = result["machine"], result["versions"]
    used = ", ".join(f"{package} {versions[package]}" for package in packages)
    return (
        f"Measured on {result['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {used}{threads}; "
        f"source {result['source']} tokens, {result['target']} steps, fp32."
    )


def engines_table(result: dict[str, Any]) -> str:
    """Return the table of engines on the same weights, CTranslate2 in its best setting, and a line on all else."""
    lines = [
        "| model (random weights) | engine | batch | ms a step, min / p50 | times CTranslate2's, min / p50 | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        if row["engine"] == "ctranslate2" and not row["best_ctranslate2"]:
            continue
        step, ratio = row["phases"][STEP], row["ratio_to_ctranslate2"]
        tokens = "are the reference" if row["engine"] == "reference" else "the reference's, checked"
        lines.append(
            f"| `{row['preset']}` | {ENGINES[row['engine']]}, {setting(row)} | {row['batch']} "
            f"| {step['min_ms']:.2f} / {step['p50_ms']:.2f} | {ratio['min']:.2f} / {ratio['p50']:.2f} | {tokens} |"
        )
    machine = machine_line(result, ("onnxruntime", "ctranslate2", "torch"), "")
    return "\n".join([*lines, "", *other_lines(result), machine])


def setting(row: dict[str, Any]) -> str:
    """Return threads of an engine, and for CTranslate2 the workers that its best setting has."""
    threads = counted(row["threads"], "thread")
    return f"best: {counted(row['workers'], 'worker')} of {threads}" if row["engine"] == "ctranslate2" else threads


def counted(count: int, noun: str) -> str:
    """Return a number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def other_lines(result: dict[str, Any]) -> list[str]:
    """Return memory, load, growth of the step and export in one line; none of them where they were not measured."""
    facts = [
        f"`{row['preset']}` takes {max(row['after_load_bytes'], row['after_decode_bytes']) / 1e6:.0f} MB of memory "
        f"(weights {row['weights_bytes'] / 1e6:.0f} MB)"
        for row in result["memory"]
    ]
    loads = {row["preset"]: row["phases"]["load"] for row in result["results"] if row["engine"] == "fatdeploy"}
    facts += [f"`{preset}` loads in {load['p50_ms'] / 1e3:.2f} s" for preset, load in loads.items()]
    facts += [
        f"a step of `{row['preset']}` at position {row['positions'][1]} costs {row['ratio']['p50']:.2f} times that at "
        f"{row['positions'][0]} (batch {row['batch']})"
        for row in result["positions"]
    ]
    facts += [f"`{row['preset']}` is exported and certified in {row['seconds']:.0f} s" for row in result["export"]]
    return [f"Beside this: {'; '.join(facts)}.", ""] if facts else []


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
    return "\n".join([*lines, "", machine_line(result, ("torch",), f", {result['threads']} threads")])


# In the order of the README. A result that nobody measured yet has no table.
TABLES = {"engines_greedy.json": engines_table, "reference_greedy.json": reference_table}


def with_tables(readme: str) -> str:
    """Return the README with everything between the two marks made anew."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the marks {BEGIN!r} and {END!r}")
    found = {name: RESULTS / name for name in TABLES if (RESULTS / name).exists()}
    tables = "\n\n".join(TABLES[name](json.loads(path.read_text())) for name, path in found.items())
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main() -> None:
    """Rewrite the README; with --check only say whether it is what the results give."""
    old = README.read_text()
    new = with_tables(old)
    if "--check" in sys.argv[1:]:
        sys.exit("README.md is not what the results give: run python benchmarks/readme.py" if old != new else 0)
    README.write_text(new)


if __name__ == "__main__":
    main()
