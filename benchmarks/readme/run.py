"""Write the README's tables from the committed results, so that no number in it was typed by hand."""

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.g2p.targets import targets as g2p_targets
from benchmarks.harness.targets import verdict
from benchmarks.readme.plots import steps_picture

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = (
    "<!-- {block}: generated from benchmarks/results by benchmarks/readme/run.py -->",
    "<!-- end of {block} -->",
)


ENGINES = {
    "fatdeploy": "fatdeploy, ONNX Runtime",
    "ctranslate2": "CTranslate2",
    "plain": "plain `torch.onnx` export",
    "reference": "PyTorch reference",
}
# What engines are compared by; the difference of a long and a short decode, because CTranslate2 tells no more.
STEP = "per_token_by_difference"
PROFILED_OPS = 5
PICTURE = "quantized.svg"


def machine_line(result: dict[str, Any], packages: tuple[str, ...], threads: str) -> str:
    """Return where and with what decodes were measured, and of which length."""
    return f"{where(result, packages)}{threads}; source {result['source']} tokens, {result['target']} steps, fp32."


def where(result: dict[str, Any], packages: tuple[str, ...]) -> str:
    """Return where and with what a result was measured."""
    machine, versions = result["machine"], result["versions"]
    used = ", ".join(f"{package} {versions[package]}" for package in packages)
    return (
        f"Measured on {result['date']}: {machine['cpu']}, {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 1e9:.0f} GB, {used}"
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


def quantized_table(result: dict[str, Any]) -> str:
    """Return the table of precisions and peers on the same weights, each in its best setting, and the targets."""
    lines = [
        f"| batch | engine, `{result['preset']}` (random weights) | ms a step, p50 "
        "| times faster than CTranslate2's best | the reference's tokens | MB on disk |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        if not row["best_setting"]:
            continue
        times, forced, size = row["times_faster"][STEP], row["agreement"]["forced"], row["bytes_on_disk"]
        lines.append(
            f"| {row['batch']} | {ENGINES[row['engine']]}, {row['precision']}, {setting(row)} "
            f"| {row['phases'][STEP]['p50_ms']:.2f} | {shown(times, '.2f')} | {shown(forced, '.1%')} "
            f"| {shown(size and size / 1e6, '.0f')} |"
        )
    measured = f"{where(result, ('onnxruntime', 'ctranslate2', 'torch'))}; source {result['source']} tokens, "
    steps = f"{result['target']} steps; tokens are compared where all before them are the reference's."
    picture = f"![Milliseconds a step by engine and batch](benchmarks/results/{PICTURE})"
    more = [*targets_table(result["targets"]), "", *profile_lines(result["profiles"])]
    return "\n".join([picture, "", *lines, "", *more, measured + steps])


def profile_lines(profiles: list[dict[str, Any]], precision: str = "int8") -> list[str]:
    """Return where a step's time goes by onnxruntime's record, batches side by side, and what reading alone takes."""
    shown_ones = [one for one in profiles if one["precision"] == precision]
    if not shown_ones:
        return []
    last = shown_ones[-1]["ops"]
    names = sorted(last, key=lambda op: -last[op]["ms"])[:PROFILED_OPS]
    rows = {f"`{op}`": [one["ops"][op]["ms"] for one in shown_ones] for op in names}
    rows["other ops"] = [sum(op["ms"] for name, op in one["ops"].items() if name not in names) for one in shown_ones]
    rows["between ops, the record's own cost included"] = [one["between_ms"] for one in shown_ones]
    for what, read in (("weights", "weight_bytes"), ("keys and values", "cache_bytes")):
        rows[f"reading {what} once from memory, at best"] = [
            one[read] / one["bytes_a_second"] * 1e3 for one in shown_ones
        ]
    heads = " | ".join(f"batch {one['batch']}" for one in shown_ones)
    threads = counted(shown_ones[0]["threads"], "thread")
    return [
        f"| where a step goes, {precision}, {threads}: ms by onnxruntime's record, which costs time itself | {heads} |",
        f"|---|{'---|' * len(shown_ones)}",
        *(f"| {name} | {' | '.join(f'{ms:.2f}' for ms in found)} |" for name, found in rows.items()),
        "",
    ]


def targets_table(targets: list[dict[str, Any]]) -> list[str]:
    """Return what must hold, what was found, and whether it does; batches side by side."""
    batches = sorted({one["batch"] for one in targets if "batch" in one})
    cells: dict[str, dict[int, str]] = {}
    for one in targets:
        cells.setdefault(one["target"], {})[one.get("batch", batches[0])] = verdict(one)
    return [
        f"| {targets_met(targets)} | {' | '.join(f'batch {n}' for n in batches)} |",
        f"|---|{'---|' * len(batches)}",
        *(f"| {name} | {' | '.join(row.get(n, '') for n in batches)} |" for name, row in cells.items()),
    ]


def targets_met(targets: list[dict[str, Any]]) -> str:
    """Return how many of all targets are met."""
    return f"{sum(one['met'] is True for one in targets)} of {counted(len(targets), 'target')} are met"


def targets_list(targets: list[dict[str, Any]]) -> list[str]:
    """Return the same where there are no batches."""
    return [f"| {targets_met(targets)} | |", "|---|---|", *(f"| {one['target']} | {verdict(one)} |" for one in targets)]


def shown(value: float | None, form: str) -> str:
    """Return a number, or a dash for one that there is not."""
    return "–" if value is None else format(value, form)


def setting(row: dict[str, Any]) -> str:
    """Return threads of an engine, and for CTranslate2 the workers that its best setting has."""
    threads = counted(row["threads"], "thread")
    return f"best: {counted(row['workers'], 'worker')} of {threads}" if row["engine"] == "ctranslate2" else threads


def counted(count: int, noun: str) -> str:
    """Return a number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def other_lines(result: dict[str, Any]) -> list[str]:
    """Return memory, load and growth of the step in one line; none of them where they were not measured."""
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
    return [f"Beside this: {'; '.join(facts)}.", ""] if facts else []


def export_lines(result: dict[str, Any]) -> str:
    """Return how long an export takes, the proof included."""
    facts = [f"`{row['preset']}` is exported and certified in {row['seconds']:.0f} s" for row in result["export"]]
    return f"{'; '.join(facts)}. {where(result, ('torch', 'onnxruntime'))}."


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


def beams_table(result: dict[str, Any]) -> str:
    """Return the table of beam search on the same weights, CTranslate2 in its best setting, and a line on all else."""
    lines = [
        f"| model (random weights) | engine, {result['beams']} beams | batch | ms from source to target, min / p50 "
        "| ms a step, min / p50 | times CTranslate2's, whole, min / p50 | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        if row["engine"] == "ctranslate2" and not row["best_ctranslate2"]:
            continue
        whole, step, ratio = row["phases"]["end_to_end"], row["phases"][STEP], row["ratio_to_ctranslate2"]["end_to_end"]
        lines.append(
            f"| `{row['preset']}` | {ENGINES[row['engine']]}, {setting(row)} | {row['batch']} "
            f"| {whole['min_ms']:.0f} / {whole['p50_ms']:.0f} | {step['min_ms']:.2f} / {step['p50_ms']:.2f} "
            f"| {ratio['min']:.2f} / {ratio['p50']:.2f} | the reference's, checked |"
        )
    facts = [*beam_memory(result["memory"]), *shortlists(result["shortlist"])]
    beside = [f"Beside this: {'; '.join(facts)}.", ""] if facts else []
    return "\n".join([*lines, "", *beside, machine_line(result, ("onnxruntime", "ctranslate2"), "")])


def beam_memory(rows: list[dict[str, Any]]) -> list[str]:
    """Return what beams cost in memory."""
    return [
        f"with {counted(row['beams'], 'beam')} the process takes {row['peak_bytes'] / 1e6:.0f} MB at most, of which "
        f"{row['memory_bytes'] / 1e6:.2f} MB are cross keys and values and {row['state_bytes'] / 1e6:.2f} MB caches"
        for row in rows
    ]


def shortlists(rows: list[dict[str, Any]]) -> list[str]:
    """Return what a shortlist saves of a greedy step."""
    return [
        f"a shortlist of {row['shortlist']:,} tokens makes a greedy step {row['ratio_to_full'][STEP]['p50']:.2f} times "
        f"as long (batch {row['batch']}, {counted(row['threads'], 'thread')})"
        for row in rows
        if row["shortlist"]
    ]


def beam_rows_lines(result: dict[str, Any]) -> str:
    """Return what beams that share caches cost in both ways."""
    names = ("attention", "attention_with_indirection", "copy_of_a_row_a_source")
    facts = []
    for row in result["results"]:
        times = " / ".join(f"{row['min_us'][name]:.0f}" for name in names)
        facts.append(f"{times} µs ({counted(row['sources'], 'source')}, position {row['position']})")
    return (
        "Rows of beams that change their parent are copied; onnxruntime's attention can also be told which row holds "
        "each position. An attention / one with that indirection / the copy of a row a source, "
        f"{result['beams']} beams, {result['heads']} heads of {result['head_width']}, min: {', '.join(facts)}. "
        f"{where(result, ('onnxruntime',))}, {counted(result['threads'], 'thread')}, fp32."
    )


SEARCHES = {
    "greedy": "greedy",
    "beams": "4 beams",
    "top_p": "samples, top-p",
    "beams_ngrams": "4 beams, no repeated 3-grams",
}


def loop_table(result: dict[str, Any]) -> str:
    """Return the table of the decode loop over an engine that costs nothing."""
    sizes = sorted({row["vocab_size"] for row in result["results"]})
    rows = {(row["case"], row["batch"], row["vocab_size"]): row for row in result["results"]}
    titles = " | ".join(f"µs a step, {size:,} tokens, min / p50" for size in sizes)
    lines = [
        f"| decode loop alone | batch | {titles} | bytes a step allocates at most | grows with tokens or position |",
        f"|---|---|{'---|' * len(sizes)}---|---|",
    ]
    for one in result["allocations"]:
        found = [rows[one["case"], one["batch"], size] for size in sizes]
        times = " | ".join(f"{row['min_us']:.0f} / {row['p50_us']:.0f}" for row in found)
        most = max(count for row in found for count in row["bytes"].values())
        lines.append(
            f"| {SEARCHES[one['case']]} | {one['batch']} | {times} | {most:,.0f} | {'yes' if one['grows'] else 'no'} |"
        )
    return "\n".join(
        [*lines, "", f"{where(result, ('numpy',))}; an engine that costs nothing, {result['steps']} steps."]
    )


def load_lines(result: dict[str, Any]) -> str:
    """Return what became of models under load, the conditions that they met or did not meet."""
    lines = [
        f"`{row['bundle']}` under load, {row['requests']:,} mixed requests from {counted(row['threads'], 'thread')} "
        f"({row['cancelled']} targets cancelled): {conditions(row)}; "
        f"memory moved by {row['memory']['lowest']:+.1%} to {row['memory']['highest']:+.1%} after the warm-up."
        for row in result["results"]
    ]
    return "\n".join([*lines, "", f"{where(result, ('onnxruntime',))}."])


def conditions(row: dict[str, Any]) -> str:
    """Return the conditions in words, those that were not met first."""
    words = {name: name.replace("_", " ") for name in row["conditions"]}
    missed = [f"NOT MET: {words[name]}" for name, holds in row["conditions"].items() if not holds]
    return ", ".join([*missed, *(words[name] for name, holds in row["conditions"].items() if holds)])


def g2p_lines(result: dict[str, Any]) -> str:
    """Return errors and words a second of the bundled model and its peer, and how it was trained."""
    lines = [
        "| model | precision | beams | words at once | words a second, 1 thread | times g2p-en's | WER / PER, stress "
        "| without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        found = row["errors"]
        lines.append(
            f"| `{row['engine']}` | {row['precision']} | {row['beams']} | {row['batch']} "
            f"| {row['words_per_second']['p50']:,.0f} "
            f"| {row['times_peer']:.1f} | {found['wer']:.1f} / {found['per']:.1f} % "
            f"| {found['wer_without_stress']:.1f} / {found['per_without_stress']:.1f} % |"
        )
    trained = result["training"]
    about = (
        f"`g2p` has {trained['parameters']:,} parameters and was trained for {len(trained['epochs'])} epochs "
        f"({trained['seconds'] / 60:.0f} minutes on one core). {result['words']:,} words that it never saw, a word is "
        f"right if it is one of its {result['references']:,} pronunciations; g2p-en has probably seen them. With the "
        f"hybrid threshold {trained['final']['hybrid_threshold']:.2f}, chosen on the validation part, "
        f"{result['skipped_steps']:.1%} of all steps skip the cross-attention."
    )
    if other := result["compared_training"]:
        about += (
            f" The `transformer` has {other['parameters']:,} parameters and was trained on the same pairs for "
            f"{len(other['epochs'])} epochs ({other['seconds'] / 60:.0f} minutes on one core). Of the phonemes of the "
            f"validation part, which chose the epochs, it says {other['final']['token_error_rate']:.1f} % wrong, `g2p` "
            f"{trained['final']['token_error_rate']:.1f} %."
        )
    # Of the rows, not as written with them: a result may be older than a target.
    held = targets_list(g2p_targets(result["results"]))
    return "\n".join([*lines, "", *held, "", about, "", f"{where(result, ('onnxruntime', 'numpy'))}."])


# What stands between each pair of marks, in order. A result that nobody measured yet has no table.
BLOCKS = {
    "engines": {"engines_greedy.json": engines_table, "quantized.json": quantized_table},
    "g2p": {"g2p.json": g2p_lines},
    "more": {
        "engines_beam.json": beams_table,
        "beam_rows.json": beam_rows_lines,
        "loop_overhead.json": loop_table,
        "load.json": load_lines,
        "export_time.json": export_lines,
        "reference_greedy.json": reference_table,
    },
}


def with_tables(readme: str) -> str:
    """Return the README with everything between the marks made anew."""
    for block, tables in BLOCKS.items():
        marks = BEGIN.format(block=block), END.format(block=block)
        before, begin, rest = readme.partition(marks[0])
        _, end, after = rest.partition(marks[1])
        if not begin or not end:
            raise SystemExit(f"README.md lacks the marks {marks[0]!r} and {marks[1]!r}")
        found = {name: RESULTS / name for name in tables if (RESULTS / name).exists()}
        written = "\n\n".join(tables[name](json.loads(path.read_text())) for name, path in found.items())
        readme = f"{before}{begin}\n{written}\n{end}{after}"
    return readme


def picture() -> str:
    """Return the picture of all engines of the committed result, each in its best setting."""
    result = json.loads((RESULTS / "quantized.json").read_text())
    return steps_picture([row for row in result["results"] if row["best_setting"]], ENGINES, STEP)


def main() -> None:
    """Rewrite the README and its picture; with --check only say whether they are what the results give."""
    made = {README: with_tables(README.read_text()), RESULTS / PICTURE: picture()}
    if "--check" not in sys.argv[1:]:
        for path, text in made.items():
            path.write_text(text)
        return
    old = [path.name for path, text in made.items() if not path.exists() or path.read_text() != text]
    sys.exit(f"not what the results give: {', '.join(old)}; run python -m benchmarks.readme.run" if old else 0)


if __name__ == "__main__":
    main()
