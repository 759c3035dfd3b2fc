"""Calibration: which activations ranges are made of."""

import numpy as np

from fatdeploy.export.quantize.calibrate import BATCH, CalibrationRow, activations_of, unpadded_batches
from fatdeploy.manifest import DECODER, ENCODER
from tests.support.bundles import bundle_of


def said(source: int, target: int) -> CalibrationRow:
    draw = np.random.default_rng([source, target])
    return CalibrationRow(draw.integers(3, 64, source), draw.integers(3, 64, target))


def test_sources_of_a_batch_and_their_targets_are_of_one_length() -> None:
    given = [said(*lengths) for lengths in [(2, 3), (5, 3), (2, 4), (2, 3), *[(4, 4)] * (BATCH + 1)]]
    found = [[(len(one.source), len(one.target)) for one in batch] for batch in unpadded_batches(given)]
    assert found == [[(2, 3)] * 2, [(2, 4)], [(4, 4)] * BATCH, [(4, 4)], [(5, 3)]]


def test_no_range_is_made_of_padding() -> None:
    bundle = bundle_of("transformer-tiny")
    graphs = {part: bundle.path / part for part in (ENCODER, DECODER)}
    short, long = said(2, 3), said(7, 9)
    together = activations_of(graphs, bundle.spec, [short, long])
    alone = [activations_of(graphs, bundle.spec, [one]) for one in (short, long)]
    for part, n_rows in ((ENCODER, 2 + 7), (DECODER, 4 + 10)):
        for name, seen in together[part].items():
            # All rows, and twice the two extreme ones; none of the places that are filled up.
            assert len(seen.values) == (n_rows + 2 * 2 if seen.rows else 0), name
            assert (seen.low, seen.high) == (
                min(one[part][name].low for one in alone),
                max(one[part][name].high for one in alone),
            )
