"""Write the graphs that ``family`` times, with probes to check them by, unless they exist.

Not a complete export: its longest probe would take the reference two thousand steps that all have to be decided safely.
"""

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.family.settings import ENCODER_PRESET, ENCODERS, FamilyPart, FamilySizes
from fatdeploy.bundle import write_manifest
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.package import write_graphs
from fatdeploy.export.pipeline import Origin, manifest_of, written_graphs
from fatdeploy.export.proof.draw_probes import drawn_probe
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.weights import random_model
from fatdeploy.export.tracing.row_positions import with_row_positions
from fatdeploy.folders import replaced_folder
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.proof.probes import write_probes
from fatdeploy.targets import DEFAULT_TARGET, TARGETS

COMPARED_SOURCES, COMPARED_STEPS = (64, 7), 16


def config_of(part: FamilyPart, name: str, sizes: FamilySizes) -> ModelConfig:
    """Return a preset that takes the longest target, or a model whose encoder takes the longest source."""
    if part == "decoder":
        return config_from_preset(name, max_target=max(sizes.targets))
    return config_from_preset(ENCODER_PRESET, decoder_layers=1, max_source=max(sizes.sources), **ENCODERS[name])


def write_model(config: ModelConfig, folder: Path, name: str) -> None:
    """Write the graphs of a model with random weights, a few probes and the manifest."""
    target, model = TARGETS[DEFAULT_TARGET], random_model(config)
    exportable = with_row_positions(exportable_model(model), target)
    lengths = [min(length, config.max_source) for length in COMPARED_SOURCES]
    with replaced_folder(folder, force=True) as new, tempfile.TemporaryDirectory(dir=folder.parent) as work:
        _, graphs = written_graphs(exportable, target.dialect, work, lambda _: None, None)
        write_graphs(graphs, new)
        write_probes(new / PROBES, [drawn_probe(EagerEngine(model), lengths, COMPARED_STEPS)])
        write_manifest(new, manifest_of(exportable, Origin(name=name, random=True), target))


def main() -> None:
    """Prepare the models that the argument names."""
    described = json.loads(sys.argv[1])
    sizes = FamilySizes(**described["sizes"])
    for part, name in described["models"]:
        folder = sizes.folder(part, name)
        if not folder.exists():
            print(f"preparing {name} ({part}) …", file=sys.stderr)
            write_model(config_of(part, name, sizes), folder, name)
    print("null")


if __name__ == "__main__":
    main()
