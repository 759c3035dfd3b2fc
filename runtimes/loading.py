"""From a folder to a model: reads the bundle, opens its engine, and starts again if another bundle took its place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fatdeploy.bundle import ATTEMPTS, Bundle, bundle_replaced, read_bundle
from fatdeploy.errors import FatdeployError
from fatdeploy.runtimes.bulk.sharing import crews_of
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.model import Model
from fatdeploy.runtimes.proof.versions import prove_version
from fatdeploy.targets import TARGETS, Provider


def load(
    path: str | Path,
    *,
    threads: int | None = None,
    spinning: bool = True,
    providers: Sequence[Provider] | None = None,
    cuda_graphs: bool = True,
    check_hashes: bool = True,
) -> Model:
    """Return the model in a bundle's folder, on the engine that it was exported for.

    ``threads``, ``spinning`` and ``providers`` are for onnxruntime. The default is one thread per core. Threads that
    spin while they wait respond sooner, but keep cores busy. The default providers are those that the bundle was
    exported for; a missing one is an error, never a silent fallback. ``cuda_graphs`` is for TensorRT: steps are
    recorded once and replayed.
    """
    shared: dict[str, Any] = {"threads": threads, "spinning": spinning, "providers": providers}
    for _ in range(ATTEMPTS):
        bundle = read_bundle(path, check_hashes=check_hashes)
        try:
            return _opened_model(bundle, opened_engine(bundle, cuda_graphs=cuda_graphs, **shared), shared)
        except FatdeployError as error:
            # Files are opened by name after they were checked, and the names may have come to another bundle's files.
            if bundle.is_unchanged:
                raise
            reason = error
    raise bundle_replaced(bundle.path) from reason


def _opened_model(bundle: Bundle, engine: Engine[Any], shared: dict[str, Any]) -> Model:
    """Return the model of an engine, which is closed if the bundle cannot be used."""
    try:
        if TARGETS[bundle.manifest.target].engine == "onnxruntime":
            prove_version(bundle, engine, onnxruntime_module().__version__)
        model = Model(bundle, engine, crews_of(bundle, engine, **shared))
        bundle.check_unchanged()
    except BaseException:
        engine.close()
        raise
    return model
