"""The tokenizer.json files that we write ourselves: three kinds, in the format of the tokenizers package."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["characters", "symbols", "bpe"]

PAD, BOS, EOS, UNK = "<pad>", "<bos>", "<eos>", "<unk>"
# The first tokens of a vocabulary. BPE works on bytes and so has no unknown character.
SPECIAL: dict[Kind, tuple[str, ...]] = {
    "characters": (PAD, BOS, EOS, UNK),
    "symbols": (PAD, BOS, EOS, UNK),
    "bpe": (PAD, BOS, EOS),
}
_ANY_SPECIAL = f"(?:{'|'.join([PAD, BOS, EOS, UNK])})"

_Part = dict[str, object]


@dataclass(frozen=True)
class TokenizerFile:
    """The content of a file: how texts are split and joined, the tokens in the order of their ids, merges of BPE."""

    kind: Kind
    tokens: tuple[str, ...]
    merges: tuple[tuple[str, str], ...] = ()

    def to_json(self) -> str:
        """Return the content of the file."""
        model = {**_MODELS[self.kind], "vocab": {token: index for index, token in enumerate(self.tokens)}}
        if self.kind == "bpe":
            model["merges"] = self.merges
        content = {**_LAYOUTS[self.kind], "model": model}
        return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def file_from_json(content: str) -> TokenizerFile | None:
    """Return the content of a file of one of our kinds, None for all others; a ValueError if it is not JSON."""
    try:
        layout = json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not (isinstance(layout, dict) and isinstance(model := layout.pop("model", None), dict)):
        return None
    vocabulary, merges = model.pop("vocab", None), model.pop("merges", None)
    kind = next((kind for kind in _LAYOUTS if (layout, model) == (_LAYOUTS[kind], _MODELS[kind])), None)
    if kind is None or not _is_vocabulary(vocabulary, SPECIAL[kind]) or not _are_merges(merges, kind, vocabulary):
        return None
    tokens = tuple(sorted(vocabulary, key=vocabulary.__getitem__))
    return TokenizerFile(kind, tokens, tuple((left, right) for left, right in merges or ()))


def _is_vocabulary(value: Any, special: Sequence[str]) -> bool:
    if not isinstance(value, dict) or any(type(index) is not int for index in value.values()):
        return False
    in_order = sorted(value, key=value.__getitem__)
    return (
        sorted(value.values()) == list(range(len(value)))
        and in_order[: len(special)] == list(special)
        and is_unicode("".join(in_order))
    )


def _are_merges(value: Any, kind: Kind, vocabulary: dict[str, int]) -> bool:
    if kind != "bpe":
        return value is None
    return isinstance(value, list) and all(_is_merge(merge, vocabulary) for merge in value)


def _is_merge(value: Any, vocabulary: dict[str, int]) -> bool:
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(part, str) for part in value):
        return False
    return all(token in vocabulary for token in (*value, "".join(value)))


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: halves of surrogate pairs cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _layout(pre_tokenizer: _Part, *decoders: _Part) -> _Part:
    """Return everything in a file except the model.

    Special tokens are not among its ``added_tokens``: the package searches texts for those, and a text that contains
    ``<eos>`` would not come back. A decoder removes them instead.
    """
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": list(decoders)},
    }


def _replacing(regex: str, content: str) -> _Part:
    return {"type": "Replace", "pattern": {"Regex": regex}, "content": content}


_BYTES: _Part = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_CHARACTERS: _Part = {"type": "Split", "pattern": {"Regex": r"[\s\S]"}, "behavior": "Isolated", "invert": False}

_LAYOUTS: dict[Kind, _Part] = {
    "characters": _layout(_CHARACTERS, _replacing(rf"\A{_ANY_SPECIAL}\z", "")),
    # A blank before each token that is written, except the first.
    "symbols": _layout(
        _CHARACTERS,
        _replacing(r"\A", " "),
        _replacing(rf"\A {_ANY_SPECIAL}\z", ""),
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ),
    # Its pattern keeps letters and brackets apart, so that no merge spells a special token.
    "bpe": _layout(_BYTES, _replacing(rf"\A{_ANY_SPECIAL}\z", ""), _BYTES),
}
_WORDS: _Part = {"type": "WordLevel", "unk_token": UNK}
_MODELS: dict[Kind, _Part] = {
    "characters": _WORDS,
    "symbols": _WORDS,
    "bpe": {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
    },
}
