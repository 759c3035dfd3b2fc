"""What an application embeds: a bundle that is loaded once and decodes ids or text from any number of threads."""

import logging
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from fatdeploy.bundle import TOKENIZER, Bundle, read_bundle
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError
from fatdeploy.runtimes.decode import decode, wrong_source
from fatdeploy.runtimes.engine import Engine
from fatdeploy.runtimes.hypothesis import Hypothesis
from fatdeploy.runtimes.options import DecodeOptions
from fatdeploy.runtimes.ort import OrtEngine
from fatdeploy.runtimes.ort_sessions import Provider, onnxruntime_module
from fatdeploy.runtimes.text import Encoded, Tokenizer
from fatdeploy.spec import ModelSpec, Tokens

Source = str | Sequence[int] | Tokens

log = logging.getLogger("fatdeploy")


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    spinning: bool = True,
    providers: Sequence[Provider] = ("cpu",),
    check_hashes: bool = True,
) -> "Model":
    """Return the model in a bundle's folder.

    ``threads`` are one a core unless said. Threads that spin while they wait answer sooner and use the cores of
    others. A provider that is not here is an error, never another one in its place.
    """
    bundle = read_bundle(path, check_hashes=check_hashes)
    engine = OrtEngine(bundle, threads=threads, spinning=spinning, providers=providers)
    _warn_of_version(bundle, onnxruntime_module().__version__)
    return Model(bundle, engine)


class Model:
    """A bundle ready to decode. Threads may share it: each decode has a state of its own."""

    def __init__(self, bundle: Bundle, engine: Engine[Any]) -> None:
        self.bundle = bundle
        self._engine = engine
        self._tokenizer = _tokenizer_of(bundle)

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        return self.bundle.spec

    def generate(
        self, sources: Sequence[Source], options: DecodeOptions | None = None, *, truncate: bool = False
    ) -> list[Hypothesis]:
        """Return the best target of each source, a text or token ids; all are decoded together.

        A source that is longer than ``max_source`` is an error; with ``truncate`` it is cut, and ``dropped`` says by
        how much.
        """
        if isinstance(sources, str):
            raise ConfigError("generate takes a list of sources, found one text: pass [text]")
        given = [self._encoded(source) for source in sources]
        rows = [one.cut(self.spec.max_source) if truncate else one.ids for one in given]
        found = decode(self._engine, rows, options)
        dropped = [one.ids.size - row.size for one, row in zip(given, rows, strict=True)]
        if any(dropped):
            log.warning("sources cut to max_source = %d: tokens dropped %s", self.spec.max_source, dropped)
        return [
            replace(one, text=self._text(one), dropped=missing) for one, missing in zip(found, dropped, strict=True)
        ]

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

    def _encoded(self, source: Source) -> Encoded:
        if not isinstance(source, str):
            return Encoded(np.asarray(source))
        if TOKENIZER not in self.bundle.manifest.files:
            raise ConfigError(f"{self.bundle.path} has no {TOKENIZER}: pass token ids, not text (fatdeploy run --ids)")
        # Without the package there is none; asking again says what to install.
        tokenizer = self._tokenizer or Tokenizer(self.bundle.file(TOKENIZER))
        return tokenizer.encoded(source)

    def _text(self, one: Hypothesis) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.text(one.tokens)


def _tokenizer_of(bundle: Bundle) -> Tokenizer | None:
    """Return the tokenizer of a bundle that has one; ids need none, so a missing package is no error yet."""
    if TOKENIZER not in bundle.manifest.files:
        return None
    try:
        tokenizer = Tokenizer(bundle.file(TOKENIZER))
    except BackendUnavailable as error:
        log.info("%s", error)
        return None
    known, most = tokenizer.n_tokens, bundle.spec.vocab_size
    if known > most:
        raise BundleError(f"{bundle.file(TOKENIZER)} has {known} tokens, the model {most}: it is another model's")
    return tokenizer


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
