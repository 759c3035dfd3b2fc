"""Bundles that return alignments, and the reference to compare them with."""

from functools import cache

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, exportable_model
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, shared_bundle
from tests.support.choices import tiny

SIZES = {"max_source": 12, "max_target": 16}
# The weights of the last layer are for copying, those of the first for alignments.
HYBRID = {"copy": True, "hybrid": True}


@cache
def model_with(attention: str) -> ReferenceModel:
    if attention == "plain":
        return tiny({**SIZES, "tie_embeddings": False}, base="transformer")
    return tiny({**SIZES, **HYBRID})


def aligned(attention: str, dialect: Dialect, layer: int) -> tuple[OrtEngine, EagerEngine]:
    """Return the engine of a bundle with a layer's alignments, and the reference."""
    exportable = exportable_model(model_with(attention), Choices(attention_layer=layer))
    bundle = shared_bundle(
        f"aligned-{attention}-{dialect}-{layer}",
        lambda folder: write_bundle(exportable, folder, origin=Origin(name="aligned"), target=TARGETS[dialect]),
    )
    return OrtEngine(bundle), EagerEngine(exportable)
