"""Vocabularies from training pairs: characters, symbols or byte-level BPE, with ids by frequency."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from fatdeploy.errors import CheckpointError, ConfigError, in_one_line
from fatdeploy.runtimes.text.tokenizer import tokenizer_from_json
from fatdeploy.runtimes.text.tokenizer_json import SPECIAL, Kind, TokenizerFile, file_from_json, is_unicode

__all__ = ["Kind", "TextCoder", "built_tokenizer", "loaded_tokenizer"]

Pairs = Sequence[tuple[str, str]]

BPE_TOKENS = 8000
N_BYTES = 256
# A merge seen once is no pattern, and its token would be trained once per epoch.
LEAST_SEEN = 2


class TextCoder:
    """Texts of pairs as tokens and back, exactly as a device reads and writes them."""

    pad_id, bos_id, eos_id = 0, 1, 2

    def __init__(self, file: TokenizerFile) -> None:
        self.kind: Kind = file.kind
        self.n_tokens = len(file.tokens)
        self.unk_id = None if file.kind == "bpe" else 3
        self._content = file.to_json()
        self._tokenizer = tokenizer_from_json(self._content, Path("tokenizer.json"))
        self._vocabulary = frozenset(file.tokens[len(SPECIAL[file.kind]) :])

    def source_ids(self, text: str) -> list[int]:
        """Return the tokens of a source; none are around them."""
        ids: list[int] = self._tokenizer.encoded(text).ids.tolist()
        return ids

    def target_ids(self, text: str) -> list[int]:
        """Return the tokens of a target, without BOS and EOS."""
        return list(self._tokenizer.plain_ids(text))

    def text(self, ids: Sequence[int]) -> str:
        """Return the text of a target's tokens, without special ones."""
        return self._tokenizer.text(ids)

    def unknown(self, pairs: Pairs) -> Counter[str]:
        """Return how often each character or symbol without a token occurs in pairs; none with BPE."""
        if self.kind == "bpe":
            return Counter()
        sources, targets = _counted(pairs, self.kind)
        return Counter({token: count for token, count in (sources + targets).items() if token not in self._vocabulary})

    def save(self, path: Path) -> None:
        """Write tokenizer.json, in the format of the tokenizers package."""
        path.write_text(self._content, encoding="utf-8", newline="\n")


def built_tokenizer(pairs: Pairs, kind: Kind, *, vocab_size: int | None = None) -> TextCoder:
    """Return a tokenizer for sources and targets alike; the same pairs give the same file, byte for byte.

    A token's id is its rank: special tokens first, then the others by frequency in targets, by frequency in sources,
    and by spelling. Only BPE takes a ``vocab_size``, the largest number of tokens; the others have a token for all that
    occurs in the pairs.
    """
    _check_vocabulary(pairs, kind, vocab_size)
    if kind == "bpe":
        return TextCoder(_learned(pairs, vocab_size or BPE_TOKENS))
    sources, targets = _counted(pairs, kind)
    tokens = _ranked(sources.keys() | targets.keys(), sources, targets)
    return TextCoder(TokenizerFile(kind, (*SPECIAL[kind], *tokens)))


def loaded_tokenizer(path: Path) -> TextCoder:
    """Return the tokenizer of a file that ``TextCoder.save`` wrote."""
    try:
        file = file_from_json(path.read_text(encoding="utf-8"))
        if file is None:
            raise ValueError("expected characters, symbols or bpe as fatdeploy train writes them")
        return TextCoder(file)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read the tokenizer {path}: {error}; train again to get a new one") from error


def _check_vocabulary(pairs: Pairs, kind: Kind, vocab_size: int | None) -> None:
    reasons = []
    if not pairs:
        reasons.append("there are no pairs")
    if vocab_size is not None and kind != "bpe":
        reasons.append(f"vocab_size is for bpe, {kind} keep everything that occurs; leave it out")
    least = N_BYTES + len(SPECIAL["bpe"])
    if vocab_size is not None and kind == "bpe" and vocab_size < least:
        reasons.append(f"vocab_size must be at least {least}, one for each byte and special token, found {vocab_size}")
    broken = [number for number, pair in enumerate(pairs) if not all(map(is_unicode, pair))]
    if broken:
        reasons.append(f"texts must be valid Unicode, those of pairs {_first_few(broken)} are not")
    if kind == "symbols":
        reserved = {symbol for _, target in pairs for symbol in target.split() if symbol in SPECIAL[kind]}
        reasons += [f"the symbol {symbol} is the name of a special token; rename it" for symbol in sorted(reserved)]
    if reasons:
        raise ConfigError(in_one_line("no tokenizer", reasons))


def _first_few(numbers: Sequence[int], most: int = 5) -> str:
    """Return the first of many numbers, and how many more there are."""
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more


def _counted(pairs: Pairs, kind: Kind) -> tuple[Counter[str], Counter[str]]:
    """Return how often each character or symbol occurs in the sources, and in the targets."""
    sources: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    for source, target in pairs:
        sources.update(source)
        targets.update(target.split() if kind == "symbols" else target)
    return sources, targets


def _ranked(tokens: Iterable[str], sources: Counter[str], targets: Counter[str]) -> list[str]:
    return sorted(tokens, key=lambda token: (-targets[token], -sources[token], token))


def _learned(pairs: Pairs, vocab_size: int) -> TokenizerFile:
    """Return byte-level BPE learned on both sides, with ids by rank; merges are strings, so ids are free to choose."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL["bpe"]),
        min_frequency=LEAST_SEEN,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    learner.train_from_iterator((text for pair in pairs for text in pair), trainer)
    sources: Counter[str] = Counter()
    targets: Counter[str] = Counter()
    for source, target in pairs:
        sources.update(learner.encode(source).tokens)
        targets.update(learner.encode(target).tokens)
    tokens = _ranked(learner.get_vocab(), sources, targets)
    return TokenizerFile("bpe", (*SPECIAL["bpe"], *tokens), _merges_of(learner))


def _merges_of(learner: Tokenizer) -> tuple[tuple[str, str], ...]:
    """Return the merges in order; the package shows them only in its file."""
    return tuple((left, right) for left, right in json.loads(learner.to_str())["model"]["merges"])
