"""Costs are measured on the machine, once per shape and form."""

import numpy as np
import pytest

from fatdeploy.export.quantize.planning import costs
from fatdeploy.export.quantize.planning.costs import ProductShape, cost_of, least_microseconds
from fatdeploy.export.quantize.recipe import Form

SMALL = ProductShape(64, 48, rows=2, threads=1)


@pytest.mark.parametrize("form", ["fp32", "static", "row", "blocks8", "blocks4"])
def test_every_form_has_a_cost_that_is_measured_once(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cost_of(form, SMALL, 7, smoothed=False)
    assert 0 < first < 1e5
    monkeypatch.setattr(costs, "least_microseconds", lambda run: pytest.fail("it was measured before"))
    assert cost_of(form, SMALL, 7, smoothed=False) == first


def test_factors_add_the_cost_of_a_mul() -> None:
    plain, smoothed = (cost_of("static", SMALL, 7, smoothed=smoothed) for smoothed in (False, True))
    assert smoothed > plain
    assert cost_of("row", SMALL, 7, smoothed=True) - cost_of("row", SMALL, 7, smoothed=False) == pytest.approx(
        smoothed - plain
    )


def test_another_shape_number_of_rows_threads_or_bits_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    monkeypatch.setattr(costs, "kept", lambda kind, key, measure: measured.append(key) or len(measured))
    shapes = [SMALL, ProductShape(48, 64, 2, 1), ProductShape(64, 48, 3, 1), ProductShape(64, 48, 2, None)]
    assert [cost_of("static", shape, 7, smoothed=False) for shape in shapes] == [1, 2, 3, 4]
    assert cost_of("static", SMALL, 8, smoothed=False) == 5
    assert len(set(measured)) == 5


def test_the_least_time_of_a_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(np.cumsum([0.0, 0.5, 0.0, 0.3, 0.0, 0.2, 0.0, 0.4, 0.0, 0.6, 0.0, 0.5, 0.0]).tolist())
    monkeypatch.setattr(costs.time, "perf_counter", lambda: next(clock))
    assert least_microseconds(lambda: None) == pytest.approx(0.2e6)
