"""Sources of a model on their way in: texts in their languages, documents as sentences, or token ids."""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.prompts import PrefixIds
from fatdeploy.runtimes.decoding.sources import checked_sources, row_of
from fatdeploy.runtimes.text.languages import DEFAULT_PAIR, LanguagePair, encoded_in, wrong_target
from fatdeploy.runtimes.text.reading import needed_tokenizer, text_record, tokenizer_of
from fatdeploy.runtimes.text.sentences import SplitText, split_sentences
from fatdeploy.runtimes.text.tokenizer import Encoded, Tokenizer
from fatdeploy.runtimes.text.tokenizer_json import UNK
from fatdeploy.spec import Tokens

# How many unknown characters a warning names; the others are counted.
MOST_NAMED = 10

log = logging.getLogger("fatdeploy")


@dataclass(frozen=True, eq=False)
class ReadSource:
    """The tokens of a source, how many were cut off, the characters without a token, a prefix and its languages."""

    ids: NDArray[np.generic]
    dropped: int = 0
    unknown: tuple[str, ...] = ()
    prefix: PrefixIds | None = None
    pair: LanguagePair = DEFAULT_PAIR


@dataclass(frozen=True, eq=False)
class ReadDocument:
    """The sentences of a text, and how their translations are put together."""

    layout: SplitText
    sentences: tuple[ReadSource, ...]

    def joined(self, results: Sequence[Hypothesis]) -> Hypothesis:
        """Return the results of the sentences as one: all tokens, the whole text, and the first finish but ``eos``."""
        return Hypothesis(
            tuple(token for result in results for token in result.tokens),
            next((result.finish for result in results if result.finish != "eos"), "eos"),
            text=self.layout.joined([result.text or "" for result in results]),
            dropped=sum(result.dropped for result in results),
        )


Source = str | Sequence[int] | Tokens | ReadSource


class SourceReader:
    """Reads the sources of one bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        self.tokenizer = tokenizer_of(bundle)
        record = text_record(bundle.manifest)
        self.languages = None if record is None else record.languages

    def needed_tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise the reason why there is none."""
        return needed_tokenizer(self._bundle, self.tokenizer)

    def tokenized(self, source: Source, pair: LanguagePair, *, truncate: bool) -> ReadSource:
        """Return the tokens of a source, cut if ``truncate``, before any check of ids and lengths."""
        if isinstance(source, ReadSource):
            return source if pair == DEFAULT_PAIR else self._in_language(source, pair)
        if isinstance(source, str):
            if reason := wrong_target(self.languages, source, pair):
                raise ConfigError(f"languages refused: {reason}")
            encoded = encoded_in(self.needed_tokenizer(), source, pair)
        else:
            encoded = Encoded(row_of(source))
        # A copy: a stream reads it later, and the caller may change the array.
        ids = np.array(encoded.cut(self._bundle.spec.max_source) if truncate else encoded.ids)
        read = ReadSource(ids, encoded.ids.size - ids.size, encoded.unknown, pair=pair)
        return read if isinstance(source, str) else self._in_language(read, pair)

    def document(self, text: object, pair: LanguagePair, *, truncate: bool) -> ReadDocument:
        """Return a text as sentences, each read on its own."""
        if not isinstance(text, str):
            raise ConfigError(f"split refused: only a text has sentences, found {text!r:.60}")
        layout = split_sentences(text)
        rows = [self.tokenized(sentence, pair, truncate=truncate) for sentence in layout.sentences]
        return ReadDocument(layout, tuple(rows))

    def readable(self, sources: Iterable[Source], pairs: Sequence[LanguagePair], *, truncate: bool) -> list[ReadSource]:
        """Return sources that the model can read; log one warning about cuts and one about unknown characters."""
        sources = list(sources)
        rows = [self.tokenized(source, pair, truncate=truncate) for source, pair in zip(sources, pairs, strict=True)]
        if not sources or not all(isinstance(source, ReadSource) for source in sources):
            checked_sources([row.ids for row in rows], self._bundle.spec)
        dropped = [row.dropped for row in rows]
        if any(dropped):
            log.warning("sources cut to max_source = %d: tokens dropped %s", self._bundle.spec.max_source, dropped)
        if unknown := list(dict.fromkeys(character for row in rows for character in row.unknown)):
            _warn_of_unknown(unknown)
        return rows

    def _in_language(self, source: ReadSource, pair: LanguagePair) -> ReadSource:
        """Return tokens with the language of their target; what is part of a text cannot be named any more."""
        in_text = self.languages is not None and self.languages.target == "marker" and pair.target is not None
        if pair.source is not None or in_text:
            name = "target_language" if in_text else "source_language"
            raise ConfigError(f"languages refused: {name} is part of the source's tokens here; pass text, not ids")
        return replace(source, pair=LanguagePair(source.pair.source, pair.target))


def check_documents(sources: Sequence[Source | ReadDocument], options: DecodeOptions, prefixes: object) -> None:
    """Refuse several targets of a document, and a prefix of its own: only its sentences could have them."""
    reasons = []
    if options.num_return_sequences > 1:
        reasons.append(f"num_return_sequences must be 1 for a document, found {options.num_return_sequences}")
    if prefixes is not None:
        reasons.append("prefixes have no meaning for a document, which has several targets")
    if reasons and any(isinstance(source, ReadDocument) for source in sources):
        raise ConfigError(in_one_line("split refused", reasons))


def flattened(
    sources: Sequence[Source | ReadDocument], pairs: Sequence[LanguagePair]
) -> tuple[list[Source], list[LanguagePair]]:
    """Return all sources with the sentences of a document in its place, and the languages of each."""
    flat: list[Source] = []
    languages: list[LanguagePair] = []
    for source, pair in zip(sources, pairs, strict=True):
        rows: Sequence[Source] = source.sentences if isinstance(source, ReadDocument) else [source]
        flat += rows
        languages += [pair] * len(rows)
    return flat, languages


def joined(sources: Sequence[Source | ReadDocument], results: Sequence[Hypothesis]) -> list[Hypothesis]:
    """Return one result per source from those of ``flattened``."""
    rest = iter(results)
    return [
        source.joined([next(rest) for _ in source.sentences]) if isinstance(source, ReadDocument) else next(rest)
        for source in sources
    ]


def _warn_of_unknown(characters: Sequence[str]) -> None:
    more = f" and {len(characters) - MOST_NAMED} more" if len(characters) > MOST_NAMED else ""
    named = ", ".join(map(repr, characters[:MOST_NAMED]))
    log.warning("unknown characters are read as %s: %s%s", UNK, named, more)
