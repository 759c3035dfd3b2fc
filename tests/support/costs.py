"""Costs of products that are the same on every machine: plans in tests do not depend on a clock."""

from fatdeploy.export.quantize.integers import WeightBits
from fatdeploy.export.quantize.planning.costs import ProductShape
from fatdeploy.export.quantize.recipe import Form

# Per number of the matrix: static forms are the cheapest that have 8 bits, floats are dear.
COSTS: dict[Form, float] = {"static": 1.0, "row": 1.4, "blocks8": 1.2, "blocks4": 0.8, "fp32": 4.0}
MUL = 0.1


def steady_cost(form: Form, shape: ProductShape, bits: WeightBits, *, smoothed: bool) -> float:
    """Return what a product costs in a form."""
    return shape.rows * shape.width * shape.columns * (COSTS[form] + MUL * smoothed)
