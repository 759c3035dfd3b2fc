"""Bundles with text, our tokenizers in the tokenizers package, and texts that are hard to read.

The tokens of the usual bundle are words w3, w4 … and every source ends with EOS.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.export.training.tokenizers import TextCoder
from fatdeploy.manifest import TOKENIZER
from tests.support.bundles import bundle_of

SPECIAL = ["<pad>", "<bos>", "<eos>"]

ANY_TEXT = st.text() | st.lists(st.sampled_from(["<pad>", "<unk>", "<eos>", " ", "a", "\r\n", "e\u0301"])).map("".join)


def words(tokens: Iterable[int]) -> str:
    """Return tokens as the tokenizer writes them."""
    return " ".join(f"w{token}" for token in tokens if token >= len(SPECIAL))


def bundle_with_text(folder: Path, size: int = 64) -> Bundle:
    """Copy a bundle and give it a tokenizer whose file also asks to truncate and to pad."""
    shutil.copytree(bundle_of("transformer-tiny").path, folder)
    vocabulary = [*SPECIAL, *(f"w{token}" for token in range(len(SPECIAL), size))]
    tokenizer = Tokenizer(models.WordLevel({word: token for token, word in enumerate(vocabulary)}, unk_token="w3"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <eos>", special_tokens=[("<eos>", 2)])
    tokenizer.enable_truncation(6)
    tokenizer.enable_padding(length=10)
    tokenizer.save(str(folder / TOKENIZER))
    return write_manifest(folder, bundle_of("transformer-tiny").manifest)


def bundle_with_coder(coder: TextCoder, folder: Path) -> Bundle:
    """Copy the bundle and give it a tokenizer of ours."""
    shutil.copytree(bundle_of("transformer-tiny").path, folder)
    coder.save(folder / TOKENIZER)
    return write_manifest(folder, bundle_of("transformer-tiny").manifest)


def in_package(coder: TextCoder) -> Tokenizer:
    """Return our tokenizer file as the tokenizers package reads it, without any of our code."""
    with TemporaryDirectory() as folder:
        path = Path(folder, TOKENIZER)
        coder.save(path)
        return Tokenizer.from_file(str(path))
