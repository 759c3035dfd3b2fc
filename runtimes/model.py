"""What an application embeds: a bundle that is loaded once and decodes ids or text from any number of threads."""

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError, in_one_line
from fatdeploy.manifest import TOKENIZER
from fatdeploy.runtimes.decoding.deltas import Deltas
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding, check_sources, row_of, wrong_source
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.decoding.sources import batches_of
from fatdeploy.runtimes.decoding.stops import cut_text
from fatdeploy.runtimes.decoding.streaming import Stream
from fatdeploy.runtimes.engines.opening import most_sources_of, opened_engine
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.text.tokenizer import Encoded, Tokenizer, tokenizer_from_file
from fatdeploy.runtimes.text.tokenizer_json import UNK
from fatdeploy.spec import ModelSpec, Tokens
from fatdeploy.targets import TARGETS, Provider

Source = str | Sequence[int] | Tokens

# Positions of sources and targets that are decoded at once unless said: much more is not faster, and takes memory.
BATCH_TOKENS = 8192

DEFAULT_OPTIONS = DecodeOptions()

# Unknown characters that a warning names; the others are counted.
MOST_NAMED = 10

log = logging.getLogger("fatdeploy")


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    spinning: bool = True,
    providers: Sequence[Provider] | None = None,
    cuda_graphs: bool = True,
    check_hashes: bool = True,
) -> "Model":
    """Return the model in a bundle's folder, on what it was exported for.

    ``threads`` are one a core unless said. Threads that spin while they wait answer sooner and use the cores of
    others. ``providers`` are those that the bundle was exported for unless said; one that is not here is an error,
    never another one in its place. These are onnxruntime's; TensorRT's is ``cuda_graphs``: whether steps are recorded
    and replayed.
    """
    bundle = read_bundle(path, check_hashes=check_hashes)
    engine = opened_engine(bundle, threads=threads, spinning=spinning, providers=providers, cuda_graphs=cuda_graphs)
    if TARGETS[bundle.manifest.target].engine == "onnxruntime":
        _warn_of_version(bundle, onnxruntime_module().__version__)
    return Model(bundle, engine)


