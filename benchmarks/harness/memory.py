"""How much memory this process has, as Linux reports it. Imports nothing that would add to it."""

from pathlib import Path

STATUS = Path("/proc/self/status")


def resident_bytes() -> int:
    """Return how much of this process is in memory."""
    return status_bytes("VmRSS")


def status_bytes(name: str) -> int:
    """Return a line of the process status that is a size."""
    [kilobytes] = [line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:")]
    return int(kilobytes) * 1024
