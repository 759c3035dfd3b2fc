"""The bundled model: English words to phonemes, trained on the CMU Pronouncing Dictionary."""

from pathlib import Path

# The name to type instead of a preset or a folder.
NAME = "g2p"
# An ordinary checkpoint, with a notice about its training data and the report of its training.
CHECKPOINT = Path(__file__).parent / "checkpoint"
LICENCE = "Apache-2.0; trained on the CMU Pronouncing Dictionary, Copyright (C) 1993-2015 Carnegie Mellon University"
# Pairs that calibrate a quantization of it (from the training part) and judge it (from the validation part).
CALIBRATION, PROBES = CHECKPOINT / "calibration.tsv", CHECKPOINT / "probes.tsv"
