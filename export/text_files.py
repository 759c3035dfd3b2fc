"""The tokenizer of a model on its way into a bundle: its files, and the record that the manifest gets."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fatdeploy.errors import BundleError, CheckpointError
from fatdeploy.manifest import TOKENIZER
from fatdeploy.runtimes.text.reading import tokenizer_from_record
from fatdeploy.runtimes.text.tokenizer import Tokenizer, tokenizer_from_file
from fatdeploy.spec import ModelSpec
from fatdeploy.text import TARGET_VOCABULARY, VOCABULARY, TextRecord


@dataclass(frozen=True)
class TextFiles:
    """What turns text into tokens: ``contents`` by their names in the bundle; ``name`` is for messages."""

    name: str
    record: TextRecord
    contents: dict[str, bytes]

    def write(self, folder: Path) -> None:
        """Write the files."""
        for name, content in self.contents.items():
            (folder / name).write_bytes(content)

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer as a device reads it."""
        with TemporaryDirectory() as folder:
            self.write(Path(folder))
            return tokenizer_from_record(Path(folder), self.record)

    def check(self, spec: ModelSpec) -> None:
        """Raise if an ordinary text can have a token that the model has not.

        A token that only its own name produces, such as ``<mask>``, may be missing: a text with it is refused later.
        """
        sides = {VOCABULARY: spec.n_source_ids, TARGET_VOCABULARY: spec.vocab_size, TOKENIZER: spec.n_source_ids}
        for name in self.contents.keys() & sides.keys():
            outside = [(token, piece) for piece, token in self._ordinary(name) if token >= sides[name]]
            if outside:
                token, piece = max(outside)
                raise CheckpointError(
                    f"{self.name}: the model has {sides[name]} tokens, {name} has {piece!r} with id {token}: it "
                    "belongs to another model"
                )

    def _ordinary(self, name: str) -> Iterator[tuple[str, int]]:
        """Yield the pieces of ordinary texts, with their ids."""
        values = json.loads(self.contents[name])
        if name != TOKENIZER:
            yield from ((piece, token) for piece, token in values.items() if piece not in self.record.added)
            return
        added = {token["content"] for token in values.get("added_tokens") or []}
        vocabulary = values["model"]["vocab"]
        # A list of pairs, piece and score, has its ids in its order.
        if not isinstance(vocabulary, dict):
            vocabulary = {piece: token for token, (piece, _) in enumerate(vocabulary)}
        yield from ((piece, token) for piece, token in vocabulary.items() if piece not in added)


def fitting_tokenizer(path: Path | None, text: TextFiles | None, spec: ModelSpec) -> Tokenizer | None:
    """Return the tokenizer of a model that has one; raise, before anything is traced, if a device could not use it."""
    if text is not None:
        text.check(spec)
        return text.tokenizer()
    if path is None:
        return None
    try:
        tokenizer = tokenizer_from_file(path)
    except BundleError as error:
        raise CheckpointError(f"{path} is not in the format of the tokenizers package: {error}") from error
    if tokenizer.n_tokens > spec.vocab_size:
        counts = f"{path} has {tokenizer.n_tokens} tokens, the model {spec.vocab_size}"
        raise CheckpointError(f"{counts}: it belongs to another model")
    return tokenizer
