"""What an application embeds: a bundle, loaded once, that decodes ids or text from any number of threads."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, Literal

from fatdeploy.bundle import Bundle
from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.bulk.crews import Crews
from fatdeploy.runtimes.bulk.jobs import Job
from fatdeploy.runtimes.bulk.sharing import Sharing
from fatdeploy.runtimes.bulk.workers import Workers
from fatdeploy.runtimes.call_checks import check_call, check_list, check_shortlist, check_streamed
from fatdeploy.runtimes.closing import ClosedOnExit
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.options import OPTIONS, DecodeOptions
from fatdeploy.runtimes.decoding.prompts import PrefixIds, Prompt, check_count, prompts_of, reasons_against
from fatdeploy.runtimes.decoding.search import Task
from fatdeploy.runtimes.decoding.sources import CheckedSources, wrong_source
from fatdeploy.runtimes.decoding.stops import Stops, TextOf, text_of_result
from fatdeploy.runtimes.decoding.streaming import Deltas, Stream
from fatdeploy.runtimes.defaults import changed_options, check_names, default_options, within_room
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.shortlist.lists import SourceLists
from fatdeploy.runtimes.shortlist.table import read_table
from fatdeploy.runtimes.text.languages import (
    DEFAULT_PAIR,
    LanguageCodes,
    LanguagePair,
    checked_pairs,
    grouped_rows,
    named_prefix,
)
from fatdeploy.runtimes.text.prefixes import Prefix, check_reading_order, ids_of_prefix
from fatdeploy.runtimes.text.source_reader import (
    ReadDocument,
    ReadSource,
    Source,
    SourceReader,
    check_documents,
    flattened,
    joined,
)
from fatdeploy.spec import ModelSpec


class Model(ClosedOnExit):
    """A bundle ready to decode. Threads may share it: each decode has a state of its own.

    ``options`` are the bundle's defaults: how the model's authors decode, or greedy if the model came without settings.
    """

    def __init__(
        self, bundle: Bundle, engine: Engine[Any], crews: Crews | None = None, *, table: SourceLists | None = None
    ) -> None:
        """``table`` is what ``shortlist="auto"`` reads; the default is the bundle's own."""
        self.bundle = bundle
        self._engine, self._crews = engine, crews
        self._table = read_table(bundle) if table is None else table
        self._sharing = Sharing(engine, crews)
        self._reader = SourceReader(bundle)
        self._tokenizer = self._reader.tokenizer
        self.options = default_options(bundle)

    @property
    def spec(self) -> ModelSpec:
        """The contract of the model."""
        return self.bundle.spec

    def generate(
        self,
        sources: Sequence[Source | ReadDocument],
        options: DecodeOptions | None = None,
        *,
        prefixes: Sequence[Prefix | None] | None = None,
        truncate: bool = False,
        source_language: LanguageCodes = None,
        target_language: LanguageCodes = None,
        split: Literal["sentences"] | None = None,
        batch_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
        **changes: Any,
    ) -> list[Hypothesis]:
        """Return the best target of each source, a text or token ids; there may be any number of sources.

        Without ``options`` the bundle's own apply, and ``options`` replace them all. Further keywords are fields of
        DecodeOptions and change either: ``generate(sources, num_beams=1)``.

        ``prefixes`` begin the targets, one per source: text, token ids, or None for the prefix of the options. Sources
        whose prefixes differ in length are decoded together. ``source_language`` and ``target_language`` are codes, for
        all sources or one per source; ``inspect`` lists them. With ``split="sentences"`` each text is decoded sentence
        by sentence and has one result, in the lines of the text. A source longer than ``max_source`` is an error before
        anything is decoded; with ``truncate`` it is cut, and ``dropped`` says by how much. Sources of similar lengths
        are decoded together, longest first, in batches of at most ``batch_tokens`` positions, which changes no result.
        Hundreds of sources are shared by as many workers as pay, in batches as large as pays on this machine.
        ``progress`` is called with the number of sources that are complete, never from two threads at once. Sources
        that had not started when ``timeout_s`` ran out are ``cancelled`` without a token. Unknown characters are logged
        as one warning per call.
        """
        check_call(options, truncate, batch_tokens, progress, split)
        check_list(sources)
        options, _ = self._resolved(options, changes)
        deadline = None if options.timeout_s is None else monotonic() + options.timeout_s
        sources = list(sources)
        pairs = checked_pairs(self._reader.languages, len(sources), source_language, target_language)
        if split is not None:
            sources = [self._document(text, pair, truncate) for text, pair in zip(sources, pairs, strict=True)]
            pairs = [DEFAULT_PAIR] * len(sources)
        check_documents(sources, options, prefixes)
        flat, flat_pairs = flattened(sources, pairs)
        readable = self._reader.readable(flat, flat_pairs, truncate=truncate) if flat or not sources else []
        prompts = self._prompts(prefixes, readable, options)
        results = [Hypothesis((), "cancelled")] * len(readable)
        jobs = self._jobs(readable, prompts, options)
        engine, n_workers = self._sharing.shared_out(jobs, batch_tokens, hurried=deadline is not None)
        Workers(engine, jobs, results, deadline=deadline, progress=progress).run(n_workers)
        completed = [
            self._completed(result, source, options, prompt.prefix)
            for result, source, prompt in zip(results, readable, prompts, strict=True)
        ]
        return joined(sources, completed)

    def stream(
        self,
        source: Source,
        options: DecodeOptions | None = None,
        *,
        truncate: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
        **changes: Any,
    ) -> Stream:
        """Return the best target of one source in pieces, each as soon as it is certain: events to iterate over.

        Options are those of ``generate``. Beams cannot be streamed: a bundle that decodes with beams by default needs
        ``num_beams=1`` here.

        ``for`` and ``async for`` both work. A wrong source or option is an error here. Decoding starts when the first
        event is requested, and ``timeout_s`` counts from then. Models that write from right to left, or all tokens at
        once, send one event with everything at the end.
        """
        check_call(options, truncate)
        options, _ = self._resolved(options, changes)
        check_streamed(options)
        languages = self._reader.languages
        pairs = checked_pairs(languages, 1, source_language, target_language)
        [readable] = self._reader.readable([source], pairs, truncate=truncate)
        prefix = self._prompts(None, [readable], options)[0].prefix
        [(options, _)] = grouped_rows(languages, [readable.pair], options)
        return Stream(
            partial(self._decoding, [readable], [prefix], options),
            Deltas(options.stop, self._tokenizer),
            partial(self._completed, source=readable, options=options, prefix=prefix),
            in_reading_order=self.spec.decoding == "autoregressive" and self.spec.target_order == "left_to_right",
        )

    def options_with(self, options: DecodeOptions | None = None, **changes: Any) -> DecodeOptions:
        """Return what ``generate`` decodes with if it gets the same arguments.

        A default of the bundle that a change leaves without meaning is dropped: ``sample=False`` also drops the
        bundle's temperature. Nothing of ``options`` is dropped; a contradiction is an error.
        """
        if options is None:
            return changed_options(self.options, changes)
        check_names(changes)
        return replace(options, **changes)

    def refusal(
        self,
        source: Source,
        *,
        truncate: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> str:
        """Return why ``generate`` would refuse a source; empty if it would not."""
        [pair] = checked_pairs(self._reader.languages, 1, source_language, target_language)
        return wrong_source(self._reader.tokenized(source, pair, truncate=truncate).ids, self.spec)

    def read(
        self,
        source: Source,
        *,
        truncate: bool = False,
        prefix: Prefix | None = None,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> ReadSource:
        """Return a source in the form that ``generate`` and ``stream`` neither tokenise nor check again.

        A ``prefix`` belongs to the source: its targets begin with it. A source that they would refuse is a SpecMismatch
        whose message is the reason alone.
        """
        [pair] = checked_pairs(self._reader.languages, 1, source_language, target_language)
        tokenized = self._reader.tokenized(source, pair, truncate=truncate)
        if reason := wrong_source(tokenized.ids, self.spec):
            raise SpecMismatch(reason)
        if prefix is None:
            return tokenized
        ids = ids_of_prefix(prefix, self.spec, self._reader.needed_tokenizer)
        if reasons := reasons_against(ids, DecodeOptions(), self.spec):
            raise SpecMismatch("; ".join(reasons))
        return replace(tokenized, prefix=ids)

    def target_ids(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a target in reading order, without special tokens around it."""
        return self._reader.needed_tokenizer().plain_ids(text)

    def read_document(
        self,
        text: str,
        *,
        truncate: bool = False,
        source_language: str | None = None,
        target_language: str | None = None,
    ) -> ReadDocument:
        """Return a text cut into sentences: ``generate`` decodes them in its batches and joins their targets.

        Line breaks, empty lines and the blanks at the beginning of lines stay as they are.
        """
        [pair] = checked_pairs(self._reader.languages, 1, source_language, target_language)
        return self._document(text, pair, truncate)

    def close(self) -> None:
        """Close the engines; the model cannot be used afterwards."""
        if self._crews is not None:
            self._crews.close()
        self._engine.close()

    def _document(self, text: object, pair: LanguagePair, truncate: bool) -> ReadDocument:
        document = self._reader.document(text, pair, truncate=truncate)
        for sentence, row in zip(document.layout.sentences, document.sentences, strict=True):
            if reason := wrong_source(row.ids, self.spec):
                raise SpecMismatch(f"sentence {sentence[:40]!r}: {reason}")
        return document

    def _resolved(self, options: DecodeOptions | None, changes: dict[str, Any]) -> tuple[DecodeOptions, int]:
        """Return options whose prefix is tokens, and the limit of new tokens; refuse what the model cannot do."""
        stated = changes if options is None else OPTIONS
        options = self.options_with(options, **changes)
        check_shortlist(options, self.bundle, self._table)
        are_texts = {
            "prefix": isinstance(options.prefix, str),
            "stop": any(isinstance(stop, str) for stop in options.stop),
        }
        texts = [name for name, is_text in are_texts.items() if is_text]
        tokenizer = self._reader.needed_tokenizer() if texts else None
        if texts:
            check_reading_order(" and ".join(texts), self.spec)
        if tokenizer is not None and isinstance(options.prefix, str):
            options = replace(options, prefix=tokenizer.plain_ids(options.prefix))
        options = within_room(options, self.spec.max_target - len(options.prefix_ids), stated)
        return options, options.limit(self.spec)

    def _prompts(
        self, prefixes: Sequence[Prefix | None] | None, sources: Sequence[ReadSource], options: DecodeOptions
    ) -> list[Prompt]:
        """Return a prompt per source; a prefix that was read with its source is its own."""
        own: Sequence[PrefixIds | None] = [source.prefix for source in sources]
        if prefixes is not None:
            check_count(prefixes, len(sources))
            own = [
                None if prefix is None else ids_of_prefix(prefix, self.spec, self._reader.needed_tokenizer)
                for prefix in prefixes
            ]
        named = [
            named_prefix(self._reader.languages, source.pair, prefix, options)
            for source, prefix in zip(sources, own, strict=True)
        ]
        return prompts_of(options, self.spec, named, len(sources))

    def _jobs(self, sources: Sequence[ReadSource], prompts: Sequence[Prompt], options: DecodeOptions) -> list[Job]:
        """Return the sources that may decode together, with the options of their language."""
        jobs = []
        for own, rows in grouped_rows(self._reader.languages, [source.pair for source in sources], options):
            begins, prefixes = [prompts[row] for row in rows], [prompts[row].prefix for row in rows]
            if own is not options:  # a language may have its own first token
                begins = prompts_of(own, self.spec, prefixes, len(rows))
            ids, stops = [sources[row].ids for row in rows], Stops(own, self._text_of, prefixes)
            jobs.append(Job(Task(own, self.spec, ids, begins, stops, self._table), rows))
        return jobs

    def _decoding(
        self,
        sources: Sequence[ReadSource],
        prefixes: Sequence[PrefixIds],
        options: DecodeOptions,
        deadline: float | None = None,
    ) -> Decoding:
        checked = CheckedSources([source.ids for source in sources])
        return Decoding(
            self._engine,
            checked,
            options,
            prefixes=prefixes,
            deadline=deadline,
            text_of=self._text_of,
            table=self._table,
        )

    @property
    def _text_of(self) -> TextOf | None:
        return None if self._tokenizer is None else self._tokenizer.text

    def _completed(
        self, result: Hypothesis, source: ReadSource, options: DecodeOptions, prefix: PrefixIds
    ) -> Hypothesis:
        """Return a result, and its alternatives, with their text and the number of tokens cut from the source."""
        if self._tokenizer is None and not source.dropped:
            return result
        alternatives = tuple(
            self._completed(alternative, source, options, prefix) for alternative in result.alternatives
        )
        text = None if self._text_of is None else text_of_result(self._text_of, result, options.stop, prefix)
        return replace(result, text=text, dropped=source.dropped, alternatives=alternatives)
