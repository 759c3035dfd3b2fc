"""Which stored matrices are the source embedding, the target embedding and the output, and which are the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fatdeploy.export.models.hugging_face.weight_files import StoredTensors


@dataclass(frozen=True)
class EmbeddingNames:
    """The names of the three matrices; ``shared`` stands for all that a file does not have."""

    source: str
    target: str
    output: str
    shared: str | None = None

    def all(self) -> list[str]:
        """Return every name."""
        return [name for name in (self.source, self.target, self.output, self.shared) if name is not None]

    def stored(self, stored: StoredTensors, *, tied: bool) -> "EmbeddingNames":
        """Return where each matrix is stored; one that is nowhere keeps its own name, and is missed later.

        A file may have tied matrices once, under any name, or several times. Two that differ are two, whatever the
        configuration says: transformers reads them so.
        """
        shared = [] if self.shared is None else [self.shared]
        source = [self.source, *shared]
        target = [self.target, *shared]
        output = [self.output]
        if tied and self.shared is not None:
            source, target, output = ([*own, *shared, *self.all()] for own in (source, target, output))
        elif tied:
            target, output = [*target, self.output], [*output, self.target]
        names = (_first_stored(candidates, stored) for candidates in (source, target, output))
        return EmbeddingNames(*names)

    def ties(self, stored: StoredTensors) -> dict[str, Any]:
        """Return which of the matrices are the same, as values of ``ModelConfig``."""
        tie_embeddings = _same(self.source, self.target, stored)
        tie_output = _same(self.output, self.target, stored)
        return {"tie_embeddings": tie_embeddings, "tie_output": "yes" if tie_output else "no"}


def _first_stored(names: Sequence[str], stored: StoredTensors) -> str:
    return next((name for name in names if name in stored), names[0])


def _same(first: str, second: str, stored: StoredTensors) -> bool:
    if first == second:
        return True
    if first not in stored or second not in stored or stored[first].shape != stored[second].shape:
        return False
    matrices = stored[first].read(), stored[second].read()
    return matrices[0].dtype == matrices[1].dtype and torch.equal(*matrices)
