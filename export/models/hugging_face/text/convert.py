"""Marian's and M2M100's tokenizers as tokenizer.json: close to sentencepiece, and compared with it text by text."""

import importlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fatdeploy.errors import ConfigError
from fatdeploy.export.text_files import TextFiles
from fatdeploy.manifest import TOKENIZER
from fatdeploy.runtimes.text.piece_tokenizer import sentencepiece_module
from fatdeploy.text import SOURCE_PIECES, TARGET_VOCABULARY, VOCABULARY, Conversion, TextRecord

# The score of a piece that must never be part of a segmentation: the target's own ones, and special ones.
NEVER = -1e6
NORMAL, USER_DEFINED, BYTE = 1, 4, 6
UNIGRAM = 1


def converted(files: TextFiles, texts: Sequence[str]) -> TextFiles:
    """Return a tokenizer.json in place of sentencepiece models, with the number of texts that it reads differently."""
    if files.record.kind != "sentencepiece" or TARGET_VOCABULARY in files.contents:
        raise ConfigError(
            f"--tokenizer convert: {files.name} has nothing to convert; only sentencepiece models with one vocabulary "
            "need it"
        )
    record = TextRecord(
        "tokenizer_json", (TOKENIZER,), clean_up=files.record.clean_up, languages=files.record.languages
    )
    new = TextFiles(files.name, record, {TOKENIZER: _tokenizer(files).encode()})
    return TextFiles(new.name, replace(record, conversion=differences(files, new, texts)), new.contents)


def differences(exact: TextFiles, other: TextFiles, texts: Sequence[str]) -> Conversion:
    """Return how many texts have other tokens, and how many are written differently from the same tokens."""
    left, right = exact.tokenizer(), other.tokenizer()
    rows = [(left.encoded(text).ids.tolist(), right.encoded(text).ids.tolist()) for text in texts]
    written = [(left.text(row), right.text(row)) for row, _ in rows]
    return Conversion(len(texts), sum(a != b for a, b in rows), sum(a != b for a, b in written))


def _tokenizer(files: TextFiles) -> str:
    """Return the content of the tokenizer.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors

    record = files.record
    vocabulary: dict[str, int] = json.loads(files.contents[VOCABULARY])
    proto = _proto(files)
    tokenizer = Tokenizer(_model(proto, vocabulary, record))
    charsmap = proto.normalizer_spec.precompiled_charsmap
    steps = [normalizers.Precompiled(charsmap)] if charsmap else []
    blanks = [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    tokenizer.normalizer = normalizers.Sequence([*steps, *blanks])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    words = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    # Not its Strip, which panics on texts that are shorter than what it may remove.
    tokenizer.decoder = decoders.Sequence([words, decoders.Fuse(), decoders.Replace(Regex(r"\A +| +\z"), "")])
    special = set(record.special)
    tokenizer.add_special_tokens(
        [
            AddedToken(name, lstrip=token.left, rstrip=token.right, normalized=False)
            for name, token in sorted(record.added.items(), key=lambda entry: entry[1].id)
            if token.id in special
        ]
    )
    if record.markers and record.languages is not None:
        codes = [f">>{code}<<" for code in record.languages.ids]
        tokenizer.add_tokens([AddedToken(code, normalized=False, special=False) for code in codes])
    names = {token: piece for piece, token in vocabulary.items()}
    around = [(names[token], token) for token in (*record.before, *record.after)]
    single = [*(names[token] for token in record.before), "$A", *(names[token] for token in record.after)]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=around)
    return str(tokenizer.to_str())


def _proto(files: TextFiles) -> Any:
    sentencepiece_module("--tokenizer convert")
    proto = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
    proto.ParseFromString(files.contents[SOURCE_PIECES])
    return proto


def _model(proto: Any, vocabulary: dict[str, int], record: TextRecord) -> Any:
    from tokenizers import models

    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (NORMAL, USER_DEFINED, BYTE)}
    order = sorted(vocabulary, key=vocabulary.__getitem__)
    if proto.trainer_spec.model_type == UNIGRAM:
        # A piece without an id cannot be expressed: its text is cut into others, which is one of the differences.
        return models.Unigram([(piece, scores.get(piece, NEVER)) for piece in order], unk_id=record.unk_id)
    ranks = {piece.piece: index for index, piece in enumerate(proto.pieces)}
    merges = [
        (rank, piece[:cut], piece[cut:])
        for piece, rank in ranks.items()
        for cut in range(1, len(piece))
        if piece in scores and piece in vocabulary and all(part in vocabulary for part in (piece[:cut], piece[cut:]))
    ]
    unknown = order[record.unk_id or 0]
    pairs = [(left, right) for _, left, right in sorted(merges)]
    return models.BPE(vocabulary, pairs, unk_token=unknown, fuse_unk=True)
