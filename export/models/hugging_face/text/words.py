"""Folders with vocabularies in plain files: byte-level BPE of BART and WordPiece of BERT, written as tokenizer.json."""

from fatdeploy.errors import CheckpointError
from fatdeploy.export.models.hugging_face.text.settings import TokenizerSettings, json_of

# Special tokens by role, where the settings name none.
BART = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "sep_token": "</s>",
    "pad_token": "<pad>",
    "cls_token": "<s>",
    "mask_token": "<mask>",
}
BERT = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}


def bart_json(settings: TokenizerSettings) -> str:
    """Return the tokenizer.json of a vocab.json and a merges.txt."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    vocabulary = json_of(settings.folder / "vocab.json")
    lines = _lines(settings, "merges.txt")
    merges = [(left, right) for left, _, right in (line.partition(" ") for line in lines if line[:1] != "#") if right]
    roles = settings.named(**BART)
    prefix = settings.tokenizer.get("add_prefix_space") is True
    model = models.BPE(vocabulary, merges, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False)
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    first, last = (_with_id(settings, vocabulary, roles[role]) for role in ("cls_token", "sep_token"))
    tokenizer.post_processor = processors.RobertaProcessing(last, first, trim_offsets=True, add_prefix_space=prefix)
    return str(tokenizer.to_str())


def bert_json(settings: TokenizerSettings) -> str:
    """Return the tokenizer.json of a vocab.txt."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate(_lines(settings, "vocab.txt"))}
    roles = settings.named(**BERT)
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=roles["unk_token"]))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.tokenizer.get("tokenize_chinese_chars", True),
        strip_accents=settings.tokenizer.get("strip_accents"),
        lowercase=settings.tokenizer.get("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    first, last = (_with_id(settings, vocabulary, roles[role]) for role in ("cls_token", "sep_token"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{first[0]} $A {last[0]}", special_tokens=[first, last]
    )
    return str(tokenizer.to_str())


def _lines(settings: TokenizerSettings, name: str) -> list[str]:
    path = settings.folder / name
    try:
        # Not splitlines: some characters of a vocabulary end lines there.
        return path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {path}: {error}; {settings.tokenizer_class} needs it") from error


def _with_id(settings: TokenizerSettings, vocabulary: dict[str, int], token: str) -> tuple[str, int]:
    if token not in vocabulary:
        raise CheckpointError(f"{settings.folder}: the vocabulary has no {token!r}, which surrounds every source")
    return token, vocabulary[token]
