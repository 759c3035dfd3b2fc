"""What can be exported: the bundled model, a preset, a checkpoint's folder, or a model of your own."""

from pathlib import Path

from torch import nn

from fatdeploy.errors import ConfigError
from fatdeploy.export import g2p
from fatdeploy.export.models.names import check_meaning
from fatdeploy.export.models.user_models import is_factory, model_from_factory
from fatdeploy.export.pipeline import Origin
from fatdeploy.export.reference.checkpoint import TOKENIZER, load_checkpoint
from fatdeploy.export.reference.presets import preset_names
from fatdeploy.export.reference.weights import model_from_preset


def model_from_source(source: str, *, licence: str | None = None) -> tuple[nn.Module, Origin]:
    """Return the model that a name, a folder or ``package.module:factory`` stands for, and where it comes from."""
    check_meaning(source)
    if source in preset_names():
        return model_from_preset(source), Origin(name=source, licence=licence, random=True)
    if source == g2p.NAME:
        return bundled_model(licence=licence)
    folder = Path(source)
    if folder.is_dir():
        tokenizer = folder / TOKENIZER
        origin = Origin(name=folder.name, licence=licence, tokenizer=tokenizer if tokenizer.is_file() else None)
        return load_checkpoint(folder), origin
    if is_factory(source):
        return model_from_factory(source), Origin(name=source, licence=licence)
    raise ConfigError(
        f"{source} is neither {g2p.NAME} nor a preset nor a checkpoint's folder nor package.module:factory. "
        f"Presets: {', '.join(preset_names())}"
    )


def bundled_model(*, licence: str | None = None) -> tuple[nn.Module, Origin]:
    """Return the model that comes with fatdeploy, and where it comes from."""
    origin = Origin(
        name=g2p.NAME,
        licence=licence or g2p.LICENCE,
        tokenizer=g2p.CHECKPOINT / TOKENIZER,
        calibration=g2p.CALIBRATION,
        probes=g2p.PROBES,
    )
    return load_checkpoint(g2p.CHECKPOINT), origin
