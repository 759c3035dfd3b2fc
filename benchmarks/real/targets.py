"""What the real model must reach against CTranslate2, and whether the rows of a result do."""

from typing import Any

from benchmarks.harness.targets import judged

Row = dict[str, Any]
LEAST_ALONE, LEAST_BULK = 2.0, 1.15
MOST_SECONDS = {"fp32": 120.0, "int8": 240.0}
MOST_SECONDS_OF_INTEGERS = 120.0


def speed_targets(rows: list[Row]) -> list[dict[str, Any]]:
    """Return what the model must reach against the peer; None where a side was not measured."""
    alone, bulk = times(rows, "alone"), times(rows, "bulk")
    return [
        judged("a sentence alone in fp32, times faster than CTranslate2's best", alone, at_least=LEAST_ALONE),
        judged("bulk in fp32, times the tokens per second of CTranslate2's best", bulk, at_least=LEAST_BULK),
    ]


def export_targets(exports: list[Row]) -> list[dict[str, Any]]:
    """Return how long an export may take; None where it was not measured."""
    seconds = {row["precision"]: row["seconds"] for row in exports}
    added = seconds["int8"] - seconds["fp32"] if {"int8", "fp32"} <= seconds.keys() else None
    return [
        *(
            judged(f"export in {precision} with its proof, s", seconds.get(precision), at_most=most)
            for precision, most in MOST_SECONDS.items()
        ),
        judged("calibration, plan and gate of int8, s beyond fp32", added, at_most=MOST_SECONDS_OF_INTEGERS),
    ]


def times(rows: list[Row], part: str) -> float | None:
    """Return how many times faster than the peer's best setting our best one is."""
    ours, peer = best(rows, part, "fatdeploy"), best(rows, part, "ctranslate2")
    if ours is None or peer is None:
        return None
    return speed(ours) / speed(peer)


def best(rows: list[Row], part: str, engine: str) -> Row | None:
    """Return an engine's fastest row of a part; None without rows."""
    return max((row for row in rows if (row["part"], row["engine"]) == (part, engine)), key=speed, default=None)


def speed(row: Row) -> float:
    """Return what is larger the faster an engine is: tokens, or sentences alone, per second."""
    return float(row["tokens_per_second"]["p50"] if row["part"] == "bulk" else 1e3 / row["sentence"]["p50_ms"])
