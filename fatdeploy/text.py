"""How a bundle reads and writes text, as its manifest says it: the tokenizer's kind and files, and its languages."""

from dataclasses import dataclass, field
from typing import Literal

# ``tokenizer_json`` needs the tokenizers package, ``sentencepiece`` the package of that name, ``bytes`` none.
TextKind = Literal["tokenizer_json", "sentencepiece", "bytes"]

# Names in the bundle: the model that cuts sources, the one that cuts targets, and the ids of their pieces.
SOURCE_PIECES, TARGET_PIECES = "source.spm", "target.spm"
VOCABULARY, TARGET_VOCABULARY = "vocab.json", "target_vocab.json"


@dataclass(frozen=True)
class AddedToken:
    """A token that a text can spell; it may take the blanks around it."""

    id: int
    left: bool = False
    right: bool = False


@dataclass(frozen=True)
class Languages:
    """The languages of a model and the ids of their tokens.

    ``source`` says where a source names its language: before its text, after the token that ends it, or nowhere.
    ``target`` says how the language of a target is chosen: it is the first token after the start (``forced_bos``), the
    start itself, or a ``marker`` at the beginning of the source's text: ``>>fra<<``. The defaults count where a caller
    names none; without a default for the target, the caller must.
    """

    ids: dict[str, int]
    source: Literal["prefix", "suffix", "none"]
    target: Literal["forced_bos", "start", "marker"]
    end_id: int
    default_source: str | None = None
    default_target: str | None = None

    def __post_init__(self) -> None:
        for name, code in (("default_source", self.default_source), ("default_target", self.default_target)):
            if code is not None and code not in self.ids:
                raise ValueError(f"{name} must be one of the languages, found {code!r}")

    @property
    def needs_target(self) -> bool:
        """Whether a caller must name the language of a target; a single one needs no name."""
        return self.default_target is None and len(self.ids) > 1


@dataclass(frozen=True)
class Conversion:
    """A tokenizer.json that was made from another format: how many texts were compared, and how many differ."""

    texts: int
    different_ids: int
    different_texts: int


@dataclass(frozen=True)
class TextRecord:
    """What turns text into tokens and back.

    ``clean_up`` removes blanks before punctuation from targets. The other values are for the kinds that have no
    tokenizer.json: ``special`` tokens are not written, ``added`` tokens are recognised in texts, ``before`` and
    ``after`` surround every source, ``unk_id`` stands for unknown pieces, and ``markers`` are codes such as ``>>fra<<``
    at the beginning of a source, which are one token.
    """

    kind: TextKind
    files: tuple[str, ...]
    clean_up: bool = False
    special: tuple[int, ...] = ()
    added: dict[str, AddedToken] = field(default_factory=dict)
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    unk_id: int | None = None
    markers: bool = False
    languages: Languages | None = None
    conversion: Conversion | None = None

    def __post_init__(self) -> None:
        if (self.unk_id is None) == (self.kind == "sentencepiece"):
            raise ValueError(f"sentencepiece has an unk_id and no other kind has, found {self.kind} and {self.unk_id}")
