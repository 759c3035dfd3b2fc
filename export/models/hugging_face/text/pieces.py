"""Folders with sentencepiece models: the ids of their pieces, by family, for a vocabulary of the bundle."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fatdeploy.errors import CheckpointError
from fatdeploy.export.models.hugging_face.text.languages import M2M100, MBART, MBART50, PLBART, languages_of
from fatdeploy.export.models.hugging_face.text.settings import TokenizerSettings, json_of
from fatdeploy.export.text_files import TextFiles
from fatdeploy.runtimes.text.piece_tokenizer import piece_model
from fatdeploy.text import SOURCE_PIECES, TARGET_PIECES, TARGET_VOCABULARY, VOCABULARY, TextRecord

# The first ids of models that come from fairseq; sentencepiece has three special pieces there.
FAIRSEQ = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
FAIRSEQ_ROLES = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
ROLES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
MASK = {"mask_token": "<mask>"}
# Pegasus has this number of tokens before its pieces, for its training alone.
PEGASUS_OFFSET = 103

Vocabulary = dict[str, int]


@dataclass(frozen=True)
class PieceFamily:
    """A family: the file of its model, its special tokens by role, and the ids of its pieces and special tokens."""

    file: str
    roles: dict[str, str]
    vocabulary: Callable[[TokenizerSettings, list[str]], Vocabulary]
    # Special tokens beside those that have a role.
    further: Callable[[TokenizerSettings, Vocabulary], list[str]] = lambda _, __: []
    target_file: str | None = None
    cleans_up: bool = False


def piece_files(settings: TokenizerSettings) -> TextFiles:
    """Return the tokenizer of a folder of one of the families."""
    family = PIECE_FAMILIES[settings.tokenizer_class]
    folder = settings.folder
    names = {SOURCE_PIECES: family.file} | ({TARGET_PIECES: family.target_file} if family.target_file else {})
    missing = [name for name in names.values() if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(f"{folder} has no {' and no '.join(missing)}: {settings.tokenizer_class} needs it")
    pieces = _pieces(folder / family.file)
    vocabulary = family.vocabulary(settings, pieces)
    roles = settings.named(**family.roles)
    for role in ("eos_token", "unk_token"):
        if roles[role] not in vocabulary:
            raise CheckpointError(f"{folder}: the vocabulary has no {roles[role]!r}, its {role}")
    special = list(dict.fromkeys([*roles.values(), *family.further(settings, vocabulary)]))
    added, unwritten = settings.added_tokens(vocabulary, special)
    contents = {name: (folder / original).read_bytes() for name, original in names.items()}
    contents[VOCABULARY] = _json(vocabulary)
    if settings.tokenizer.get("separate_vocabs") is True:
        contents[TARGET_VOCABULARY] = _json(json_of(folder / "target_vocab.json"))
    tokens = {**vocabulary, **{name: token.id for name, token in added.items()}}
    eos_id = tokens[roles["eos_token"]]
    record = TextRecord(
        "sentencepiece",
        tuple(contents),
        clean_up=bool(settings.tokenizer.get("clean_up_tokenization_spaces", family.cleans_up)),
        special=unwritten,
        added=added,
        after=(eos_id,),
        unk_id=tokens[roles["unk_token"]],
        markers=settings.tokenizer_class == "MarianTokenizer",
        languages=languages_of(settings, tokens, eos_id),
    )
    return TextFiles(str(folder), record, contents)


def _pieces(path: Path) -> list[str]:
    model = piece_model(path)
    return [model.id_to_piece(index) for index in range(model.get_piece_size())]


def _json(values: object) -> bytes:
    return (json.dumps(values, ensure_ascii=False, indent=0) + "\n").encode()


def _own_vocabulary(settings: TokenizerSettings, _: list[str]) -> Vocabulary:
    path = settings.folder / "vocab.json"
    vocabulary = json_of(path)
    if not vocabulary or not all(type(token) is int and token >= 0 for token in vocabulary.values()):
        raise CheckpointError(f"{path}: expected an object of ids by piece; {settings.tokenizer_class} needs it")
    return vocabulary


def _m2m_vocabulary(settings: TokenizerSettings, pieces: list[str]) -> Vocabulary:
    vocabulary = _own_vocabulary(settings, pieces)
    codes = _listed(settings, M2M100, "m2m100")
    return {**vocabulary, **{f"__{code}__": len(vocabulary) + index for index, code in enumerate(codes)}}


def _listed(settings: TokenizerSettings, lists: dict[str, list[str]], default: str) -> list[str]:
    name = settings.tokenizer.get("language_codes") or default
    if name not in lists:
        raise CheckpointError(f"{settings.folder}: language_codes must be one of {', '.join(lists)}, found {name!r}")
    return lists[name]


def _t5_vocabulary(settings: TokenizerSettings, pieces: list[str]) -> Vocabulary:
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    count = settings.tokenizer.get("extra_ids", 100)
    # Counted from the end of the vocabulary: the last token is <extra_id_0>.
    new = [f"<extra_id_{index}>" for index in reversed(range(count)) if f"<extra_id_{index}>" not in vocabulary]
    return {**vocabulary, **{name: len(pieces) + index for index, name in enumerate(new)}}


def _extra_ids(_: TokenizerSettings, vocabulary: Vocabulary) -> list[str]:
    return [name for name in vocabulary if name.startswith("<extra_id_")]


def _pegasus_vocabulary(settings: TokenizerSettings, pieces: list[str]) -> Vocabulary:
    offset = settings.tokenizer.get("offset", PEGASUS_OFFSET)
    first = ["<pad>", "</s>", "<mask_1>", "<mask_2>", *(f"<unk_{index}>" for index in range(2, offset))]
    return {
        **{name: index for index, name in enumerate(first)},
        **{piece: index + offset for index, piece in enumerate(pieces) if index >= 2},
    }


def _unused(settings: TokenizerSettings, vocabulary: Vocabulary) -> list[str]:
    offset = settings.tokenizer.get("offset", PEGASUS_OFFSET)
    return [name for name, token in vocabulary.items() if token < offset + 2]


def _fairseq_vocabulary(codes: list[str], pieces: list[str], *, mask: bool = True) -> Vocabulary:
    regular = {piece: index + 1 for index, piece in enumerate(pieces) if index >= 3}
    last = [*codes, *(["<mask>"] if mask else [])]
    return {**FAIRSEQ, **regular, **{name: len(pieces) + 1 + index for index, name in enumerate(last)}}


def _plbart_vocabulary(settings: TokenizerSettings, pieces: list[str]) -> Vocabulary:
    codes = [f"__{code}__" for code in _listed(settings, PLBART, "base")]
    return _fairseq_vocabulary(codes, pieces, mask=settings.tokenizer.get("language_codes", "base") == "base")


def _language_tokens(settings: TokenizerSettings, vocabulary: Vocabulary) -> list[str]:
    languages = languages_of(settings, vocabulary, 0)
    ids = set() if languages is None else set(languages.ids.values())
    return [name for name, token in vocabulary.items() if token in ids]


FAIRSEQ_FILE = "sentencepiece.bpe.model"
PIECE_FAMILIES = {
    "MarianTokenizer": PieceFamily("source.spm", ROLES, _own_vocabulary, target_file="target.spm"),
    "M2M100Tokenizer": PieceFamily(
        FAIRSEQ_FILE, {**ROLES, "bos_token": "<s>", "sep_token": "</s>"}, _m2m_vocabulary, _language_tokens
    ),
    "T5Tokenizer": PieceFamily("spiece.model", ROLES, _t5_vocabulary, _extra_ids),
    "PegasusTokenizer": PieceFamily("spiece.model", {**ROLES, "mask_token": "<mask_2>"}, _pegasus_vocabulary, _unused),
    "MBartTokenizer": PieceFamily(
        FAIRSEQ_FILE,
        FAIRSEQ_ROLES | MASK,
        lambda _, pieces: _fairseq_vocabulary(MBART, pieces),
        _language_tokens,
    ),
    "MBart50Tokenizer": PieceFamily(
        FAIRSEQ_FILE,
        FAIRSEQ_ROLES | MASK,
        lambda _, pieces: _fairseq_vocabulary(MBART50, pieces),
        _language_tokens,
    ),
    "PLBartTokenizer": PieceFamily(
        FAIRSEQ_FILE, FAIRSEQ_ROLES | MASK, _plbart_vocabulary, _language_tokens, cleans_up=True
    ),
}
