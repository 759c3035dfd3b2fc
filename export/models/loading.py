"""What can be exported: the bundled model, a preset, a folder of ours or of Hugging Face, or your own model."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from fatdeploy.errors import CheckpointError, ConfigError
from fatdeploy.export import g2p
from fatdeploy.export.models.hugging_face.folder import is_hugging_face_folder, model_from_folder
from fatdeploy.export.models.hugging_face.generation import generation_from_config
from fatdeploy.export.models.hugging_face.text.convert import converted
from fatdeploy.export.models.hugging_face.text.folder_text import text_of_folder
from fatdeploy.export.models.user_models import is_factory, model_from_factory
from fatdeploy.export.pipeline import Origin
from fatdeploy.export.reference.checkpoint import CONFIG, TOKENIZER, load_checkpoint
from fatdeploy.export.reference.presets import preset_names
from fatdeploy.export.reference.weights import model_from_preset
from fatdeploy.manifest import GenerationRecord

ADAPTER = "adapter_config.json"
# A name or owner/name, which cannot be meant as a path that is absolute or begins here.
_DOWNLOAD_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


@dataclass(frozen=True)
class Lengths:
    """The longest source and target to import; None is what the model says. Only folders of Hugging Face need them.

    Where positions come from a formula, a model can read more than it says.
    """

    max_source: int | None = None
    max_target: int | None = None


def model_from_source(
    source: str, *, licence: str | None = None, lengths: Lengths | None = None
) -> tuple[nn.Module, Origin]:
    """Return the model that a name, a folder or ``package.module:factory`` stands for, and where it comes from."""
    _check_unambiguous(source)
    if source in preset_names():
        return model_from_preset(source), Origin(name=source, licence=licence, random=True)
    if source == g2p.NAME:
        return bundled_model(licence=licence)
    folder = Path(source)
    if is_hugging_face_folder(folder):
        return imported_model(folder, licence, lengths or Lengths())
    if folder.is_dir():
        _check_config(folder)
        tokenizer = folder / TOKENIZER
        origin = Origin(name=folder.name, licence=licence, tokenizer=tokenizer if tokenizer.is_file() else None)
        return load_checkpoint(folder), origin
    if is_factory(source):
        return model_from_factory(source), Origin(name=source, licence=licence)
    raise ConfigError(_unknown(source))


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


def imported_model(folder: Path, licence: str | None, lengths: Lengths) -> tuple[nn.Module, Origin]:
    """Return the model of a Hugging Face folder with its tokenizer and its settings."""
    model, read = model_from_folder(folder, max_source=lengths.max_source, max_target=lengths.max_target)
    generation = generation_from_config(read.config, read.generation, model.spec)
    silent = silent_ids_of(generation)
    if len(silent) >= model.spec.vocab_size:
        raise CheckpointError(f"{folder}: generation_config.json refused: no token is left that can be chosen")
    model.spec = replace(model.spec, silent_ids=silent)
    origin = Origin(
        name=folder.resolve().name,
        licence=licence,
        text=text_of_folder(folder),
        generation=generation,
        original=folder,
    )
    return model, origin


def with_converted_tokenizer(origin: Origin) -> Origin:
    """Return an origin whose sentencepiece models became a tokenizer.json; its texts count what that changes."""
    if origin.text is None or origin.calibration is None:
        missing = "a folder with sentencepiece models" if origin.text is None else "--calibration, texts to compare on"
        raise ConfigError(f"--tokenizer convert needs {missing}")
    try:
        texts = [line.partition("\t")[0] for line in origin.calibration.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {origin.calibration}: {error}") from error
    return replace(origin, text=converted(origin.text, [text for text in texts if text]))


def silent_ids_of(generation: GenerationRecord) -> tuple[int, ...]:
    """Return the tokens that a model never says by default: scores of such tokens may mean nothing.

    Marian's padding is one. Its embedding is zero, so that its score is always 0 and wins wherever others are negative.
    """
    options: dict[str, Any] = generation.options
    words = [word[0] for word in options.get("bad_words", ()) if len(word) == 1]
    return tuple(sorted({*words, *options.get("suppress_tokens", ())}))


def _unknown(source: str) -> str:
    """Return what to type instead of a name that is nothing here; the name of a download is a likely one."""
    if _DOWNLOAD_NAME.fullmatch(source) and not Path(source).exists():
        name = source.removesuffix("/").rpartition("/")[2]
        return (
            f"{source} is not a folder here, nor {g2p.NAME}, a preset (see: fatdeploy presets) or "
            "package.module:factory. Only local folders are read: if it is a model of Hugging Face, type "
            f"hf download {source} --local-dir {name}, then fatdeploy export ./{name}"
        )
    found = "it is a file" if Path(source).exists() else "no such folder"
    return (
        f"{source} is not {g2p.NAME}, a preset (see: fatdeploy presets), a Hugging Face folder, a checkpoint folder "
        f"({found}) or package.module:factory"
    )


def _check_config(folder: Path) -> None:
    """Refuse a folder of something else than a model; parts of one are named."""
    if (folder / CONFIG).exists():
        return
    if (folder / ADAPTER).is_file():
        raise CheckpointError(
            f"{folder} has an adapter ({ADAPTER}) and no {CONFIG}: an adapter alone is not a model. Merge it into its "
            "model (peft: merge_and_unload) and save that with save_pretrained"
        )
    raise CheckpointError(
        f"{folder} has no {CONFIG}: a Hugging Face folder and a checkpoint folder have {CONFIG} and model.safetensors "
        "(Hugging Face also shards, or pytorch_model.bin)"
    )


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
