"""What can be exported: the bundled model, a preset, a folder of ours or of Hugging Face, or your own model."""

from pathlib import Path

from torch import nn

from fatdeploy.errors import ConfigError
from fatdeploy.export import g2p
from fatdeploy.export.models.hugging_face.folder import is_hugging_face_folder, model_from_folder
from fatdeploy.export.models.user_models import is_factory, model_from_factory
from fatdeploy.export.pipeline import Origin
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, load_checkpoint
from fatdeploy.export.reference.presets import preset_names
from fatdeploy.export.reference.weights import model_from_preset


def model_from_source(source: str, *, licence: str | None = None) -> tuple[nn.Module, Origin]:
    """Return the model that a name, a folder or ``package.module:factory`` stands for, and where it comes from."""
    _check_unambiguous(source)
    if source in preset_names():
        return model_from_preset(source), Origin(name=source, licence=licence, random=True)
    if source == g2p.NAME:
        return bundled_model(licence=licence)
    folder = Path(source)
    if folder.is_dir():
        tokenizer = folder / TOKENIZER
        origin = Origin(name=folder.name, licence=licence, tokenizer=tokenizer if tokenizer.is_file() else None)
        model = model_from_folder(folder)[0] if is_hugging_face_folder(folder) else load_checkpoint(folder)
        return model, origin
    if is_factory(source):
        return model_from_factory(source), Origin(name=source, licence=licence)
    raise ConfigError(
        f"{source} is not {g2p.NAME}, a preset, a checkpoint folder or package.module:factory. "
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


def typed_folder(folder: Path) -> str:
    """Return what to type to export this folder, even if a model of fatdeploy has the same name."""
    return f"./{folder}" if _is_name(str(folder)) else str(folder)


def _is_name(source: str) -> bool:
    """Return whether this is the name of the bundled model or of a preset, whatever folders exist."""
    return source == g2p.NAME or source in preset_names()


def _check_unambiguous(source: str) -> None:
    """Refuse a name that is also a checkpoint folder here: either model could be meant."""
    if _is_name(source) and (Path(source) / CONFIG).is_file():
        kind = "the bundled model" if source == g2p.NAME else "a preset"
        raise ConfigError(
            f"{source} is both {kind} and a checkpoint folder here: type ./{source} for the folder, or run this in "
            f"another directory for {kind}"
        )
