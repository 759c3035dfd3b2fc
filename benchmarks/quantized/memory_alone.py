"""The memory of an application that only loads a model and decodes with it; prints JSON.

Other modules of the benchmarks are not imported: their memory would blur the ratio between a small engine and a large
one.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.memory import resident_bytes, status_bytes

Decode = Callable[[], object]


def with_fatdeploy(described: dict[str, Any]) -> Decode:
    """Load a bundle; return a function that decodes the sources."""
    import fatdeploy

    model = fatdeploy.load(described["folder"], threads=described["threads"])
    options = fatdeploy.DecodeOptions(max_new_tokens=described["target"], min_new_tokens=described["target"])
    return lambda: model.generate(described["sources"], options)


def with_ctranslate2(described: dict[str, Any]) -> Decode:
    """Load a CTranslate2 model; return a function that decodes the sources."""
    from benchmarks.peers.ctranslate2_decoding import Translation

    setting = {"threads": described["threads"], "workers": described["workers"], "compute_type": described["precision"]}
    translation = Translation(Path(described["folder"]), **setting)
    sources = [[str(token) for token in row] for row in described["sources"]]
    return lambda: translation.results(sources, described["target"])


ENGINES = {"fatdeploy": with_fatdeploy, "ctranslate2": with_ctranslate2}


def main() -> None:
    """Load, decode twice, and print the memory after loading, after decoding and at the peak."""
    described = json.loads(sys.argv[1])
    decode = ENGINES[described["engine"]](described)
    loaded = resident_bytes()
    for _ in range(2):
        decode()
    # Not bench.timing.peak_bytes: that import would add to the memory of CTranslate2.
    peak = status_bytes("VmHWM")
    print(json.dumps({"after_load_bytes": loaded, "after_decode_bytes": resident_bytes(), "peak_bytes": peak}))


if __name__ == "__main__":
    main()
