"""Folders of Hugging Face tokenizers around small sentencepiece models that are trained here, and odd texts."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Literal

import sentencepiece

ROOT = Path(__file__).parents[3]
Kind = Literal["unigram", "bpe"]
# The special pieces of T5 and Pegasus stand in another order.
T5_IDS = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ODD = [
    "Über die Straße gehen wir nach Köln, weil es schön ist.",
    "日本語の文章です。これはテストです。",
    "Привет, как дела? Всё хорошо.",
    "naïve café résumé coöperate",
    "ﬁne ligature ﬀ ① ½ ™ …  double  spaces",
    "emoji 😀 test 👍🏽 👩‍👩‍👧",
    "tab\tand\u00a0nbsp\u200bzero\u3000wide",
    "“quotes” ‘single’ — dash – en",
    "ａｂｃ　全角ＡＢＣ１２３",
    "x\ny\r\nz",
    "",
    " ",
    "  leading and trailing  ",
    "</s> inside <pad> and <unk> .",
    "a</s>b",
    "▁under▁score ▁",
    "e\u0301 combining \u0627\u0644\u0639\u0631\u0628\u064a\u0629",
    "\u0000\u0001 control \ufeff bom",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "don 't , won 't . He 's ? I 've !",
]


@cache
def sample_lines() -> list[str]:
    """Return lines of prose and code. They are a file of their own: drawn models must not change with the project."""
    return (ROOT / "tests" / "data" / "text" / "lines.txt").read_text(encoding="utf-8").splitlines()


def texts(count: int) -> list[str]:
    """Return texts to tokenise: lines, lines with odd characters inside, and odd ones."""
    draw = random.Random(1)
    lines = sample_lines()[: count - len(ODD)]
    mixed = [line if index % 3 else f"{line[:20]}{draw.choice(ODD)}{line[20:50]}" for index, line in enumerate(lines)]
    return [*ODD, *mixed]


@cache
def trained_pieces(kind: Kind = "unigram", size: int = 600, seed: int = 0, **ids: int) -> bytes:
    """Return a sentencepiece model; ``ids`` are those of its special pieces."""
    folder = Path(mkdtemp())
    lines = sample_lines()
    random.Random(seed).shuffle(lines := list(lines))
    (folder / "lines.txt").write_text("\n".join(lines[:1500] + ODD[:4] * 4), encoding="utf-8")
    settings: dict[str, Any] = {"vocab_size": size, "model_type": kind, "character_coverage": 0.9995, **ids}
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "lines.txt"),
        model_prefix=str(folder / "m"),
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
        **settings,
    )
    content = (folder / "m.model").read_bytes()
    shutil.rmtree(folder)
    return content


def pieces_of(content: bytes) -> list[str]:
    """Return the pieces of a model in their order."""
    model = sentencepiece.SentencePieceProcessor(model_proto=content)
    return [model.id_to_piece(index) for index in range(model.get_piece_size())]


def write_json(path: Path, values: object) -> None:
    """Write a JSON file."""
    path.write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")


def marian_folder(
    folder: Path, kind: Kind = "unigram", codes: tuple[str, ...] = (), *, gaps: bool = True, **config: object
) -> Path:
    """Write a tokenizer as OPUS-MT has it: two models, one vocabulary in an order of its own.

    With ``gaps`` some pieces of the models have no id, as in some of the published folders.
    """
    source, target = trained_pieces(kind), trained_pieces(kind, 500, seed=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "source.spm").write_bytes(source)
    (folder / "target.spm").write_bytes(target)
    both = sorted({*pieces_of(source)[3:], *pieces_of(target)[3:]}, key=lambda piece: (len(piece), piece))
    both = [piece for index, piece in enumerate(both) if index % 97 or not gaps]
    tokens = ["</s>", "<unk>", *both, *(f">>{code}<<" for code in codes), "<pad>"]
    write_json(folder / "vocab.json", {token: index for index, token in enumerate(tokens)})
    values = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer", "model_max_length": 512}
    write_json(folder / "tokenizer_config.json", {**values, **config})
    write_json(folder / "config.json", {"model_type": "marian"})
    return folder


def m2m_folder(folder: Path) -> Path:
    """Write a tokenizer as M2M100 has it: a model, a vocabulary, and languages after it."""
    content = trained_pieces("bpe")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sentencepiece.bpe.model").write_bytes(content)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *pieces_of(content)[3:-20]]
    write_json(folder / "vocab.json", {token: index for index, token in enumerate(tokens)})
    codes = ["en", "ha", "is", "ja", "cs", "ru", "zh", "de"]
    special = {"additional_special_tokens": [f"__{code}__" for code in codes]}
    config = {"tokenizer_class": "M2M100Tokenizer", "language_codes": "wmt21", "num_madeup_words": 0, **special}
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "config.json", {"model_type": "m2m_100"})
    return folder


# The file of the model, its special pieces and the type of the model, by class.
ALONE: dict[str, tuple[str, dict[str, int], str]] = {
    "T5Tokenizer": ("spiece.model", T5_IDS, "t5"),
    "PegasusTokenizer": ("spiece.model", T5_IDS, "pegasus"),
    "MBartTokenizer": ("sentencepiece.bpe.model", {}, "mbart"),
    "MBart50Tokenizer": ("sentencepiece.bpe.model", {}, "mbart"),
    "PLBartTokenizer": ("sentencepiece.bpe.model", {}, "plbart"),
}


def alone_folder(folder: Path, tokenizer_class: str, **config: object) -> Path:
    """Write a folder with nothing but a sentencepiece model and the name of its class."""
    name, ids, model_type = ALONE[tokenizer_class]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(trained_pieces("unigram", 600, 0, **ids))
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": tokenizer_class, **config})
    write_json(folder / "config.json", {"model_type": model_type})
    return folder
