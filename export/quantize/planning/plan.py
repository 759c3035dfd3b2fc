"""Which form each matrix gets: the cheapest ones whose errors together stay within a budget."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fatdeploy.export.quantize.recipe import MatrixRecipe

# Costs that differ by less are taken for equal: the smaller error wins.
NOISE = 1.05
# Steps of the search for the price of an error, each of which halves the logarithm of its range.
SEARCH_STEPS = 60
DEAREST, CHEAPEST = 1e30, 1e-30
# How often a plan between two others is tried, and how much dearer the safe one must be.
TRIALS, WORTH_A_TRIAL = 3, 1.03


@dataclass(frozen=True, eq=False)
class Option:
    """A form that a matrix could have, its error and its cost."""

    recipe: MatrixRecipe
    error: float
    cost: float


@dataclass(frozen=True, eq=False)
class Plan:
    """The chosen form of each matrix, by name."""

    choices: Mapping[str, Option]

    @property
    def error(self) -> float:
        """The sum of all errors."""
        return sum(option.error for option in self.choices.values())

    @property
    def cost(self) -> float:
        """The sum of all costs."""
        return sum(option.cost for option in self.choices.values())


def worthwhile(options: Sequence[Option], noise: float = NOISE) -> list[Option]:
    """Return the options that no other beats: as exact, and as cheap up to the noise of measurements."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda option: (option.error, option.cost)):
        if not any(other.cost <= noise * option.cost for other in kept):
            kept.append(option)
    return kept


def planned(options: Mapping[str, Sequence[Option]], budget: float) -> Plan:
    """Return the cheapest plan whose errors sum up to no more than a budget, or else the most exact one.

    Every error has the same price, and each matrix takes what costs it least in total: the lowest price that keeps the
    budget is found by bisection. Such a plan is the cheapest of all with its sum of errors; what is left of the budget
    is then spent one by one, where it saves most.
    """
    low, high = CHEAPEST, DEAREST
    cheap = _at_price(options, low)
    if cheap.error <= budget:
        return cheap
    for _ in range(SEARCH_STEPS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _at_price(options, middle).error <= budget else (middle, high)
    return _spent(options, _at_price(options, high), budget)


def refined(
    options: Mapping[str, Sequence[Option]], plan: Plan, coarser: Plan, is_safe: Callable[[Plan], bool]
) -> Plan:
    """Return the cheapest safe plan that a few trials find between a safe plan and a coarser one that is not."""
    for _ in range(TRIALS):
        middle = planned(options, (plan.error * coarser.error) ** 0.5)
        if not coarser.cost < middle.cost < plan.cost or plan.cost < WORTH_A_TRIAL * coarser.cost:
            break
        if is_safe(middle):
            plan = middle
        else:
            coarser = middle
    return plan


def _spent(options: Mapping[str, Sequence[Option]], plan: Plan, budget: float) -> Plan:
    """Return a plan with the largest savings that what is left of the budget pays for."""
    choices = dict(plan.choices)
    left = budget - plan.error
    while left > 0:
        savings = [
            (choices[name].cost - option.cost, name, option)
            for name, others in options.items()
            for option in others
            if option.cost < choices[name].cost and option.error - choices[name].error <= left
        ]
        if not savings:
            break
        _, name, option = max(savings, key=lambda saving: saving[:2])
        left -= option.error - choices[name].error
        choices[name] = option
    return Plan(choices)


def _at_price(options: Mapping[str, Sequence[Option]], price: float) -> Plan:
    return Plan(
        {
            name: min(choices, key=lambda option: (option.cost + price * option.error, option.error))
            for name, choices in options.items()
        }
    )
