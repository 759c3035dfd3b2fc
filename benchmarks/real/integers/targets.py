"""What the quantized model must reach against CTranslate2, and whether a result does."""

from collections.abc import Iterator
from typing import Any

from benchmarks.harness.targets import Target, judged
from benchmarks.real.integers.settings import BEAMS, PEER_INT8, SHORTLIST
from benchmarks.real.integers.stages import Row, best_settings, speed

LEAST_AGREEMENT = {"int8-latency": 99.0, "int8-throughput": 98.0, "int4": 98.0}  # percent
MOST_BYTES = 0.65  # of int4, relative to int8
SPEEDS = (  # name, part, form of ours, how many times the speed of the peer's best
    ("a sentence alone in int8, times faster than CTranslate2's best", "greedy-alone", "int8-latency", 2.5),
    ("a sentence alone in int4, times faster than CTranslate2's best", "greedy-alone", "int4", 3.0),
    ("bulk in int8, times the tokens per second of CTranslate2's best", "greedy-bulk", "int8-throughput", 1.3),
    (
        "bulk in int8 with the same shortlist, times the tokens per second of CTranslate2's best",
        "shortlist-bulk",
        f"int8-throughput{SHORTLIST}",
        1.3,
    ),
    ("a sentence alone in int8 with 4 beams, times faster than CTranslate2's best", "beams-alone", "int8-latency", 2.0),
    (
        "bulk in int8 with 4 beams, times the tokens per second of CTranslate2's best",
        "beams-bulk",
        "int8-throughput",
        1.2,
    ),
)
SEARCHES = {1: "greedy", BEAMS: f"{BEAMS} beams"}


def integer_targets(rows: list[Row], fidelity: list[Row], bundles: list[Row]) -> list[Target]:
    """Return every target, the measured value and whether it is met; None where a side was not measured."""
    return [*_agreements(fidelity), *_against_peer(fidelity), _size(bundles), *_speeds(rows)]


def fidelity_of(fidelity: list[Row], engine: str, form: str, beams: int) -> Row:
    """Return how close a form is to its own fp32; empty where it was not measured."""
    return next((row for row in fidelity if (row["engine"], row["form"], row["beams"]) == (engine, form, beams)), {})


def times(rows: list[Row], part: str, form: str) -> float | None:
    """Return how many times faster a form of ours is than the peer's best setting; medians of all repetitions."""
    ours = next((row for row in rows if (row["part"], row["engine"], row["form"]) == (part, "fatdeploy", form)), None)
    peer = next(iter(best_settings(rows, part)), None)
    return None if ours is None or peer is None else speed(ours) / speed(peer)


def _agreements(fidelity: list[Row]) -> Iterator[Target]:
    for form, least in LEAST_AGREEMENT.items():
        forced = fidelity_of(fidelity, "fatdeploy", form, 1).get("forced")
        share = None if forced is None else 100 * forced["share"]
        yield judged(f"{form}: tokens of fp32 after fp32's own, %", share, at_least=least)


def _against_peer(fidelity: list[Row]) -> Iterator[Target]:
    for beams, search in SEARCHES.items():
        peer = fidelity_of(fidelity, "ctranslate2", PEER_INT8, beams)
        for form in ("int8-latency", "int8-throughput"):
            ours = fidelity_of(fidelity, "fatdeploy", form, beams)
            for key, name in (("unchanged", "unchanged sentences"), ("chrf", "chrF against fp32's output")):
                more = float(ours[key] - peer[key]) if ours and peer else None
                yield judged(f"{form}, {search}: {name}, more than CTranslate2's int8", more, at_least=0.0)


def _size(bundles: list[Row]) -> Target:
    sizes: dict[str, Any] = {row["form"]: row["bytes"] for row in bundles}
    share = sizes["int4"] / sizes["int8-latency"] if {"int4", "int8-latency"} <= sizes.keys() else None
    return judged("int4 bundle, times the bytes of int8", share, at_most=MOST_BYTES)


def _speeds(rows: list[Row]) -> Iterator[Target]:
    for name, part, form, least in SPEEDS:
        yield judged(name, times(rows, part, form), at_least=least)
