"""Write what the turns of ``quantized`` read, unless it exists; prints CTranslate2's precisions."""

import json
import subprocess
import sys
from typing import Any

import ctranslate2

from benchmarks.harness.prepare import prepare_probes, prepared_model
from benchmarks.harness.provenance import ROOT
from benchmarks.harness.settings import FP32, DecodeSizes, ModelCache
from benchmarks.peers.ctranslate2_model import prepare_ctranslate2_model
from benchmarks.peers.growing_caches import write_growing_caches
from fatdeploy.bundle import read_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.weights import model_from_preset


def prepare_bundle(models: ModelCache, precision: str) -> None:
    """Write a bundle by the command line, as a user does; the fp32 bundle is the one that other benchmarks use."""
    folder = models.model("fatdeploy", precision)
    if precision == FP32:
        prepared_model(models)
    elif not folder.exists():
        export = [sys.executable, "-m", "fatdeploy", "export", models.preset]
        options = ["--precision", precision, "--out", str(folder)]
        # Standard output is for this module's own result.
        run = subprocess.run([*export, *options], stdout=sys.stderr, cwd=ROOT, check=False)
        if run.returncode:
            raise SystemExit(f"cannot export {models.preset} in {precision} (see above); leave it out with --precision")
    actual = read_bundle(folder, check_hashes=False).manifest.precision
    if actual != precision:
        raise SystemExit(f"{folder}: expected a bundle in {precision}, found {actual}; delete the folder")


def prepare_ctranslate2(models: ModelCache, model: ReferenceModel) -> dict[str, str]:
    """Write a model for every compute type of this CPU; return the type that CTranslate2 computes in for each.

    Names that mean the same type (``int8`` may be ``int8_float32``) are listed once.
    """
    computed: dict[str, str] = {}
    for compute_type in sorted(ctranslate2.get_supported_compute_types("cpu")):
        folder = models.model("ctranslate2", compute_type)
        prepare_ctranslate2_model(model, folder, compute_type=compute_type)
        actual = ctranslate2.Translator(str(folder), compute_type=compute_type).compute_type
        if actual not in computed.values():
            computed[compute_type] = actual
    return computed


def prepare(described: dict[str, Any]) -> dict[str, str]:
    """Prepare what the engines of a run need; return CTranslate2's compute types, if it is one of the engines."""
    sizes = DecodeSizes(**described["sizes"])
    models, model = sizes.models(described["preset"]), model_from_preset(described["preset"])
    prepare_probes(models, model, described["batches"], sizes)
    for precision in described["precisions"]:
        prepare_bundle(models, precision)
    plain = models.model("plain")
    if "plain" in described["engines"] and not plain.exists():
        write_growing_caches(model, plain)
    return prepare_ctranslate2(models, model) if "ctranslate2" in described["engines"] else {}


if __name__ == "__main__":
    print(json.dumps(prepare(json.loads(sys.argv[1]))))
