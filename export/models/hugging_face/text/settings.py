"""The settings of a folder's tokenizer: its class, its special tokens and what else its JSON files say."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fatdeploy.errors import CheckpointError
from fatdeploy.text import AddedToken

# The class of a tokenizer whose files do not name one.
CLASSES = {
    "bart": "BartTokenizer",
    "bert": "BertTokenizer",
    "blenderbot": "BlenderbotTokenizer",
    "blenderbot-small": "BlenderbotSmallTokenizer",
    "encoder-decoder": "BertTokenizer",
    "m2m_100": "M2M100Tokenizer",
    "marian": "MarianTokenizer",
    "mbart": "MBartTokenizer",
    "mt5": "T5Tokenizer",
    "pegasus": "PegasusTokenizer",
    "plbart": "PLBartTokenizer",
    "t5": "T5Tokenizer",
    "umt5": "T5Tokenizer",
}
SAME_CLASS = {"MT5Tokenizer": "T5Tokenizer", "RobertaTokenizer": "BartTokenizer"}
# Names that say how a tokenizer is implemented and not which one it is.
GENERIC = ("PreTrainedTokenizer", "TokenizersBackend", "PythonBackend", "SentencePieceBackend")
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass
class TokenizerSettings:
    """What the JSON files of a folder say about its tokenizer."""

    folder: Path
    tokenizer: dict[str, Any] = field(init=False)
    model: dict[str, Any] = field(init=False)
    generation: dict[str, Any] = field(init=False)
    added: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        special = json_of(self.folder / "special_tokens_map.json")
        self.tokenizer = {**special, **json_of(self.folder / "tokenizer_config.json")}
        self.model = json_of(self.folder / "config.json")
        self.generation = {**self.model, **json_of(self.folder / "generation_config.json")}
        self.added = json_of(self.folder / "added_tokens.json")

    @property
    def tokenizer_class(self) -> str:
        """The class of the tokenizer without ``Fast``; empty if nothing says it."""
        name = str(self.tokenizer.get("tokenizer_class") or self.model.get("tokenizer_class") or "")
        name = name.removesuffix("Fast")
        if not name or name in GENERIC:
            name = CLASSES.get(str(self.model.get("model_type")), "")
        return SAME_CLASS.get(name, name)

    @property
    def clean_up(self) -> bool:
        """Whether targets lose the blanks before punctuation."""
        return self.tokenizer.get("clean_up_tokenization_spaces") is True

    def named(self, **defaults: str) -> dict[str, str]:
        """Return the special tokens that have a role, by role."""
        values = {**defaults, **{name: self.tokenizer[name] for name in NAMED if self.tokenizer.get(name)}}
        return {name: content_of(value) for name, value in values.items()}

    def further_special(self) -> list[str]:
        """Return the special tokens without a role."""
        listed = [self.tokenizer.get(name) or [] for name in ("additional_special_tokens", "extra_special_tokens")]
        return [content_of(token) for tokens in listed if isinstance(tokens, list) for token in tokens]

    def described(self) -> dict[str, tuple[int, dict[str, Any]]]:
        """Return the tokens that the settings describe one by one: id and properties by name."""
        decoder = self.tokenizer.get("added_tokens_decoder")
        entries = decoder.items() if isinstance(decoder, dict) else ()
        return {content_of(value): (int(token), value if isinstance(value, dict) else {}) for token, value in entries}

    def added_tokens(
        self, vocabulary: dict[str, int], special: list[str]
    ) -> tuple[dict[str, AddedToken], tuple[int, ...]]:
        """Return the tokens that a text can spell, and the ids of those that are not written.

        ``special`` are the names of special tokens; the settings may name more. Tokens without an id get the next ones.
        """
        described = self.described()
        names = dict.fromkeys([*described, *special, *self.further_special(), *self.added])
        added: dict[str, AddedToken] = {}
        unwritten = {*special, *self.further_special()}
        for name in names:
            token, properties = described.get(name, (vocabulary.get(name, self.added.get(name)), {}))
            if token is None:
                token = 1 + max([*vocabulary.values(), *(entry.id for entry in added.values())])
            added[name] = AddedToken(int(token), bool(properties.get("lstrip")), bool(properties.get("rstrip")))
            if properties.get("special"):
                unwritten.add(name)
        return added, tuple(sorted({added[name].id for name in unwritten}))


def content_of(token: Any) -> str:
    """Return the name of a token, which may be described by an object."""
    return str(token.get("content") if isinstance(token, dict) else token)


def json_of(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"cannot read {path}: expected an object, found {type(values).__name__}")
    return values
