"""What a bundle was worth where it was exported, by its certificate, and whether it still is here. No torch."""

from dataclasses import dataclass
from typing import Any

from fatdeploy.bundle import PARITY, Bundle
from fatdeploy.errors import BundleError
from fatdeploy.runtimes.fidelity import Fidelity

# How many tokens fewer another CPU may have where there is no bar: a part of all, and of few tokens at least so many.
# Floats rounded another way carry a number over the edge of its integer here and there. Weights moved by a last bit,
# six times for each of three tiny models in int8 and int4, cost or gave 3 of 655 tokens at most: twice that is allowed.
ROUNDED_SHARE, ROUNDED_TOKENS = 0.01, 3


@dataclass(frozen=True)
class Certified:
    """The share of the reference's tokens where a bundle was exported; ``bar`` is None if there was none to reach."""

    share: float
    bar: float | None

    def lost(self, found: Fidelity) -> str | None:
        """Say why what was found here is too little; None if it is not."""
        here = f"{found.same} of {found.tokens} tokens are the reference's here ({found.share:.2%})"
        recorded = f"{self.share:.2%} were when it was exported"
        if self.bar is not None:
            return None if found.share >= self.bar else f"{here}, the bar is {self.bar:.2%} and {recorded}"
        allowed = max(ROUNDED_TOKENS, ROUNDED_SHARE * found.tokens)
        if found.same >= self.share * found.tokens - allowed:
            return None
        return f"{here} and {recorded}, of which another CPU's rounding explains {allowed:.0f} tokens at most"


def certified(bundle: Bundle, certificate: dict[str, Any]) -> Certified:
    """Return what the certificate of a bundle says of its tokens; fp32 has all of them, or it was not exported."""
    try:
        if bundle.manifest.quantization is not None:
            gate = certificate["gate"]
            bar, enforced, share = float(gate["bar"]), bool(gate["enforced"]), float(gate["agreement"]["share"])
            return Certified(share, bar if enforced else None)
        if bundle.manifest.precision == "fp32":
            return Certified(1.0, 1.0)
        parity = certificate["parity"]
        least = parity["least_agreement"]
        return Certified(float(parity["agreement"]), None if least is None else float(least))
    except (KeyError, TypeError, ValueError) as error:
        what = "the gate" if bundle.manifest.quantization is not None else "the agreement"
        raise BundleError(
            f"{bundle.path / PARITY} says nothing of {what} ({error}); export the bundle again"
        ) from error
