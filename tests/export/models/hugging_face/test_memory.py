"""A folder of 2.5 GB is read within its memory (beyond the model, at most 1.3 times its files), and is exported."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import fatdeploy
from fatdeploy.certificate import read_certificate

MEMORY_HERE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
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
MEMORY = """
import re, sys
from pathlib import Path
def memory(name):
    return 1024 * int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""
READ = f"""{MEMORY}
from fatdeploy.export.models.hugging_face.folder import model_from_folder
before = memory("VmRSS")
model, _ = model_from_folder(sys.argv[1])
print(memory("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters()))
"""
EXPORT = f"""{MEMORY}
from fatdeploy import export_model
from fatdeploy.export.models.exportable import Choices
export_model(sys.argv[1], sys.argv[2], choices=Choices(max_source=32, max_target=16))
print(memory("VmHWM"))
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


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return weights that choose by more than chance; the last norm has both signs, or input tokens would repeat."""
    normal = torch.randn(shape)
    if name.endswith("norm.weight"):
        signs = normal.sign() if name == "model.decoder.layer_norm.weight" else 1
        return (signs * (1 + 0.2 * normal.roll(1))).to(dtype)
    if name.endswith("bias"):
        return (0.05 * normal).to(dtype)
    strength = 3.0 if ".fc" in name else 1.0
    return (strength * shape[1] ** -0.5 * normal).to(dtype)


def write_big_folder(folder: Path, dtype: torch.dtype, *, pickled: bool) -> int:
    """Write random weights in three shards; return the size of the files."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    listed, size = {}, 0
    for number, shapes in enumerate(shards()):
        path = folder / f"{stem}-{number}.{suffix}"
        tensors = {name: drawn(name, shape, dtype) for name, shape in shapes.items()}
        if pickled:
            torch.save(tensors, path)
        else:
            save_file(tensors, path, {"format": "pt"})
        listed |= dict.fromkeys(shapes, path.name)
        size += path.stat().st_size
    (folder / f"{stem}.{suffix}.index.json").write_text(
        json.dumps({"metadata": {"total_size": size}, "weight_map": listed})
    )
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not say how much memory was used")
@pytest.mark.skipif(MEMORY_HERE < 14e9, reason="the export needs 14 GB of memory")
def test_a_big_folder_is_exported_with_its_weights_outside_of_the_graphs(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "bundle"
    folder.mkdir()
    torch.manual_seed(0)
    size = write_big_folder(folder, torch.float32, pickled=False)
    export = subprocess.run(
        [sys.executable, "-c", EXPORT, str(folder), str(out)], capture_output=True, text=True, check=False
    )
    assert export.returncode == 0, export.stderr
    assert int(export.stdout) < 5 * size
    bundle = fatdeploy.bundle.read_bundle(out)
    sizes = {name: record.size for name, record in bundle.manifest.files.items()}
    assert sizes["encoder.onnx"] + sizes["decoder.onnx"] < 1e6
    assert 2.4e9 < sizes["weights.bin"] < 1.01 * size
    record = read_certificate(bundle).original
    assert record is not None
    assert record.agreement is not None
    assert record.agreement.dtype == "float32"
    assert [result.targets for result in record.agreement.generated] == [13, 13]
    assert fatdeploy.verify(out).result.tokens == 13 * 16
    with fatdeploy.load(out) as model:
        (hypothesis,) = model.generate([[5, 6, 7, VOCABULARY - 1]], max_new_tokens=6)
    assert 0 < len(hypothesis.tokens) <= 6
