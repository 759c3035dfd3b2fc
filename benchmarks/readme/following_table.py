"""The table of attentions to the source that were trained alike."""

from typing import Any

from benchmarks.readme.phrases import where
from benchmarks.readme.published_table import scores


def following_table(result: dict[str, Any]) -> str:
    """Return the errors of every attention after equally many steps, also on words longer than any before."""
    lines = [
        "| `cross_attention` | loss, nats per phoneme | PER | WER | PER of two words joined | parameters |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        joined = "–" if row["joined"] is None else f"{row['joined']['token_error_rate']:.1f} %"
        name = row["changes"]["cross_attention"]
        lines.append(f"| `{name}` | {scores(row)} | {joined} | {row['parameters']:,} |")
    sizes, steps = result["sizes"], result["results"][0]["steps"]
    return "\n".join(
        [
            *lines,
            "",
            f"A `transformer` with {sizes['layers']} + {sizes['layers']} layers of width {sizes['width']}, trained "
            f"once with each, with one seed, for {steps:,} steps ({sizes['epochs']} epochs) on "
            f"{result['pairs']['train']:,} pairs, and judged on {result['pairs']['validation']:,} pairs it never saw. "
            "Two of these words joined are longer than what it was trained on; they are read with the weights of the "
            f"best epoch. {where(result, ('torch',))}.",
        ]
    )
