"""On which kinds of CPU a quantized bundle was checked: its certificate gets one entry per kind."""

from dataclasses import replace

from fatdeploy.bundle import Bundle, changed_bundle
from fatdeploy.certificate import CpuCheck, read_certificate, write_certificate
from fatdeploy.machine import Machine, this_machine
from fatdeploy.targets import CpuClass


def record_here(bundle: Bundle, share: float) -> None:
    """Add this machine's kind of CPU to a bundle's certificate; it replaces an earlier entry of the same kind."""
    certificate, here = read_certificate(bundle), cpu_check(share)
    others = [check for check in certificate.checked_on if check.cpu_class != here.cpu_class]
    with changed_bundle(bundle, bundle.manifest) as new:
        write_certificate(new, replace(certificate, checked_on=(*others, here)))


def cpu_check(share: float) -> CpuCheck:
    """Return the certificate's entry for this machine."""
    machine = this_machine()
    return CpuCheck(cpu_class(machine), share, machine)


def cpu_class(machine: Machine) -> CpuClass | None:
    """Return the class of a machine's CPU, as ``--cpu`` names them; None where it is unknown."""
    if machine.architecture.lower() in ("aarch64", "arm64"):
        return "arm64"
    features = machine.features or ()
    if any("vnni" in feature for feature in features):
        return "x86-vnni"
    return "x86-avx2" if "avx2" in features else None
