"""The targets of the bundled model on words that it never saw, and whether the rows of a result meet them."""

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
# Words per batch, and the required speed relative to the peer's words per second.
LEAST_SPEED = {1: 3.0, 32: 10.0}


def targets(rows: list[Row]) -> list[dict[str, Any]]:
    """Return every target, the measured value and whether it is met; None where a side was not measured."""
    greedy, beams = _errors(rows), _errors(rows, beams=BEAMS)
    quantized = _errors(rows, precision="int8")
    return [
        *(judged(words, greedy.get(name), at_most=most) for name, (words, most) in MOST_ERRORS.items()),
        *(
            judged(
                f"{unit} wrong with {BEAMS} beams, points above greedy", _above(beams, greedy, name), at_most=MOST_LOSS
            )
            for name, unit in (("wer", "words"), ("per", "phonemes"))
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
    """Return the error rates of our model; they do not depend on the batch."""
    setting = {"engine": OURS, "precision": precision, "beams": beams}
    return next((row["errors"] for row in rows if setting.items() <= row.items()), {})


def _above(errors: dict[str, float], baseline: dict[str, float], name: str) -> float | None:
    return errors[name] - baseline[name] if errors and baseline else None


def _speed(rows: list[Row], batch: int) -> float | None:
    setting = {"engine": OURS, "beams": 1, "batch": batch}
    return max((row["times_peer"] for row in rows if setting.items() <= row.items()), default=None)
