"""What a bundle was worth where it was exported, by its certificate, and whether it still is here. No torch."""

from dataclasses import dataclass

from fatdeploy.bundle import Bundle
from fatdeploy.certificate import HalfParity, read_certificate
from fatdeploy.errors import BundleError
from fatdeploy.manifest import PARITY
from fatdeploy.runtimes.proof.fidelity import Fidelity

# How many tokens fewer another CPU may have where there is no bar: a part of all, and of few tokens at least so many.
# Floats rounded another way carry a number over the edge of its integer here and there. Weights moved by a last bit,
# six times for each of three tiny models in int8 and int4, cost or gave 3 of 655 tokens at most: twice that is allowed.
ROUNDED_SHARE, ROUNDED_TOKENS = 0.01, 3


@dataclass(frozen=True)
class Promise:
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


def promise_of(bundle: Bundle) -> Promise:
    """Return what the certificate of a bundle promises; an fp32 bundle has all of the reference's tokens."""
    path, certificate = bundle.path / PARITY, read_certificate(bundle)
    if bundle.manifest.quantization is not None:
        gate = certificate.needed_gate(path)
        return Promise(gate.agreement.share, gate.bar if gate.enforced else None)
    if isinstance(certificate.parity, HalfParity):
        return Promise(certificate.parity.agreement, certificate.parity.least_agreement)
    if bundle.manifest.precision != "fp32":
        raise BundleError(f"{path} is the certificate of an fp32 bundle; export the bundle again")
    return Promise(1.0, 1.0)
