"""Write what turns of ``quantized`` read, where it is not there yet; prints CTranslate2's precisions."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import ctranslate2

from benchmarks.harness.measuring import ROOT
from benchmarks.harness.prepare import prepare_probes, prepared_model
from benchmarks.harness.turns import FP32, Cache, Sizes
from benchmarks.peers.ctranslate2_model import write_ctranslate2_model
from benchmarks.peers.growing_caches import write_growing_caches
from fatdeploy.bundle import read_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.weights import model_from_preset


def prepare_bundle(cache: Cache, precision: str) -> None:
    """Write a bundle as a user does, by the command line, unless it is the one that other benchmarks have."""
    folder = cache.model("fatdeploy", precision)
    if precision == FP32:
        prepared_model(cache)
    elif not folder.exists():
        export = [sys.executable, "-m", "fatdeploy", "export", cache.preset]
        asked = ["--precision", precision, "--out", str(folder)]
        # What it prints is not our result.
        run = subprocess.run([*export, *asked], stdout=sys.stderr, cwd=ROOT, check=False)
        if run.returncode:
            raise SystemExit(f"there is no {precision} bundle of {cache.preset}; leave it out with --precision")
    found = read_bundle(folder, check_hashes=False).manifest.precision
    if found != precision:
        raise SystemExit(f"{folder} is a bundle in {found}, asked for was {precision}")


def prepare_ctranslate2(cache: Cache, model: ReferenceModel) -> dict[str, str]:
    """Write a model for every compute type of this CPU; return what CTranslate2 computes in for each that differs.

    Some names are one thing: here ``int8`` may be ``int8_float32``.
    """
    computed: dict[str, str] = {}
    for compute_type in sorted(ctranslate2.get_supported_compute_types("cpu")):
        folder = cache.model("ctranslate2", compute_type)
        if not folder.exists():
            write_ctranslate2_model(model, folder, compute_type=compute_type)
        found = ctranslate2.Translator(str(folder), compute_type=compute_type).compute_type
        if found not in computed.values():
            computed[compute_type] = found
    return computed


def prepare(described: dict[str, Any]) -> dict[str, str]:
    """Prepare what the engines of a run need; return CTranslate2's compute types if it is one of them."""
    sizes = Sizes(**described["sizes"])
    cache, model = Cache(Path(sizes.cache), described["preset"]), model_from_preset(described["preset"])
    prepare_probes(cache, model, described["batches"], sizes)
    for precision in described["precisions"]:
        prepare_bundle(cache, precision)
    plain = cache.model("plain")
    if "plain" in described["engines"] and not plain.exists():
        write_growing_caches(model, plain)
    return prepare_ctranslate2(cache, model) if "ctranslate2" in described["engines"] else {}


if __name__ == "__main__":
    print(json.dumps(prepare(json.loads(sys.argv[1]))))
