"""What the certificate of a bundle promises, and whether a result here keeps it. No torch."""

from dataclasses import dataclass

from fatdeploy.bundle import Bundle
from fatdeploy.certificate import HalfParity, read_certificate
from fatdeploy.errors import BundleError
from fatdeploy.manifest import PARITY
from fatdeploy.runtimes.proof.fidelity import Fidelity

# How many tokens another CPU may lose where there is no bar: a share of all, and at least this many.
# Floats that round another way carry a number over the edge of its integer here and there. Weights moved by a last bit,
# six times for each of three tiny models in int8 and int4, cost or gave at most 3 of 655 tokens: twice that is allowed.
ROUNDED_SHARE, ROUNDED_TOKENS = 0.01, 3
# Half precision rounds at other places on another device, and random weights decide by little.
ROUNDED_HALF_SHARE = 0.05


@dataclass(frozen=True)
class Promise:
    """The share of the reference's tokens where a bundle was exported; ``bar`` is None if it had none to reach.

    ``rounding`` is the share of tokens that may differ on another machine where there is no bar.
    """

    share: float
    bar: float | None
    rounding: float = ROUNDED_SHARE

    def lost(self, fidelity: Fidelity) -> str | None:
        """Return why the result here is too low; None if it is not."""
        here = f"{fidelity.same} of {fidelity.tokens} tokens are the reference's here ({fidelity.share:.2%})"
        recorded = f"{self.share:.2%} were when it was exported"
        if self.bar is not None:
            return None if fidelity.share >= self.bar else f"{here}, the bar is {self.bar:.2%} and {recorded}"
        allowed = max(ROUNDED_TOKENS, self.rounding * fidelity.tokens)
        if fidelity.same >= self.share * fidelity.tokens - allowed:
            return None
        return f"{here} and {recorded}; rounding on another machine explains at most {allowed:.0f} tokens"


def promise_of(bundle: Bundle) -> Promise:
    """Return what the certificate of a bundle promises; an fp32 bundle has all of the reference's tokens."""
    path, certificate = bundle.path / PARITY, read_certificate(bundle)
    if bundle.manifest.quantization is not None:
        gate = certificate.needed_gate(path)
        return Promise(gate.agreement.share, gate.bar if gate.enforced else None)
    if isinstance(certificate.parity, HalfParity):
        return Promise(certificate.parity.agreement, certificate.parity.least_agreement, ROUNDED_HALF_SHARE)
    if bundle.manifest.precision != "fp32":
        raise BundleError(f"{path} is the certificate of an fp32 bundle; export the bundle again")
    return Promise(1.0, 1.0)
