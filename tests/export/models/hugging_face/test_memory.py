"""A folder of 2.5 GB is read within its memory: beyond the model, at most 1.3 times the size of its files."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

WIDTH, LAYERS, INNER, VOCABULARY = 1024, 12, 4096, 256_206
# NLLB of 600 million parameters.
CONFIG = {
    "model_type": "m2m_100",
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "encoder_layers": LAYERS,
    "decoder_layers": LAYERS,
    "encoder_attention_heads": 16,
    "decoder_attention_heads": 16,
    "encoder_ffn_dim": INNER,
    "decoder_ffn_dim": INNER,
    "activation_function": "relu",
    "scale_embedding": True,
}
# The peak of getrusage is no use here: a new process inherits that of its parent.
READ = """
import re, sys
from pathlib import Path
from fatdeploy.export.models.hugging_face.folder import model_from_folder
def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
before = memory("VmRSS")
model, _ = model_from_folder(sys.argv[1])
print(memory("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters()))
"""


def layer(stack: str, index: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return names and shapes of a layer."""
    stem = f"model.{stack}.layers.{index}."
    attentions = ["self_attn", "encoder_attn"] if stack == "decoder" else ["self_attn"]
    for attention in attentions:
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield f"{stem}{attention}.{part}.weight", (WIDTH, WIDTH)
            yield f"{stem}{attention}.{part}.bias", (WIDTH,)
    for norm in [*(f"{attention}_layer_norm" for attention in attentions), "final_layer_norm"]:
        yield f"{stem}{norm}.weight", (WIDTH,)
        yield f"{stem}{norm}.bias", (WIDTH,)
    yield f"{stem}fc1.weight", (INNER, WIDTH)
    yield f"{stem}fc1.bias", (INNER,)
    yield f"{stem}fc2.weight", (WIDTH, INNER)
    yield f"{stem}fc2.bias", (WIDTH,)


def shards() -> Iterator[dict[str, tuple[int, ...]]]:
    """Return what each of three files holds: the embedding, the encoder, the decoder."""
    yield {"model.shared.weight": (VOCABULARY, WIDTH)}
    for stack in ("encoder", "decoder"):
        norms = {f"model.{stack}.layer_norm.{kind}": (WIDTH,) for kind in ("weight", "bias")}
        yield norms | dict(pair for index in range(LAYERS) for pair in layer(stack, index))


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05)


def write_big_folder(folder: Path, dtype: torch.dtype, *, pickled: bool) -> int:
    """Write random weights in three shards; return the size of the files."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    listed, size = {}, 0
    for number, shapes in enumerate(shards()):
        path = folder / f"{stem}-{number}.{suffix}"
        tensors = {name: drawn(shape, dtype) for name, shape in shapes.items()}
        if pickled:
            torch.save(tensors, path)
        else:
            save_file(tensors, path)
        listed |= dict.fromkeys(shapes, path.name)
        size += path.stat().st_size
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": listed}))
    return size


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say how much memory was used")
@pytest.mark.parametrize(
    ("dtype", "pickled", "smallest"), [(torch.float32, False, 2.4e9), (torch.float16, True, 1.2e9)]
)
def test_a_big_folder_is_read_within_its_memory(
    dtype: torch.dtype, pickled: bool, smallest: float, tmp_path: Path
) -> None:
    size = write_big_folder(tmp_path, dtype, pickled=pickled)
    assert size > smallest
    read = subprocess.run([sys.executable, "-c", READ, str(tmp_path)], capture_output=True, text=True, check=True)
    used, model = map(int, read.stdout.split())
    assert 2.4e9 < model < 2.6e9
    assert used - model <= 1.3 * size
