"""The table of the published choices: which of them train."""

from typing import Any

from benchmarks.readme.phrases import shown, where


def published_table(result: dict[str, Any]) -> str:
    """Return the errors of every variant after equally many steps, and how they were trained."""
    lines = [
        "| model | changed in it | loss, nats per phoneme | PER | WER | steps that are skipped | parameters |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["results"]:
        changes = ", ".join(f"`{name}={value}`" for name, value in row["changes"].items()) or "–"
        skipped = shown(row["skipped"], ".0%")
        lines.append(f"| `{row['preset']}` | {changes} | {scores(row)} | {skipped} | {row['parameters']:,} |")
    sizes, steps = result["sizes"], result["results"][0]["steps"]
    return "\n".join(
        [
            *lines,
            "",
            f"Each was trained once, with one seed, for {steps:,} steps ({sizes['epochs']} epochs) on "
            f"{result['pairs']['train']:,} pairs, with {sizes['layers']} + {sizes['layers']} layers of "
            f"width {sizes['width']}, and judged on {result['pairs']['validation']:,} pairs it never saw. "
            f"{where(result, ('torch',))}.",
        ]
    )


def scores(row: dict[str, Any]) -> str:
    """Return the last epoch's loss and errors, or that the training failed."""
    if row["failed"] is not None:
        return f"failed: {row['failed']} | – | –"
    last = row["epochs"][-1]
    return f"{last['loss']:.3f} | {last['token_error_rate']:.1f} % | {last['sequence_error_rate']:.1f} %"
