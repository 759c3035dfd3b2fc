"""Tables of engines on the same weights: every precision and peer, greedy and with beams."""

from typing import Any

from benchmarks.readme.phrases import (
    ENGINES,
    STEP,
    counted,
    machine_line,
    setting,
    shown,
    targets_met,
    targets_table,
    where,
)

PROFILED_OPS = 5


def engines_table(result: dict[str, Any]) -> str:
    """Return the table of engines on the same weights, CTranslate2 in its best setting, and a line on all else."""
    lines = [
        "| model (random weights) | engine | batch | ms per step, min / p50 | times CTranslate2's, min / p50 "
        "| tokens |",
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


def other_lines(result: dict[str, Any]) -> list[str]:
    """Return memory, load and growth of the step in one line; nothing where nothing was measured."""
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
    return [f"Also measured: {'; '.join(facts)}.", ""] if facts else []


def quantized_table(result: dict[str, Any]) -> str:
    """Return the table of precisions and peers on the same weights, each in its best setting, and the targets."""
    lines = [
        f"| batch | engine, `{result['preset']}` (random weights) | ms per step, p50 "
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
    steps = f"{result['target']} steps; each token is compared after the reference's own tokens."
    more = [*targets_table(result["targets"]), "", *profile_lines(result["profiles"])]
    return "\n".join([*lines, "", *more, measured + steps])


def speed_table(result: dict[str, Any], batch: int = 1) -> str:
    """Return the table of the README: one row per engine at one batch size, each engine in its best setting."""
    lines = [
        f"| `{result['preset']}`, batch {batch} | ms per step | MB on disk | same tokens as the reference |",
        "|---|---|---|---|",
    ]
    for row in result["results"]:
        if row["best_setting"] and row["batch"] == batch:
            size, forced = row["bytes_on_disk"], row["agreement"]["forced"]
            lines.append(
                f"| {ENGINES[row['engine']]}, {row['precision']} | {row['phases'][STEP]['p50_ms']:.2f} "
                f"| {shown(size and size / 1e6, '.0f')} | {shown(forced, '.1%')} |"
            )
    caption = f"{where(result, ('onnxruntime', 'ctranslate2', 'torch'))}; random weights, each engine at its best."
    more = f"{largest_batch(result)} {targets_met(result['targets'])} ([all tables](docs/benchmarks.md))."
    return "\n".join([*lines, "", more, caption])


def largest_batch(result: dict[str, Any]) -> str:
    """Return speed and agreement at the largest batch, so that the table's batch does not stand for all of them."""
    batch = max(row["batch"] for row in result["results"])
    facts = [
        f"{ENGINES[row['engine']].partition(',')[0]} {row['precision']} {shown(row['times_faster'][STEP], '.2f')}× "
        f"with {shown(row['agreement']['forced'], '.1%')} of the tokens"
        for row in result["results"]
        if row["best_setting"] and row["batch"] == batch and row["engine"] in ("fatdeploy", "ctranslate2")
    ]
    return f"At batch {batch}, CTranslate2's speed being 1: {', '.join(facts)}."


def profile_lines(profiles: list[dict[str, Any]], precision: str = "int8") -> list[str]:
    """Return where the time of a step goes, batches side by side, and what reading the weights alone takes."""
    chosen = [profile for profile in profiles if profile["precision"] == precision]
    if not chosen:
        return []
    last = chosen[-1]["ops"]
    names = sorted(last, key=lambda op: -last[op]["ms"])[:PROFILED_OPS]
    rows = {f"`{op}`": [profile["ops"][op]["ms"] for profile in chosen] for op in names}
    rows["other ops"] = [
        sum(op["ms"] for name, op in profile["ops"].items() if name not in names) for profile in chosen
    ]
    rows["between ops, including the cost of profiling"] = [profile["between_ms"] for profile in chosen]
    for what, read in (("weights", "weight_bytes"), ("keys and values", "cache_bytes")):
        rows[f"reading {what} once from memory, at best"] = [
            profile[read] / profile["bytes_a_second"] * 1e3 for profile in chosen
        ]
    heads = " | ".join(f"batch {profile['batch']}" for profile in chosen)
    threads = counted(chosen[0]["threads"], "thread")
    return [
        f"| where a step goes, {precision}, {threads}: ms in onnxruntime's profile, which costs time itself "
        f"| {heads} |",
        f"|---|{'---|' * len(chosen)}",
        *(f"| {name} | {' | '.join(f'{ms:.2f}' for ms in times)} |" for name, times in rows.items()),
        "",
    ]


def beams_table(result: dict[str, Any]) -> str:
    """Return the table of beam search on the same weights, CTranslate2 in its best setting, and a line on all else."""
    lines = [
        f"| model (random weights) | engine, {result['beams']} beams | batch | ms from source to target, min / p50 "
        "| ms per step, min / p50 | times CTranslate2's, whole, min / p50 | tokens |",
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
    beside = [f"Also measured: {'; '.join(facts)}.", ""] if facts else []
    return "\n".join([*lines, "", *beside, machine_line(result, ("onnxruntime", "ctranslate2"), "")])


def beam_memory(rows: list[dict[str, Any]]) -> list[str]:
    """Return how much memory beams take."""
    return [
        f"with {counted(row['beams'], 'beam')} the process takes at most {row['peak_bytes'] / 1e6:.0f} MB, including "
        f"{row['memory_bytes'] / 1e6:.2f} MB of cross-attention keys and values "
        f"and {row['state_bytes'] / 1e6:.2f} MB of caches"
        for row in rows
    ]


def shortlists(rows: list[dict[str, Any]]) -> list[str]:
    """Return how much of a greedy step a shortlist saves."""
    return [
        f"a shortlist of {row['shortlist']:,} tokens makes a greedy step {row['ratio_to_full'][STEP]['p50']:.2f} times "
        f"as long (batch {row['batch']}, {counted(row['threads'], 'thread')})"
        for row in rows
        if row["shortlist"]
    ]


def beam_rows_lines(result: dict[str, Any]) -> str:
    """Return the cost of both ways to let beams share caches."""
    names = ("attention", "attention_with_indirection", "copy_of_a_row_a_source")
    facts = []
    for row in result["results"]:
        times = " / ".join(f"{row['min_us'][name]:.0f}" for name in names)
        facts.append(f"{times} µs ({counted(row['sources'], 'source')}, position {row['position']})")
    return (
        "Rows of beams that change their parent are copied. onnxruntime's attention can instead read a table that says "
        "which row holds each position. One attention / one with that table / one copied row per source, "
        f"{result['beams']} beams, {result['heads']} heads of {result['head_width']}, min: {', '.join(facts)}. "
        f"{where(result, ('onnxruntime',))}, {counted(result['threads'], 'thread')}, fp32."
    )
