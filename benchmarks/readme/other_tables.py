"""Tables of everything else that is measured: the loop alone, load, the bundled model, export, the reference."""

from typing import Any

from benchmarks.g2p.targets import targets as g2p_targets
from benchmarks.readme.phrases import counted, machine_line, targets_list, where

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
    titles = " | ".join(f"µs per step, {size:,} tokens, min / p50" for size in sizes)
    lines = [
        f"| decode loop alone | batch | {titles} | most bytes allocated per step | grows with tokens or position |",
        f"|---|---|{'---|' * len(sizes)}---|---|",
    ]
    for case in result["allocations"]:
        measured = [rows[case["case"], case["batch"], size] for size in sizes]
        times = " | ".join(f"{row['min_us']:.0f} / {row['p50_us']:.0f}" for row in measured)
        most = max(count for row in measured for count in row["bytes"].values())
        lines.append(
            f"| {SEARCHES[case['case']]} | {case['batch']} | {times} | {most:,.0f} "
            f"| {'yes' if case['grows'] else 'no'} |"
        )
    return "\n".join(
        [*lines, "", f"{where(result, ('numpy',))}; an engine that costs nothing, {result['steps']} steps."]
    )


def load_lines(result: dict[str, Any]) -> str:
    """Return how models behave under load: which conditions they meet and which not."""
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
    """Return errors and words per second of the bundled model and its peer, and how it was trained."""
    lines = [
        "| model | precision | beams | words at once | words per second, 1 thread | times g2p-en's | WER / PER, stress "
        "| without |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        errors = row["errors"]
        lines.append(
            f"| `{row['engine']}` | {row['precision']} | {row['beams']} | {row['batch']} "
            f"| {row['words_per_second']['p50']:,.0f} "
            f"| {row['times_peer']:.1f} | {errors['wer']:.1f} / {errors['per']:.1f} % "
            f"| {errors['wer_without_stress']:.1f} / {errors['per_without_stress']:.1f} % |"
        )
    trained = result["training"]
    about = (
        f"`g2p` has {trained['parameters']:,} parameters and was trained for {len(trained['epochs'])} epochs "
        f"({trained['seconds'] / 60:.0f} minutes on one core). The test has {result['words']:,} words that it never "
        f"saw, with {result['references']:,} pronunciations, any of which is right; g2p-en has probably seen them. "
        f"With the hybrid threshold {trained['final']['hybrid_threshold']:.2f}, chosen on the validation part, "
        f"{result['skipped_steps']:.1%} of all steps skip the cross-attention."
    )
    if other := result["compared_training"]:
        about += (
            f" The `transformer` has {other['parameters']:,} parameters and was trained on the same pairs for "
            f"{len(other['epochs'])} epochs ({other['seconds'] / 60:.0f} minutes on one core). On the "
            f"validation part, which chose the epochs, it gets {other['final']['token_error_rate']:.1f} % of the "
            f"phonemes wrong, `g2p` {trained['final']['token_error_rate']:.1f} %."
        )
    # Judged anew from the rows: a result may be older than a target.
    judged = targets_list(g2p_targets(result["results"]))
    return "\n".join([*lines, "", *judged, "", about, "", f"{where(result, ('onnxruntime', 'numpy'))}."])


def export_lines(result: dict[str, Any]) -> str:
    """Return how long an export takes, the proof included."""
    facts = [f"`{row['preset']}` is exported and certified in {row['seconds']:.0f} s" for row in result["export"]]
    return f"{'; '.join(facts)}. {where(result, ('torch', 'onnxruntime'))}."


def reference_table(result: dict[str, Any]) -> str:
    """Return the table of greedy decoding with the reference."""
    lines = [
        "| model (random weights) | engine | batch | encode, ms | ms per step, min / p50 / p95 | tokens |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        step, encode = row["phases"]["per_token"], row["phases"]["encode"]
        lines.append(
            f"| `{row['preset']}` | {result['engine']} | {row['batch']} | {encode['p50_ms']:.1f} "
            f"| {step['min_ms']:.1f} / {step['p50_ms']:.1f} / {step['p95_ms']:.1f} | are the reference |"
        )
    return "\n".join([*lines, "", machine_line(result, ("torch",), f", {result['threads']} threads")])
