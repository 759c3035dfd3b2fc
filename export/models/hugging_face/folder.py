"""A folder of Hugging Face becomes a reference model: configuration, ids, lengths and weights."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fatdeploy.errors import CheckpointError, ConfigError
from fatdeploy.export.models.hugging_face.config_keys import ConfigKeys, JsonObject, read_json_object
from fatdeploy.export.models.hugging_face.embeddings import EmbeddingNames
from fatdeploy.export.models.hugging_face.families import FAMILIES, Family
from fatdeploy.export.models.hugging_face.recipes import Filling, Part, TensorRecipe, refuse_if
from fatdeploy.export.models.hugging_face.weight_files import StoredTensors, stored_weights
from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.model import ReferenceModel

CONFIG, GENERATION = "config.json", "generation_config.json"
KEYS = {"model_type", "architectures", "transformers_version"}


@dataclass(frozen=True)
class HuggingFaceFolder:
    """What a folder says about its model, as it was written."""

    path: Path
    config: JsonObject
    generation: JsonObject  # empty if there is no generation_config.json
    model_type: str


def is_hugging_face_folder(path: str | Path) -> bool:
    """Return whether transformers wrote a folder's configuration; a checkpoint of ours has none of its keys."""
    config = Path(path) / CONFIG
    try:
        return config.is_file() and not KEYS.isdisjoint(read_json_object(config))
    except CheckpointError:
        return False


def read_folder(path: str | Path) -> HuggingFaceFolder:
    """Return what a folder says about its model; a type that is not known is an error."""
    path = Path(path)
    if not (path / CONFIG).is_file():
        raise CheckpointError(f"{path} has no {CONFIG}: expected a folder that save_pretrained wrote")
    config = read_json_object(path / CONFIG)
    generation = read_json_object(path / GENERATION) if (path / GENERATION).is_file() else {}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise CheckpointError(
            f"{path / CONFIG}: model_type {model_type!r} is not supported, only {', '.join(FAMILIES)}; any other "
            "encoder-decoder can be exported as your own model, see docs/your-own-model.md"
        )
    if config.get("quantization_config"):
        raise CheckpointError(
            f"{path / CONFIG}: quantization_config is not supported, use the model before quantization"
        )
    return HuggingFaceFolder(path, config, generation, model_type)


def model_from_folder(
    path: str | Path, *, max_source: int | None = None, max_target: int | None = None
) -> tuple[ReferenceModel, HuggingFaceFolder]:
    """Return the model of a folder, ready for inference, and what the folder says about it.

    ``max_source`` and ``max_target`` shorten the longest source and target, or lengthen them where positions come from
    a formula.
    """
    folder = read_folder(path)
    family = FAMILIES[folder.model_type]
    keys = ConfigKeys(folder.config, family.defaults)
    with stored_weights(folder.path) as tensors:
        stored = _with_prefix(tensors, family.prefix)
        embeddings = family.embeddings(keys).stored(stored, tied=family.tied(keys))
        values = {**embeddings.ties(stored), **family.values(keys, stored), **_ids(folder, keys)}
        where = folder.path / CONFIG
        refuse_if(f"{where} cannot be used", keys.reasons)
        limited = family.stores_positions(stored)
        for name, length in (("max_source", max_source), ("max_target", max_target)):
            values[name] = _chosen(name, length, values[name], limited=limited)
        config = _model_config(values, where)
        special = family.special(keys, config, stored)
        refuse_if(f"{where} cannot be used", keys.reasons)
        filling = Filling.of(config, _recipes(family, keys, embeddings, special), stored)
        unread = [*family.unread, *map(re.escape, family.embeddings(keys).all())]
        refuse_if(f"the weights of {folder.path} do not fit {CONFIG}", filling.reasons(unread))
        refuse_if(f"the weights of {folder.path} are damaged", filling.read())
    return filling.model, folder


def _with_prefix(stored: StoredTensors, prefix: str) -> StoredTensors:
    """Return tensors under the names of the whole model; a file may be of the model without its head."""
    if not prefix or any(name.startswith(prefix) for name in stored):
        return stored
    heads = ("lm_head.", "final_logits_bias")
    return {name if name.startswith(heads) else prefix + name: tensor for name, tensor in stored.items()}


def _ids(folder: HuggingFaceFolder, keys: ConfigKeys) -> dict[str, int]:
    """Return the special ids, from where ``generate`` takes them."""
    inner = folder.config.get("decoder")
    places = [folder.generation, {**keys.defaults, **folder.config}, inner if isinstance(inner, dict) else {}]

    def stated(name: str) -> Any:
        return next((place[name] for place in places if place.get(name) is not None), None)

    starts = [place.get(name) for place in places for name in ("decoder_start_token_id", "bos_token_id")]
    eos = stated("eos_token_id")
    first_eos = eos[0] if isinstance(eos, list) and eos else eos
    pad = stated("pad_token_id")
    ids = {
        "pad_id": first_eos if pad is None else pad,
        "bos_id": next((start for start in starts if start is not None), None),
        "eos_id": first_eos,
    }
    names = {"pad_id": "pad_token_id", "bos_id": "decoder_start_token_id", "eos_id": "eos_token_id"}
    for name, value in ids.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            keys.refuse(names[name], f"must be a token's id, found {value!r}")
    return ids


def _chosen(name: str, length: int | None, own: int, *, limited: bool) -> int:
    """Return the longest sequence that was chosen, or the model's own."""
    if length is None:
        return own
    if length < 1 or (limited and length > own):
        limit = f"1…{own}, the positions that the model has" if limited else "1 and up"
        raise ConfigError(f"{name} must lie in {limit}, found {length}")
    return length


def _model_config(values: dict[str, Any], where: Path) -> ModelConfig:
    if values.get("source_vocab_size") == values["vocab_size"]:
        values = {**values, "source_vocab_size": 0}
    try:
        return ModelConfig(**values)
    except ConfigError as error:
        raise CheckpointError(f"{where} cannot be used: {error}") from error


def _recipes(
    family: Family, keys: ConfigKeys, embeddings: EmbeddingNames, special: dict[str, TensorRecipe]
) -> Callable[[str], TensorRecipe]:
    """Return the function from a tensor of ours to its recipe."""
    layers = family.layers(keys)
    matrices = {
        "source_embedding.weight": embeddings.source,
        "target_embedding.weight": embeddings.target,
        "output.weight": embeddings.output,
    }

    def recipe_of(name: str) -> TensorRecipe:
        if name in special:
            return special[name]
        if name in matrices:
            return TensorRecipe((Part(matrices[name]),))
        layer = re.fullmatch(r"(encoder|decoder)\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
        if layer:
            return layers[layer[1]].recipe(*layer.groups()[1:])
        module, _, kind = name.rpartition(".")
        return TensorRecipe((Part(f"{family.top[module]}.{kind}"),))

    return recipe_of
