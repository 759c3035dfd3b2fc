"""Tables of how the FAT family scales: decoders with the length of the target, encoders with that of the source."""

from typing import Any

from benchmarks.readme.phrases import counted, where


def family_tables(result: dict[str, Any]) -> str:
    """Return the table of decoders, where they cross, and the table of encoders."""
    parts = [decoder_lines(result), crossover_lines(result), encoder_lines(result), [about(result)]]
    return "\n\n".join("\n".join(lines) for lines in parts if lines)


def decoder_lines(result: dict[str, Any]) -> list[str]:
    """Return the time of a step and the memory of a decode by length of the target."""
    if not result["decoders"]:
        return []
    lengths = result["targets"]
    shown_bytes = lengths[0], lengths[-1]
    lines = [
        f"| model (random weights), ms per step on average | batch | {' | '.join(f'{n:,} tokens' for n in lengths)} "
        f"| MB of state, {' / '.join(f'{n:,}' for n in shown_bytes)} tokens |",
        f"|---|---|{'---|' * len(lengths)}---|",
    ]
    for row in result["decoders"]:
        times = " | ".join(f"{ms:.2f}" for ms in row["mean_ms"])
        memory = " / ".join(f"{row['state_bytes'][lengths.index(n)] / 1e6:.1f}" for n in shown_bytes)
        lines.append(f"| `{row['model']}` | {row['batch']} | {times} | {memory} |")
    return lines


def crossover_lines(result: dict[str, Any]) -> list[str]:
    """Return from which length on a model's steps are cheaper than the transformer's."""
    return [
        f"- `{row['model']}`, batch {row['batch']}: "
        + (
            f"cheaper than `{row['other']}` from targets of {row['target']:,} tokens on."
            if row["target"] is not None
            else f"at no measured length cheaper than `{row['other']}`."
        )
        for row in result["crossovers"]
    ]


def encoder_lines(result: dict[str, Any]) -> list[str]:
    """Return the time and the memory of every encoder attention by length of the source."""
    if not result["encoders"]:
        return []
    lengths = result["sources"]
    lines = [
        f"| encoder attention, ms per source | {' | '.join(f'{n:,} tokens' for n in lengths)} "
        f"| MB that {lengths[-1]:,} tokens add to the process |",
        f"|---|{'---|' * len(lengths)}---|",
    ]
    for row in sorted(result["encoders"], key=lambda row: float(row["ms"][-1])):
        times = " | ".join(f"{ms:,.1f}" for ms in row["ms"])
        lines.append(f"| {row['model']} | {times} | {row['grown_bytes'][-1] / 1e6:,.0f} |")
    return lines


def about(result: dict[str, Any]) -> str:
    """Return where this was measured, and how."""
    noise = result["noise"]
    return (
        f"{where(result, ('onnxruntime',))}, {counted(result['threads'], 'thread')}. Targets of sources of "
        f"{result['source']} tokens; encoders have the three layers and the width of the small presets and read one "
        f"source. {noise['noisy_share']:.0%} of the turns ran while fixed work was more than "
        f"{noise['limit'] - 1:.0%} slower than its best."
    )
