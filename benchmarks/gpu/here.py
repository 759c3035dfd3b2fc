"""Exits with code 1 and one line if there is no CUDA device, before anything is installed for one."""

import importlib.util
import sys
from pathlib import Path

DEVICES = Path(__file__).parents[2] / "runtimes" / "doctor" / "cuda_driver.py"
NEXT = "run it on a machine with an NVIDIA GPU and its driver; what this one can do: fatdeploy doctor"


def reason_against(library: str | None = None) -> str | None:
    """Return why there is no GPU to test; None if there is one. Needs only the standard library."""
    spec = importlib.util.spec_from_file_location("cuda_driver", DEVICES)
    if spec is None or spec.loader is None:
        return f"{DEVICES} is missing"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their types there
    spec.loader.exec_module(module)
    cuda = module.cuda_here() if library is None else module.cuda_here(library)
    return None if cuda.devices else str(cuda.reason)


if __name__ == "__main__":
    reason = reason_against()
    if reason is not None:
        print(f"error: no GPU to test: {reason}; {NEXT}", file=sys.stderr)
        raise SystemExit(1)
