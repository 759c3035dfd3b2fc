"""Write what several benchmarks read, unless it exists: bundles, and sources with the reference's tokens."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.settings import DecodeSizes, ModelCache
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.runtimes.proof.probes import write_probes


def prepared_model(models: ModelCache) -> ReferenceModel:
    """Return a preset, its bundle written."""
    model = model_from_preset(models.preset)
    if not models.bundle.exists():
        write_bundle(model, models.bundle, origin=Origin(name=models.preset))
    return model


def prepare_probes(models: ModelCache, model: ReferenceModel, batches: Sequence[int], sizes: DecodeSizes) -> None:
    """Write for each batch sources with the reference's tokens."""
    models.folder.mkdir(parents=True, exist_ok=True)
    for batch in batches:
        path = models.probe(batch, sizes.source, sizes.target)
        if not path.exists():
            probe = drawn_probe(EagerEngine(model), [sizes.source] * batch, sizes.target, seed=batch)
            write_probes(new := path.with_suffix(".new.npz"), [probe])
            new.replace(path)


def write_arrays(path: Path, **arrays: Any) -> None:
    """Write arrays as a whole or not at all."""
    np.savez(new := path.with_suffix(".new.npz"), **arrays)
    new.replace(path)


def main() -> None:
    """Write the bundles that the argument names."""
    described = json.loads(sys.argv[1])
    for preset in described["bundles"]:
        prepared_model(ModelCache(Path(described["cache"]), preset))
    print("null")


if __name__ == "__main__":
    main()
