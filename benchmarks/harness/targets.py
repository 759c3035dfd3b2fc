"""What a result must reach: what was found, whether it is enough, and how that is said."""

import math
from typing import Any

Target = dict[str, Any]


def judged(name: str, found: float | None, **rest: Any) -> Target:
    """Return a target with ``at_least`` or ``at_most``; whether it is met is None where a side was not measured."""
    least, most = rest.get("at_least", -math.inf), rest.get("at_most", math.inf)
    return {"target": name, **rest, "found": found, "met": None if found is None else least <= found <= most}


def limit_of(target: Target) -> str:
    """Return what is asked for in words."""
    return f"at least {target['at_least']:g}" if "at_least" in target else f"at most {target['at_most']:g}"


def verdict(target: Target) -> str:
    """Return what was found and what is asked for in a few words."""
    if target["found"] is None:
        return f"not measured, {limit_of(target)}"
    return f"{target['found']:.2f}, {'met' if target['met'] else 'NOT MET'}: {limit_of(target)}"
