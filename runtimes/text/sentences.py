"""Long texts: cut into sentences by rules, and put together again from their translations. No model, no package."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

# What ends a sentence wherever it stands; the other stops need a blank after them.
_WIDE_STOPS = "。！？｡"
_STOPS = ".!?…‽؟۔।॥։"
# Quotes and brackets that belong to the sentence which they close.
_CLOSERS = "\"'”’»›)]}）］｝」』】》〉〕"
_OPENERS = "\"'“‘«‹([{（［｛「『【《〈〔¿¡„‚"
_CLOSED = f"[{re.escape(_CLOSERS)}]*"
_END = re.compile(rf"[{_WIDE_STOPS}][{_STOPS}{_WIDE_STOPS}]*{_CLOSED}|[{_STOPS}]+{_CLOSED}(?=\s)")

# Before a full stop these are not the last word of a sentence. Without their own full stop, in lower case. A name or
# anything else may follow the first ones within the sentence; the others end it before a capital letter.
_BEFORE_NAMES = """
mr mrs ms dr prof st mt gen col lt capt sgt maj cmdr gov sen rep hon pres vgl mme mlle sig dott ing sra srta ud
vs e.g i.e z.b d.h cf ca approx
"""
_OTHER_ABBREVIATIONS = """
sr jr etc al dept est pp ed eds rev inc ltd corp co bros jan feb mar apr jun jul aug sep sept oct nov dec mon tue wed
thu fri sat sun u.s u.k a.m p.m ph.d u.a usw bzw str hrsg sog evtl ggf inkl av env ex p uds
no nos fig figs eq eqs vol vols nr bd art abs núm pág
"""
# A number with a full stop before a German month is a date.
_MONTH_NAMES = "Januar Februar März April Mai Juni Juli August September Oktober November Dezember"
_NAMES_FOLLOW = frozenset(_BEFORE_NAMES.split())
_ABBREVIATIONS = _NAMES_FOLLOW.union(_OTHER_ABBREVIATIONS.split())
_MONTHS = tuple(_MONTH_NAMES.split())
_SCRIPTS_WITHOUT_BLANKS = re.compile(r"[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uff60]")


@dataclass(frozen=True)
class SplitText:
    """A text as sentences and what stands around them: one part more than sentences, in the order of the text.

    A part inside a line is the blanks between two sentences; a part that begins or ends a line has the line's breaks
    and leading blanks, which every translation keeps.
    """

    sentences: tuple[str, ...]
    around: tuple[str, ...]

    def joined(self, translations: Sequence[str]) -> str:
        """Return the translations in the layout of the text.

        Sentences of one line are separated by a blank, whatever the source has between them; there is none before or
        after Chinese and Japanese characters.
        """
        parts = [self.around[0]]
        for index, translation in enumerate(translations):
            space = self.around[index + 1]
            is_last = index + 1 == len(translations)
            if not is_last and not _breaks(space):
                space = _between(translation, translations[index + 1])
            parts += [translation, space]
        return "".join(parts)


def split_sentences(text: str) -> SplitText:
    """Return the sentences of a text, each without blanks around it."""
    sentences, around, end = [], [], 0
    for start, stop in _spans(text):
        sentences.append(text[start:stop])
        around.append(text[end:start])
        end = stop
    return SplitText(tuple(sentences), (*around, text[end:]))


def _spans(text: str) -> Iterator[tuple[int, int]]:
    """Yield where each sentence begins and ends."""
    start = 0
    for line in text.splitlines(keepends=True):
        ends = [
            start,
            *(start + match.end() for match in _END.finditer(line) if _is_end(line, match)),
            start + len(line),
        ]
        for first, last in pairwise(ends):
            part = text[first:last]
            if part.strip():
                yield first + len(part) - len(part.lstrip()), first + len(part.rstrip())
        start += len(line)


def _is_end(line: str, match: re.Match[str]) -> bool:
    """Return whether a sentence ends at a stop: the words on both sides decide about a full stop."""
    if match[0][0] in _WIDE_STOPS:
        return True
    words, following = line[: match.start()].split(), line[match.end() :].lstrip().lstrip(_OPENERS)
    if not words or not following or following[0].islower():
        # "Really?" he said: a sentence goes on in lower case.
        return bool(words) and not following
    if match[0].rstrip(_CLOSERS) != ".":
        return True
    word = words[-1].lstrip(_OPENERS)
    if word.isdigit():
        # The number of a list's entry, or a date.
        return len(words) > 1 and not following.startswith(_MONTHS)
    return not _is_short_form(word, following)


def _is_short_form(word: str, following: str) -> bool:
    """Return whether a word's full stop means that letters are missing, before a word that is not in lower case."""
    if word.lower() in _ABBREVIATIONS:
        return word.lower() in _NAMES_FOLLOW or not following[0].isupper()
    # Initials, and z. B. with its blank; but a single small letter is a word: plan b.
    is_initial = re.fullmatch(r"[^\W\d_](\.[^\W\d_])*", word) is not None
    return is_initial and (word[0].isupper() or re.match(r"[^\W\d_]\.", following) is not None)


def _breaks(space: str) -> bool:
    return len(space.splitlines(keepends=True)) > 1 or space != "".join(space.splitlines())


def _between(left: str, right: str) -> str:
    """Return what stands between two sentences of a line."""
    if not left or not right:
        return ""
    wide = _SCRIPTS_WITHOUT_BLANKS
    return "" if wide.fullmatch(left[-1]) or wide.fullmatch(right[0]) else " "
