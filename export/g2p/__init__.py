"""The bundled model: English words to phonemes, trained on the CMU Pronouncing Dictionary."""

from pathlib import Path

# What is typed in the place of a preset or a folder.
NAME = "g2p"
# A checkpoint as any other, with the notice of the data that it was trained on and the report of its training.
CHECKPOINT = Path(__file__).parent / "checkpoint"
LICENCE = "Apache-2.0; trained on the CMU Pronouncing Dictionary, Copyright (C) 1993-2015 Carnegie Mellon University"
# Pairs that a quantization of it is calibrated with (of the training part) and judged by (of the validation part).
CALIBRATION, PROBES = CHECKPOINT / "calibration.tsv", CHECKPOINT / "probes.tsv"
