"""Text by sentencepiece models, whose pieces have the ids of another vocabulary. The package is imported on use."""

import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fatdeploy.errors import BackendUnavailable
from fatdeploy.runtimes.text.added_tokens import AddedTokens
from fatdeploy.runtimes.text.clean_up import cleaned, may_change
from fatdeploy.runtimes.text.tokenizer import Encoded, unreadable, valid_unicode
from fatdeploy.text import SOURCE_PIECES, TARGET_PIECES, TARGET_VOCABULARY, VOCABULARY, TextRecord

INSTALL = "pip install 'fatdeploy[sentencepiece]'"


def sentencepiece_module(what: str) -> Any:
    """Return the sentencepiece package; the error says what needs it."""
    try:
        return importlib.import_module("sentencepiece")
    except ImportError as error:
        raise BackendUnavailable(f"{what} needs sentencepiece ({error}): {INSTALL}") from error


def piece_model(path: Path) -> Any:
    """Return a sentencepiece model."""
    module = sentencepiece_module(f"text of {path}")
    try:
        return module.SentencePieceProcessor(model_proto=path.read_bytes())
    except (OSError, RuntimeError) as error:  # the package raises nothing more specific
        raise unreadable(path, error) from error


class PieceTokenizer:
    """The tokenizer of Marian, M2M100 and their like, exactly as transformers reads and writes."""

    def __init__(self, folder: Path, record: TextRecord) -> None:
        self._record = record
        self._source = piece_model(folder / SOURCE_PIECES)
        self._target = piece_model(folder / TARGET_PIECES) if TARGET_PIECES in record.files else self._source
        self._ids = _vocabulary(folder / VOCABULARY)
        apart = TARGET_VOCABULARY in record.files
        self._target_ids = _vocabulary(folder / TARGET_VOCABULARY) if apart else self._ids
        # With one vocabulary the model of the sources writes targets too, as in transformers.
        self._writer = self._target if apart else self._source
        self._pieces = {token: piece for piece, token in self._target_ids.items()}
        self._pieces |= {token.id: name for name, token in record.added.items()}
        self._special = set(record.special)
        self._unknown = 0 if record.unk_id is None else record.unk_id
        self._added = AddedTokens(record.added)
        self._bytes = {self._target_ids.get(f"<0x{byte:02X}>") for byte in range(256)} - {None}

    @property
    def n_tokens(self) -> int:
        """How many tokens it knows."""
        return 1 + max([*self._ids.values(), *self._pieces])

    def encoded(self, text: str) -> Encoded:
        """Return a text's tokens, with the special tokens around it that the model was trained with."""
        record = self._record
        ids = [*record.before, *self._tokens(text, self._source, self._ids), *record.after]
        return Encoded(np.array(ids, np.int64), len(record.after))

    def text(self, tokens: ArrayLike) -> str:
        """Return the text of tokens, without special ones."""
        text = self._raw_text(np.asarray(tokens, np.int64).tolist())
        return cleaned(text) if self._record.clean_up else text

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a part of a target, without special tokens around it."""
        return tuple(self._tokens(text, self._target, self._target_ids))

    def n_certain(self, tokens: Sequence[int]) -> int:
        """Return how many tokens, from the first, have a text that no later token changes."""
        end = len(tokens)
        while self._bytes and end and (tokens[end - 1] in self._bytes or self._is_unwritten(tokens[end - 1])):
            end -= 1
        while self._record.clean_up and end and may_change(self._raw_text(tokens[:end])):
            end -= 1
        return end

    def _is_unwritten(self, token: int) -> bool:
        return token in self._special or token not in self._pieces

    def _raw_text(self, tokens: Sequence[int]) -> str:
        pieces = [self._pieces[token] for token in tokens if not self._is_unwritten(token)]
        return str(self._writer.decode_pieces(pieces)).replace("▁", " ").strip()

    def _tokens(self, text: str, model: Any, vocabulary: dict[str, int]) -> list[int]:
        ids: list[int] = []
        for part in self._added.split(valid_unicode(text)):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += [vocabulary.get(piece, self._unknown) for piece in self._cut(part, model)]
        return ids

    def _cut(self, text: str, model: Any) -> list[str]:
        """Return the pieces of a text; a code at its beginning is one, whether or not the vocabulary has it."""
        code = ""
        if self._record.markers and text.startswith(">>") and (end := text.find("<<")) != -1:
            code, text = text[: end + 2], text[end + 2 :]
        return [*([code] if code else []), *model.encode(text, out_type=str)]


def _vocabulary(path: Path) -> dict[str, int]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise unreadable(path, error) from error
    if not isinstance(values, dict) or not all(type(token) is int and token >= 0 for token in values.values()):
        raise unreadable(path, ValueError("expected an object of ids by piece"))
    return values
