"""Targets of a result: the limit, the measured value, whether it is met, and all of it in words."""

import math
from typing import Any

Target = dict[str, Any]


def judged(name: str, value: float | None, **rest: Any) -> Target:
    """Return a target with ``at_least`` or ``at_most``; ``met`` is None where a side was not measured."""
    least, most = rest.get("at_least", -math.inf), rest.get("at_most", math.inf)
    return {"target": name, **rest, "found": value, "met": None if value is None else least <= value <= most}


def limit_of(target: Target) -> str:
    """Return the limit in words."""
    return f"at least {target['at_least']:g}" if "at_least" in target else f"at most {target['at_most']:g}"


def verdict(target: Target) -> str:
    """Return the measured value and the limit in words."""
    if target["found"] is None:
        return f"not measured, {limit_of(target)}"
    return f"{target['found']:.2f}, {'met' if target['met'] else 'NOT MET'}: {limit_of(target)}"
