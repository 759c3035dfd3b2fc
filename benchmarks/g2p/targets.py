"""What the bundled model must reach on the words that it never saw, and whether the rows of a result do."""

from typing import Any

from benchmarks.harness.targets import judged

Row = dict[str, Any]

OURS = "g2p"
# In percent, greedy, fp32.
MOST_ERRORS = {
    "wer": ("words wrong with stress, %", 36.0),
    "per": ("phonemes wrong with stress, %", 8.5),
    "wer_without_stress": ("words wrong without stress, %", 31.0),
}
BEAMS, MOST_LOSS = 5, 0.3  # points
# Words at once, and how many times the peer's words a second are asked for.
LEAST_SPEED = {1: 3.0, 32: 10.0}


def targets(rows: list[Row]) -> list[dict[str, Any]]:
    """Return every target, what was found and whether it is met; None where a side of it was not measured."""
    greedy, beams = _errors(rows), _errors(rows, beams=BEAMS)
    quantized = _errors(rows, precision="int8")
    return [
        *(judged(said, greedy.get(name), at_most=most) for name, (said, most) in MOST_ERRORS.items()),
        *(
            judged(
                f"{said} wrong with {BEAMS} beams, points above greedy", _above(beams, greedy, name), at_most=MOST_LOSS
            )
            for name, said in (("wer", "words"), ("per", "phonemes"))
        ),
        judged("phonemes wrong in int8, points above fp32", _above(quantized, greedy, "per"), at_most=MOST_LOSS),
        *(
            judged(
                f"words a second, {batch} at once, times g2p-en's: the faster precision",
                _speed(rows, batch),
                at_least=least,
            )
            for batch, least in LEAST_SPEED.items()
        ),
    ]


def _errors(rows: list[Row], *, precision: str = "fp32", beams: int = 1) -> dict[str, float]:
    """Return the error rates of our model; they are the same however many words are at once."""
    asked = {"engine": OURS, "precision": precision, "beams": beams}
    return next((row["errors"] for row in rows if asked.items() <= row.items()), {})


def _above(one: dict[str, float], other: dict[str, float], name: str) -> float | None:
    return one[name] - other[name] if one and other else None


def _speed(rows: list[Row], batch: int) -> float | None:
    asked = {"engine": OURS, "beams": 1, "batch": batch}
    return max((row["times_peer"] for row in rows if asked.items() <= row.items()), default=None)
