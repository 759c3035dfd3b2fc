"""Which engine runs a bundle: its target decides, here and nowhere else."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from fatdeploy.bundle import Bundle
from fatdeploy.errors import BundleReplaced, ConfigError
from fatdeploy.runtimes.decoding.sources import MostSources
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.targets import TARGETS, Provider


def opened_engine(
    bundle: Bundle,
    *,
    threads: int | None = None,
    spinning: bool = True,
    providers: Sequence[Provider] | None = None,
    cuda_graphs: bool = True,
) -> Engine[Any]:
    """Return the engine that a bundle was exported for; options that the engine does not use are refused.

    A folder that was replaced since the bundle was read is BundleReplaced: its graphs may be those of another model.
    """
    if bundle.manifest.output_matrix is not None:
        bundle.weights  # noqa: B018 - mapped now: later the path may lead to another bundle
    engine = _opened(bundle, threads, spinning, providers, cuda_graphs)
    try:
        bundle.check_unchanged()
    except BundleReplaced:
        engine.close()
        raise
    return engine


def _opened(
    bundle: Bundle, threads: int | None, spinning: bool, providers: Sequence[Provider] | None, cuda_graphs: bool
) -> Engine[Any]:
    record = TARGETS[bundle.manifest.target]
    if record.flavour is None:
        _check_unused(bundle, {"cuda_graphs": cuda_graphs is not True})
        providers = providers or record.providers
        return OrtEngine(bundle, OrtOptions(threads=threads, spinning=spinning, providers=providers))
    _check_unused(
        bundle,
        {"threads": threads is not None, "spinning": spinning is not True, "providers": bool(providers)},
    )
    # Imported here, so that a device without a GPU loads none of it.
    from fatdeploy.runtimes.engines.trt.cuda import opened_device
    from fatdeploy.runtimes.engines.trt.engine import TrtEngine

    return TrtEngine(bundle, opened_device(record.flavour), capture=cuda_graphs)


@runtime_checkable
class Limited(Protocol):
    """An engine that takes a limited number of sources at once."""

    def most_sources(self, length: int, rows_per_source: int) -> int:
        """Return the largest number of sources of at most ``length`` tokens."""
        ...


def most_sources_of(engine: Engine[Any]) -> MostSources | None:
    """Return the function that limits how many sources an engine takes at once; None if there is no limit."""
    return engine.most_sources if isinstance(engine, Limited) else None


def _check_unused(bundle: Bundle, options: dict[str, bool]) -> None:
    names = [name for name, is_set in options.items() if is_set]
    if names:
        raise ConfigError(
            f"{bundle.path} is for {bundle.manifest.target}, which has no use for {', '.join(names)}: leave it out"
        )
