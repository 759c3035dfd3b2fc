"""Names that stand for models which come with fatdeploy, and folders that are called the same."""

from pathlib import Path

from fatdeploy.errors import ConfigError
from fatdeploy.export import g2p
from fatdeploy.export.reference.checkpoint import CONFIG
from fatdeploy.export.reference.presets import preset_names


def is_name(source: str) -> bool:
    """Return whether this stands for the bundled model or a preset, whatever folders there are."""
    return source == g2p.NAME or source in preset_names()


def check_meaning(source: str) -> None:
    """Refuse a name that is a checkpoint's folder here, too: either model could be meant."""
    if is_name(source) and (Path(source) / CONFIG).is_file():
        kind = "the bundled model" if source == g2p.NAME else "a preset"
        raise ConfigError(
            f"{source} is {kind} and a checkpoint's folder here: type ./{source} for the folder, or run this elsewhere "
            f"for {kind}"
        )


def typed_folder(folder: Path) -> str:
    """Return what to type so that this folder is meant, and no model of its name."""
    return f"./{folder}" if is_name(str(folder)) else str(folder)
