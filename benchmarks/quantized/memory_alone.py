"""What an application holds that does nothing but load a model and decode with it; prints JSON.

Nothing else of the benchmarks is imported: their modules would weigh on a small engine and on a large one alike, and
make the two look more alike than they are.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

Decode = Callable[[], object]


def with_fatdeploy(asked: dict[str, Any]) -> Decode:
    """Load a bundle; return what decodes the sources."""
    import fatdeploy

    model = fatdeploy.load(asked["folder"], threads=asked["threads"])
    options = fatdeploy.DecodeOptions(max_new_tokens=asked["target"], min_new_tokens=asked["target"])
    return lambda: model.generate(asked["sources"], options)


def with_ctranslate2(asked: dict[str, Any]) -> Decode:
    """Load a model of CTranslate2; return what decodes the sources."""
    from benchmarks.peers.ctranslate2_decoding import Translation

    setting = {"threads": asked["threads"], "workers": asked["workers"], "compute_type": asked["precision"]}
    translation = Translation(Path(asked["folder"]), **setting)
    sources = [[str(token) for token in row] for row in asked["sources"]]
    return lambda: translation.results(sources, asked["target"])


ENGINES = {"fatdeploy": with_fatdeploy, "ctranslate2": with_ctranslate2}


def resident_bytes() -> int:
    """Return how much of this process is in memory; Linux tells it."""
    return _status_bytes("VmRSS:")


def peak_bytes() -> int:
    """Return how much of this process ever was in memory at once."""
    return _status_bytes("VmHWM:")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [kilobytes] = [line.split()[1] for line in lines if line.startswith(name)]
    return int(kilobytes) * 1024


def main() -> None:
    """Load, decode twice, and print what was held after each."""
    asked = json.loads(sys.argv[1])
    decode = ENGINES[asked["engine"]](asked)
    loaded = resident_bytes()
    for _ in range(2):
        decode()
    print(json.dumps({"after_load_bytes": loaded, "after_decode_bytes": resident_bytes(), "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
