"""Plans: the cheapest forms within a budget of errors, against every combination."""

from itertools import product

import numpy as np
import pytest

from fatdeploy.export.quantize.planning.plan import Option, Plan, planned, refined, worthwhile
from fatdeploy.export.quantize.recipe import FLOATS


def option(error: float, cost: float) -> Option:
    return Option(FLOATS, error, cost)


def numbers(options: list[Option]) -> list[tuple[float, float]]:
    return [(entry.error, entry.cost) for entry in options]


def test_an_option_that_another_beats_is_dropped_also_within_the_noise_of_costs() -> None:
    options = [option(3, 10), option(1, 10.4), option(2, 20), option(0, 40), option(5, 5)]
    # 10 is as cheap as 10.4, up to noise, and less exact; 20 is dearer and less exact.
    assert numbers(worthwhile(options)) == [(0, 40), (1, 10.4), (5, 5)]


def test_equal_errors_keep_the_cheapest() -> None:
    assert numbers(worthwhile([option(1, 30), option(1, 20)])) == [(1, 20)]


def test_without_a_limit_everything_is_as_cheap_as_it_can_be() -> None:
    plan = planned({"a": [option(9, 1), option(1, 2)], "b": [option(4, 3)]}, np.inf)
    assert (plan.error, plan.cost) == (13, 4)


def test_without_any_budget_everything_is_as_exact_as_it_can_be() -> None:
    plan = planned({"a": [option(9, 1), option(1, 2)], "b": [option(4, 3), option(0, 100)]}, 0.0)
    assert (plan.error, plan.cost) == (1, 102)


@pytest.mark.parametrize("seed", range(20))
def test_a_plan_keeps_its_budget_and_is_nearly_the_cheapest(seed: int) -> None:
    draw = np.random.default_rng(seed)
    options = {
        str(index): [option(*draw.exponential(size=2)) for _ in range(draw.integers(1, 5))] for index in range(6)
    }
    least = sum(min(entry.error for entry in choices) for choices in options.values())
    budget = least * draw.uniform(1, 4)
    plan = planned(options, budget)
    assert plan.error <= budget or plan.error == pytest.approx(least)
    combinations = [
        (sum(entry.error for entry in choice), sum(entry.cost for entry in choice))
        for choice in product(*options.values())
    ]
    cheapest = min(cost for error, cost in combinations if error <= max(budget, least * (1 + 1e-12)))
    # Equal prices do not find every combination; single matrices are only a part of the cost.
    assert cheapest * (1 - 1e-9) <= plan.cost <= 1.35 * cheapest


def test_what_is_left_of_a_budget_is_spent_where_it_saves_most() -> None:
    # At one price for all errors the large matrix takes its dear form, and most of the budget is left.
    options = {"large": [option(0, 100), option(10, 50)], "a": [option(0, 9), option(3, 6)], "b": [option(0, 8)]}
    plan = planned(options, 5.0)
    assert {name: entry.error for name, entry in plan.choices.items()} == {"large": 0, "a": 3, "b": 0}


LADDER = {"a": [option(2.0**-step, 100.0 + 10 * step) for step in range(9)]}


def rung(step: int) -> Plan:
    return Plan({"a": LADDER["a"][step]})


@pytest.mark.parametrize("safe_from", [1, 3, 4, 5, 8])
def test_a_cheaper_plan_is_found_between_a_safe_one_and_one_that_is_not(safe_from: int) -> None:
    tried: list[float] = []

    def is_safe(plan: Plan) -> bool:
        tried.append(plan.cost)
        return plan.cost >= 100 + 10 * safe_from

    plan = refined(LADDER, rung(8), rung(0), is_safe)
    assert plan.cost == 100 + 10 * safe_from
    assert (
        tried
        == {1: [140, 120, 110], 3: [140, 120, 130], 4: [140, 120, 130], 5: [140, 160, 150], 8: [140, 160, 170]}[
            safe_from
        ]
    )


def test_a_safe_plan_that_is_hardly_dearer_is_taken_as_it_is() -> None:
    options = {"a": [option(8, 100), option(4, 101), option(1, 102)]}
    safe, coarser = (Plan({"a": options["a"][place]}) for place in (2, 0))
    assert refined(options, safe, coarser, lambda _: pytest.fail("tried a plan")) is safe


def test_without_a_plan_between_two_none_is_tried() -> None:
    options = {"a": [option(8, 100), option(1, 200)]}
    safe, coarser = (Plan({"a": options["a"][place]}) for place in (1, 0))
    assert refined(options, safe, coarser, lambda _: pytest.fail("tried a plan")) is safe