class Model:
    """A bundle ready to decode. Threads may share it: each decode has a state of its own."""

    def __init__(self, bundle: Bundle, engine: Engine[Any]) -> None:
        self.bundle = bundle
        self._engine = engine
        self._most_sources = most_sources_of(engine)
        self._tokenizer = _tokenizer_of(bundle)

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        return self.bundle.spec

    def generate(
        self,
        sources: Sequence[Source],
        options: DecodeOptions | None = None,
        *,
        truncate: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        progress: Callable[[int], None] | None = None,
    ) -> list[Hypothesis]:
        """Return the best target of each source, a text or token ids; there may be any number of them.

        A source that is longer than ``max_source`` is an error, before anything is decoded; with ``truncate`` it is
        cut, and ``dropped`` says by how much. Sources of similar lengths are decoded together, the longest first: at
        most ``batch_tokens`` positions, which changes no result. ``progress`` is told after each batch how many sources
        it had. Those whose batch was not begun when ``timeout_s`` was over are ``cancelled`` without a token. A warning
        is logged of characters that the tokenizer does not know, once a call.
        """
        _check_call(options, truncate, batch_tokens, progress)
        _check_list(sources)
        options, limit = self._asked(options)
        deadline = None if options.timeout_s is None else monotonic() + options.timeout_s
        given = self._given(sources, truncate)
        found = [Hypothesis((), "cancelled")] * len(given)
        positions = len(options.prefix_ids) + limit
        lengths = [len(one.ids) for one in given]
        each = options.rows_per_source(self.spec)
        for batch in batches_of(lengths, each, positions, batch_tokens, self._most_sources):
            if deadline is not None and monotonic() >= deadline:
                break
            decoded = self._decoded([given[index].ids for index in batch], options, deadline)
            for index, one in zip(batch, decoded, strict=True):
                found[index] = one
            if progress is not None:
                progress(len(batch))
        return [self._completed(one, source, options) for one, source in zip(found, given, strict=True)]

    def stream(self, source: Source, options: DecodeOptions | None = None, *, truncate: bool = False) -> Stream:
        """Return the best target of one source in pieces, each as soon as it is certain: events to iterate over.

        ``for`` and ``async for`` both work. What is wrong with the source or the options is an error here; nothing is
        decoded before the first event is asked for, and ``timeout_s`` counts from then. Models that write from right to
        left, or all tokens at once, have nothing to tell in reading order before the end: one event tells everything.
        """
        _check_call(options, truncate)
        options, _ = self._asked(options)
        _check_streamed(options)
        [given] = self._given([source], truncate)
        return Stream(
            partial(self._decoding, [given.ids], options),
            Deltas(options.stop, self._tokenizer),
            partial(self._completed, given=given, options=options),
            in_reading_order=self.spec.decoding == "autoregressive" and self.spec.target_order == "left_to_right",
        )

    def refusal(self, source: Source, *, truncate: bool = False) -> str:
        """Return why ``generate`` would refuse a source; empty if it would not."""
        given = self._encoded(source)
        return wrong_source(given.cut(self.spec.max_source) if truncate else given.ids, self.spec)

    def close(self) -> None:
        """Give the engine back; the model cannot be used afterwards."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _asked(self, options: DecodeOptions | None) -> tuple[DecodeOptions, int]:
        """Return options whose prefix is tokens, and the most new tokens; refuse what the model cannot do."""
        options = options or DEFAULT_OPTIONS
        texts = {"prefix": isinstance(options.prefix, str), "stop": any(isinstance(one, str) for one in options.stop)}
        named = [name for name, is_text in texts.items() if is_text]
        tokenizer = self._needed_tokenizer() if named else None
        if named and self.spec.target_order == "right_to_left":
            raise ConfigError(
                f"{' and '.join(named)} refused: this model writes from right to left, a text is read from left to "
                "right; pass token ids in the order of generation"
            )
        if tokenizer is not None and isinstance(options.prefix, str):
            options = replace(options, prefix=tokenizer.plain_ids(options.prefix))
        return options, options.limit(self.spec)

    def _given(self, sources: Sequence[Source], truncate: bool) -> list["Given"]:
        """Return the tokens of sources that the model can read, cut where that is wanted."""
        encoded = [self._encoded(source) for source in sources]
        # Copies: a stream reads them later, and they are the caller's.
        rows = [np.array(one.cut(self.spec.max_source) if truncate else one.ids) for one in encoded]
        check_sources(rows, self.spec)
        dropped = [one.ids.size - row.size for one, row in zip(encoded, rows, strict=True)]
        if any(dropped):
            log.warning("sources cut to max_source = %d: tokens dropped %s", self.spec.max_source, dropped)
        if unknown := list(dict.fromkeys(character for one in encoded for character in one.unknown)):
            _warn_of_unknown(unknown)
        return [Given(row, missing) for row, missing in zip(rows, dropped, strict=True)]

    def _decoding(
        self, rows: Sequence[NDArray[np.generic]], options: DecodeOptions, deadline: float | None = None
    ) -> Decoding:
        text_of = None if self._tokenizer is None else self._tokenizer.text
        return Decoding(self._engine, rows, options, deadline=deadline, text_of=text_of)

    def _decoded(
        self, rows: Sequence[NDArray[np.generic]], options: DecodeOptions, deadline: float | None
    ) -> list[Hypothesis]:
        with self._decoding(rows, options, deadline) as decoding:
            while decoding.advance():
                pass
            return decoding.found()

    def _completed(self, found: Hypothesis, given: "Given", options: DecodeOptions) -> Hypothesis:
        """Return a result, and its alternatives, with text and what is missing of the source."""
        if self._tokenizer is None and not given.dropped:
            return found
        others = tuple(self._completed(one, given, options) for one in found.alternatives)
        return replace(found, text=self._text(found, options), dropped=given.dropped, alternatives=others)

    def _text(self, found: Hypothesis, options: DecodeOptions) -> str | None:
        if self._tokenizer is None:
            return None
        text = self._tokenizer.text(found.tokens)
        if found.finish != "stop":
            return text
        stops = [one for one in options.stop if isinstance(one, str)]
        return cut_text(text, stops, len(self._tokenizer.text(options.prefix_ids)))

    def _encoded(self, source: Source) -> Encoded:
        return self._needed_tokenizer().encoded(source) if isinstance(source, str) else Encoded(row_of(source))

    def _needed_tokenizer(self) -> Tokenizer:
        if TOKENIZER not in self.bundle.manifest.files:
            raise ConfigError(f"{self.bundle.path} has no {TOKENIZER}: pass token ids, not text (fatdeploy run --ids)")
        # Without the package there may be none; asking again says what to install.
        return self._tokenizer or tokenizer_from_file(self.bundle.file(TOKENIZER))


class Given(NamedTuple):
    """The tokens of a source, and how many were cut off."""

    ids: NDArray[np.generic]
    dropped: int


def _check_list(sources: object) -> None:
    if isinstance(sources, str):
        raise ConfigError("generate takes a list of sources, found one text: pass [text]")
    if not isinstance(sources, Iterable):
        raise ConfigError(f"generate takes a list of sources, found {sources!r}")


def _check_call(options: object, truncate: object, batch_tokens: object = 1, progress: object = None) -> None:
    """Raise, with every reason, unless the arguments are what their names say."""
    reasons = []
    if not isinstance(options, DecodeOptions | None):
        reasons.append(f"options must be DecodeOptions, found {options!r}")
    if not isinstance(truncate, bool):
        reasons.append(f"truncate must be True or False, found {truncate!r}")
    if isinstance(batch_tokens, bool) or not isinstance(batch_tokens, int) or batch_tokens < 1:
        reasons.append(f"batch_tokens must be a whole number from 1 up, found {batch_tokens!r}")
    if progress is not None and not callable(progress):
        reasons.append(f"progress must be a function of a number, found {progress!r}")
    if reasons:
        raise ConfigError(in_one_line("call refused", reasons))


def _check_streamed(options: DecodeOptions) -> None:
    wrong = [
        f"{name} = {value}"
        for name, value in {
            "num_beams": options.num_beams,
            "num_return_sequences": options.num_return_sequences,
        }.items()
        if value > 1
    ]
    if wrong:
        raise ConfigError(
            f"stream refused: it goes with num_beams = 1 and num_return_sequences = 1, found {', '.join(wrong)}; beams "
            "change what was said before, use generate for them"
        )


def _tokenizer_of(bundle: Bundle) -> Tokenizer | None:
    """Return the tokenizer of a bundle that has one; ids need none, so a missing package is no error yet."""
    if TOKENIZER not in bundle.manifest.files:
        return None
    try:
        tokenizer = tokenizer_from_file(bundle.file(TOKENIZER))
    except BackendUnavailable as error:
        log.info("%s", error)
        return None
    known, most = tokenizer.n_tokens, bundle.spec.vocab_size
    if known > most:
        raise BundleError(f"{bundle.file(TOKENIZER)} has {known} tokens, the model {most}: it is another model's")
    return tokenizer


def _warn_of_unknown(characters: Sequence[str]) -> None:
    more = f" and {len(characters) - MOST_NAMED} more" if len(characters) > MOST_NAMED else ""
    named = ", ".join(map(repr, characters[:MOST_NAMED]))
    log.warning("characters that the tokenizer does not know are read as %s: %s%s", UNK, named, more)


def _warn_of_version(bundle: Bundle, version: str) -> None:
    if bundle.manifest.onnxruntime is None:
        return
    oldest, newest = bundle.manifest.onnxruntime
    if not _release(oldest) <= _release(version) <= _release(newest):
        log.warning(
            "%s was verified with onnxruntime %s to %s, this is %s: fatdeploy verify %s",
            *(bundle.path, oldest, newest, version, bundle.path),
        )


def _release(version: str) -> list[int]:
    """Return the numbers that a version begins with."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return [int(number) for number in numbers[0].split(".")] if numbers else []
