"""Which models are compared, at which lengths, and where they are kept. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.provenance import code_digest

FamilyPart = Literal["decoder", "encoder"]

DECODERS = ("fat-base", "transformer-base", "at-base")
# Values of every encoder attention that is compared, beside those of its layers' sizes.
ENCODERS: dict[str, dict[str, Any]] = {
    "scaled_dot": {},
    "additive": {"encoder_attention": "additive"},
    "slow": {"encoder_attention": "slow"},
    "local": {"encoder_attention": "local"},
    "strided": {"encoder_attention": "strided"},
    "global_tokens": {"encoder_attention": "global_tokens"},
    "linformer": {"encoder_attention": "linformer"},
    "compressed": {"encoder_attention": "compressed"},
    "linear, elu": {"encoder_attention": "linear", "features": "elu"},
    "linear, softmax": {"encoder_attention": "linear", "features": "softmax"},
    "linear, random": {"encoder_attention": "linear", "features": "random"},
    "linear, performer": {"encoder_attention": "linear", "features": "performer"},
    "synthesizer, random": {"encoder_attention": "synthesizer", "synthesizer": "random"},
    "synthesizer, dense": {"encoder_attention": "synthesizer", "synthesizer": "dense"},
    "lstm": {"encoder_attention": "lstm"},
    "gru": {"encoder_attention": "gru"},
}
# Three layers of the width of the small presets; the decoder is not run.
ENCODER_PRESET = "transformer-small"


@dataclass(frozen=True, kw_only=True)
class FamilyTurn:
    """Which model is timed: a preset's decoder on a batch, or an encoder on one source."""

    part: FamilyPart
    model: str
    batch: int
    threads: int


@dataclass(frozen=True, kw_only=True)
class FamilySizes:
    """What all turns of a run share."""

    cache: str
    source: int  # tokens of each source whose target is decoded
    targets: tuple[int, ...]  # lengths of targets, ascending
    sources: tuple[int, ...]  # lengths of sources that are only encoded, ascending
    repetitions: int  # of an encode

    def folder(self, part: FamilyPart, model: str) -> Path:
        """Return the folder of a model's graphs; its name depends on the code that exports."""
        longest = max(self.targets if part == "decoder" else self.sources)
        name = model.replace(", ", "-")
        return Path(self.cache) / f"{part}-{name}-{longest}-{code_digest('fatdeploy', 'export')}"
