"""The bundled model: English words to phonemes, trained on the CMU Pronouncing Dictionary."""

from pathlib import Path

# A checkpoint as any other, with the notice of the data that it was trained on and the report of its training.
CHECKPOINT = Path(__file__).parent / "checkpoint"
