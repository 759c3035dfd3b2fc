"""The tokenizer of a bundle, from the files that its manifest names."""

import logging
from pathlib import Path

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError
from fatdeploy.manifest import TOKENIZER, Manifest
from fatdeploy.runtimes.text.byte_tokenizer import ByteTokenizer
from fatdeploy.runtimes.text.languages import LanguageTokenizer
from fatdeploy.runtimes.text.piece_tokenizer import PieceTokenizer
from fatdeploy.runtimes.text.tokenizer import Tokenizer, tokenizer_from_file
from fatdeploy.text import TextRecord

log = logging.getLogger("fatdeploy")

# A bundle without a record of its text has this one, if it has the file.
PLAIN = TextRecord("tokenizer_json", (TOKENIZER,))


def text_record(manifest: Manifest) -> TextRecord | None:
    """Return how a bundle reads text; None if it has no tokenizer."""
    return manifest.text or (PLAIN if TOKENIZER in manifest.files else None)


def tokenizer_from_record(folder: Path, record: TextRecord) -> Tokenizer:
    """Return the tokenizer whose files are in a folder."""
    if record.kind == "bytes":
        tokenizer: Tokenizer = ByteTokenizer(record)
    elif record.kind == "sentencepiece":
        tokenizer = PieceTokenizer(folder, record)
    else:
        tokenizer = tokenizer_from_file(folder / TOKENIZER, clean_up=record.clean_up)
    return tokenizer if record.languages is None else LanguageTokenizer(tokenizer, record.languages)


def tokenizer_of(bundle: Bundle) -> Tokenizer | None:
    """Return the tokenizer of a bundle; ids need none, so a missing package is not an error yet."""
    record = text_record(bundle.manifest)
    if record is None:
        return None
    try:
        tokenizer = tokenizer_from_record(bundle.path, record)
    except BackendUnavailable as error:
        log.info("%s", error)
        return None
    # A record was checked at export, where a token more than the model has may be one that no ordinary text contains.
    if bundle.manifest.text is None and tokenizer.n_tokens > bundle.spec.vocab_size:
        raise BundleError(
            f"{bundle.file(TOKENIZER)} has {tokenizer.n_tokens} tokens, the model {bundle.spec.vocab_size}: it belongs "
            "to another model"
        )
    return tokenizer


def needed_tokenizer(bundle: Bundle, tokenizer: Tokenizer | None) -> Tokenizer:
    """Return the tokenizer of a bundle, which may have been read before; raise the reason why there is none."""
    record = text_record(bundle.manifest)
    if record is None:
        raise ConfigError(f"{bundle.path} has no {TOKENIZER}: pass token ids, not text (fatdeploy run --ids)")
    # None without the package: reading the files again raises the error that says what to install.
    return tokenizer or tokenizer_from_record(bundle.path, record)
