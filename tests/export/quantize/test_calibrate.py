"""Calibration: which activations the ranges are computed from."""

import numpy as np

from fatdeploy.export.quantize.calibrate import BATCH, CalibrationRow, activations_of, unpadded_batches
from fatdeploy.manifest import DECODER, ENCODER
from tests.support.bundles import bundle_of


def calibration_row(source: int, target: int) -> CalibrationRow:
    draw = np.random.default_rng([source, target])
    return CalibrationRow(draw.integers(3, 64, source), draw.integers(3, 64, target))


def test_sources_of_a_batch_and_their_targets_are_of_one_length() -> None:
    rows = [calibration_row(*lengths) for lengths in [(2, 3), (5, 3), (2, 4), (2, 3), *[(4, 4)] * (BATCH + 1)]]
    lengths_of_batches = [[(len(row.source), len(row.target)) for row in batch] for batch in unpadded_batches(rows)]
    assert lengths_of_batches == [[(2, 3)] * 2, [(2, 4)], [(4, 4)] * BATCH, [(4, 4)], [(5, 3)]]


def test_no_range_includes_padding() -> None:
    bundle = bundle_of("transformer-tiny")
    graphs = {part: bundle.path / part for part in (ENCODER, DECODER)}
    short, long = calibration_row(2, 3), calibration_row(7, 9)
    together = activations_of(graphs, bundle.spec, [short, long])
    alone = [activations_of(graphs, bundle.spec, [row]) for row in (short, long)]
    for part, n_rows in ((ENCODER, 2 + 7), (DECODER, 4 + 10)):
        for name, activation in together[part].items():
            # All rows, and the two extreme ones twice; none of the padding.
            assert len(activation.values) == (n_rows + 2 * 2 if activation.rows else 0), name
            assert (activation.low, activation.high) == (
                min(row[part][name].low for row in alone),
                max(row[part][name].high for row in alone),
            )
