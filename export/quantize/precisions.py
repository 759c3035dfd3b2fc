"""The matrices of a model by name, and the precision that each is to be stored in."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fatdeploy.errors import ConfigError
from fatdeploy.export.graph_files import read_structure
from fatdeploy.export.quantize.matrices import Scope, lookups_of, products_of
from fatdeploy.export.quantize.recipe import MatrixPrecision
from fatdeploy.manifest import EMBEDDING
from fatdeploy.spec import ModelSpec

Graphs = Mapping[str, Path]


def table_sizes(spec: ModelSpec) -> frozenset[int]:
    """Return the numbers of rows of the tables that tokens are looked up in."""
    return frozenset((spec.vocab_size, spec.n_source_ids))


@dataclass(frozen=True)
class Matrix:
    """A matrix of one of the graphs: its name, its activation, and whether tokens are looked up in it too."""

    part: str
    name: str
    activation: str
    tied: bool


def matrices_of(graphs: Graphs, spec: ModelSpec) -> list[Matrix]:
    """Return the matrices of both graphs in the order of computation."""
    matrices = []
    for part, path in graphs.items():
        graph = read_structure(path).graph
        tables = {node.input[0] for scope in Scope(graph).inner() for node in lookups_of(scope, table_sizes(spec))}
        matrices += [
            Matrix(part, product.name, product.activation, product.weight.name in tables)
            for product in products_of(graph)
        ]
    return matrices


def precisions_of(
    matrices: Sequence[Matrix], default: MatrixPrecision, patterns: Mapping[str, MatrixPrecision]
) -> dict[str, MatrixPrecision]:
    """Return the precision of every matrix and of the embedding; a pattern that matches nothing is refused."""
    names = [*(matrix.name for matrix in matrices), EMBEDDING]
    precisions: dict[str, MatrixPrecision] = dict.fromkeys(names, default)
    chosen: set[str] = set()
    unknown = []
    for pattern, precision in patterns.items():
        matching = [name for name in names if fnmatchcase(name, pattern)]
        if not matching:
            unknown.append(pattern)
        precisions |= dict.fromkeys(matching, precision)
        chosen |= set(matching)
    if unknown:
        raise ConfigError(
            f"--precision-of names nothing of this model: {', '.join(unknown)}. There are {', '.join(names)}"
        )
    tied = next((matrix.name for matrix in matrices if matrix.tied), None)
    if tied is not None:
        if EMBEDDING in chosen and precisions[EMBEDDING] != precisions[tied]:
            raise ConfigError(
                f"the embedding is the matrix {tied}, which is stored once: give both the same precision, "
                f"found {precisions[EMBEDDING]} and {precisions[tied]}"
            )
        precisions[EMBEDDING] = precisions[tied]
    return precisions
