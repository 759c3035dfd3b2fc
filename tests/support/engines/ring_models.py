"""A tiny model whose decoder keeps the last positions in rings, as bundles of both dialects and as an engine's."""

from functools import cache

from fatdeploy.bundle import Bundle
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.targets import Dialect
from tests.support.bundles import TARGETS, shared_bundle
from tests.support.choices import tiny

WINDOW, MAX_TARGET = 5, 48


@cache
def ring_model() -> ReferenceModel:
    """Return a model with rings of 13 positions, which a target of 48 tokens fills nearly four times."""
    return tiny({"decoder_attention": "local", "window": WINDOW, "max_source": 32, "max_target": MAX_TARGET})


@cache
def ring_bundle(dialect: Dialect) -> Bundle:
    """Return the exported model."""
    return shared_bundle(
        f"ring-{dialect}",
        lambda folder: write_bundle(ring_model(), folder, origin=Origin(name="ring"), target=TARGETS[dialect]),
    )
