"""What the turns of several benchmarks read: where prepared models are, which engine decodes, and how much."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.harness.provenance import code_digest

EngineName = Literal["fatdeploy", "ctranslate2", "plain", "reference"]

# Precision without quantization, by our name and by CTranslate2's.
FP32, FLOAT32 = EXACT = "fp32", "float32"
FOLDERS: dict[EngineName, str] = {"fatdeploy": "bundle", "ctranslate2": "ctranslate2", "plain": "growing-caches"}
NEIGHBOURS = 4  # steps on either side of a position that are measured with it


@dataclass(frozen=True)
class ModelCache:
    """The prepared models and sources of a preset; the folder's name depends on the code that exports."""

    root: Path
    preset: str

    def model(self, engine: EngineName, precision: str = FP32) -> Path:
        """Return the folder that an engine loads; the reference loads none."""
        return self.folder / (FOLDERS[engine] if precision in EXACT else f"{FOLDERS[engine]}-{precision}")

    @property
    def folder(self) -> Path:
        return self.root / f"{self.preset}-{code_digest('fatdeploy', 'export')}"

    @property
    def bundle(self) -> Path:
        return self.model("fatdeploy")

    @property
    def ctranslate2(self) -> Path:
        return self.model("ctranslate2")

    def probe(self, batch: int, source: int, target: int) -> Path:
        """Return the file with sources and the reference's greedy tokens."""
        return self.folder / f"greedy-{batch}-{source}-{target}.npz"

    def beams(self, batch: int, beams: int, source: int, target: int) -> Path:
        """Return the file with sources and the reference's best targets, after one step and after all."""
        return self.folder / f"beams-{batch}-{beams}-{source}-{target}.npz"

    def forced(self, batch: int, source: int, target: int) -> Path:
        """Return the file with sources, decoder inputs, and the reference's choice after each input."""
        return self.folder / f"forced-{batch}-{source}-{target}.npz"


@dataclass(frozen=True, kw_only=True)
class DecodeSizes:
    """What all turns of a run have in common."""

    cache: str
    source: int
    target: int
    repetitions: int

    def models(self, preset: str) -> ModelCache:
        """Return where a preset's models and sources are."""
        return ModelCache(Path(self.cache), preset)


@dataclass(frozen=True, kw_only=True)
class EngineSetting:
    """Which engine decodes, and how."""

    preset: str
    engine: EngineName
    precision: str = FP32  # by the engine's own name for it
    batch: int
    threads: int
    workers: int = 1  # CTranslate2 splits the batch over them

    def model(self, models: ModelCache) -> Path | None:
        """Return the folder to load; None for the reference, which loads none."""
        return models.model(self.engine, self.precision) if self.engine in FOLDERS else None
