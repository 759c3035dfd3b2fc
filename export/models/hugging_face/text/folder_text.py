"""The tokenizer of a Hugging Face folder, as the files and the record of a bundle."""

import json
from pathlib import Path
from typing import Any

from fatdeploy.errors import CheckpointError
from fatdeploy.export.models.hugging_face.text.languages import languages_of
from fatdeploy.export.models.hugging_face.text.pieces import PIECE_FAMILIES, piece_files
from fatdeploy.export.models.hugging_face.text.settings import TokenizerSettings, content_of
from fatdeploy.export.models.hugging_face.text.words import BART, BERT, bart_json, bert_json
from fatdeploy.export.text_files import TextFiles
from fatdeploy.manifest import TOKENIZER
from fatdeploy.text import AddedToken, TextRecord

# Classes whose plain files become a tokenizer.json, with their special tokens and the file that each needs.
PLAIN = {"BartTokenizer": (bart_json, BART, "merges.txt"), "BertTokenizer": (bert_json, BERT, "vocab.txt")}
ADVICE = (
    "write it with transformers: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER); or remove the files of "
    "the tokenizer, for a bundle that takes token ids"
)


def text_of_folder(folder: Path) -> TextFiles | None:
    """Return the tokenizer of a folder; None if the folder has no file of one."""
    settings = TokenizerSettings(folder)
    name = settings.tokenizer_class
    if name == "ByT5Tokenizer":
        return _byte_files(settings)
    if (folder / TOKENIZER).is_file():
        try:
            content = (folder / TOKENIZER).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {folder / TOKENIZER} ({error}): {ADVICE}") from error
        return json_files(settings, content)
    if name in PIECE_FAMILIES and (folder / PIECE_FAMILIES[name].file).is_file():
        return piece_files(settings)
    if name in PLAIN and (folder / PLAIN[name][2]).is_file():
        write, roles, _ = PLAIN[name]
        return json_files(settings, write(settings), roles)
    files = [file.name for file in sorted(folder.glob("*")) if file.suffix in (".model", ".spm", ".txt")]
    if name and (files or (folder / "tokenizer_config.json").is_file() or (folder / "vocab.json").is_file()):
        raise CheckpointError(f"{folder}: {name} has no {TOKENIZER} here, and no other files that are known: {ADVICE}")
    return None


def json_files(settings: TokenizerSettings, content: str, roles: dict[str, str] | None = None) -> TextFiles:
    """Return a tokenizer.json with the special tokens that the settings name beside it."""
    import tokenizers

    path = settings.folder / TOKENIZER
    content = _with_special_tokens(settings, content, roles or {}, path)
    values = json.loads(content)
    added = {token["content"]: int(token["id"]) for token in values.get("added_tokens") or []}
    eos = settings.named(**(roles or {})).get("eos_token", "</s>")
    # Blanks before punctuation are part of what byte-level and other BPE writes, so transformers leaves them there.
    clean_up = settings.clean_up and values["model"].get("type") != "BPE"
    end_id = tokenizers.Tokenizer.from_str(content).token_to_id(eos)
    languages = languages_of(settings, added, end_id or 0)
    if languages is not None and end_id is None:
        raise CheckpointError(f"{path} has no token {eos!r}, which ends a source in a language: {ADVICE}")
    record = TextRecord("tokenizer_json", (TOKENIZER,), clean_up=clean_up, languages=languages)
    return TextFiles(str(settings.folder), record, {TOKENIZER: content.encode()})


def _with_special_tokens(settings: TokenizerSettings, content: str, roles: dict[str, str], path: Path) -> str:
    """Return the file itself, unless the settings name special tokens that it does not have."""
    import tokenizers

    try:
        tokenizer: Any = tokenizers.Tokenizer.from_str(content)
    except Exception as error:  # the package raises nothing more specific
        raise CheckpointError(f"cannot read {path} ({' '.join(str(error).split())}): {ADVICE}") from error
    known = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    new = []
    for name, properties in _named_tokens(settings, roles).items():
        if not known.get(name, False):
            keys = ("single_word", "lstrip", "rstrip", "normalized")
            new.append(tokenizers.AddedToken(name, **{key: bool(properties.get(key)) for key in keys}, special=True))
    if new:
        tokenizer.add_special_tokens(new)
    return str(tokenizer.to_str()) if new else content


def _named_tokens(settings: TokenizerSettings, roles: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the special tokens of the settings with their properties."""
    described = {name: values for name, (_, values) in settings.described().items() if values.get("special")}
    raw = [settings.tokenizer.get(role) for role in roles] + list(
        settings.tokenizer.get("additional_special_tokens") or []
    )
    objects = {content_of(token): token for token in raw if isinstance(token, dict)}
    names = [*settings.named(**roles).values(), *settings.further_special()]
    return {**{name: objects.get(name, {}) for name in names}, **described}


def _byte_files(settings: TokenizerSettings) -> TextFiles:
    """Return ByT5's tokenizer, which has no file."""
    names = settings.named(pad_token="<pad>", eos_token="</s>", unk_token="<unk>")  # noqa: S106 - not passwords
    added = {
        names[role]: AddedToken(index, left=True, right=True)
        for index, role in enumerate(("pad_token", "eos_token", "unk_token"))
    }
    extra = settings.further_special() or [f"<extra_id_{i}>" for i in range(settings.tokenizer.get("extra_ids") or 125)]
    described = settings.described()
    for index, name in enumerate(extra):
        token, _ = described.get(name, (259 + index, {}))
        added.setdefault(name, AddedToken(token))
    special = tuple(sorted(token.id for token in added.values()))
    record = TextRecord("bytes", (), special=special, added=added, after=(added[names["eos_token"]].id,))
    return TextFiles(str(settings.folder), record, {})
