"""The matrices of a model by name, and the precision that each is to be stored in."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fatdeploy.errors import ConfigError
from fatdeploy.export.graph_files import read_structure
from fatdeploy.export.quantize.matrices import Scope, constant_array, lookups_of, products_of
from fatdeploy.export.quantize.recipe import MatrixPrecision
from fatdeploy.manifest import EMBEDDING
from fatdeploy.spec import ModelSpec

Graphs = Mapping[str, Path]


def table_sizes(spec: ModelSpec) -> frozenset[int]:
    """Return the numbers of rows of the tables that tokens are looked up in."""
    return frozenset((spec.vocab_size, spec.n_source_ids))


@dataclass(frozen=True)
class Matrix:
    """A matrix of one of the graphs: its name and its activation.

    ``tied`` says whether tokens are looked up in it too, ``shared`` whether other products read it.
    """

    part: str
    name: str
    activation: str
    tied: bool
    shared: bool = False


def tables_of(path: Path, spec: ModelSpec) -> list[NDArray[np.float32]]:
    """Return the tables [V, M] that a graph looks tokens up in."""
    scopes = list(Scope(read_structure(path).graph).inner())
    constants = {
        node.input[0]: scope.constant(node.input[0])
        for scope in scopes
        for node in lookups_of(scope, table_sizes(spec))
    }
    return [constant_array(constant, path.parent) for constant in constants.values() if constant is not None]


def pinned_names(names: Iterable[str], patterns: Mapping[str, MatrixPrecision]) -> frozenset[str]:
    """Return the matrices whose precision was chosen by name or pattern."""
    return frozenset(name for name in names for pattern in patterns if fnmatchcase(name, pattern))


def matrices_of(graphs: Graphs, spec: ModelSpec) -> list[Matrix]:
    """Return the matrices of both graphs in the order of computation."""
    matrices = []
    for part, path in graphs.items():
        graph = read_structure(path).graph
        tables = {node.input[0] for scope in Scope(graph).inner() for node in lookups_of(scope, table_sizes(spec))}
        products = products_of(graph)
        readers = Counter(product.weight.name for product in products)
        matrices += [
            Matrix(
                part,
                product.name,
                product.activation,
                tied=product.weight.name in tables,
                shared=readers[product.weight.name] > 1,
            )
            for product in products
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
