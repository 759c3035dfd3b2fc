"""Which engine runs a bundle: its target says so, here and nowhere else."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from fatdeploy.bundle import Bundle
from fatdeploy.errors import ConfigError
from fatdeploy.runtimes.decoding.sources import MostSources
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
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
    """Return the engine that a bundle was exported for; an option that it has no use for is refused."""
    record = TARGETS[bundle.manifest.target]
    if record.flavour is None:
        _check_unused(bundle, {"cuda_graphs": cuda_graphs is not True})
        return OrtEngine(bundle, threads=threads, spinning=spinning, providers=providers or record.providers)
    _check_unused(
        bundle,
        {"threads": threads is not None, "spinning": spinning is not True, "providers": bool(providers)},
    )
    # Here, so that a device without a GPU loads none of it.
    from fatdeploy.runtimes.engines.trt.cuda import opened_device
    from fatdeploy.runtimes.engines.trt.engine import TrtEngine

    return TrtEngine(bundle, opened_device(record.flavour), capture=cuda_graphs)


@runtime_checkable
class Limited(Protocol):
    """An engine that takes only so many sources at once."""

    def most_sources(self, length: int, rows_per_source: int) -> int:
        """Return how many of at most some length."""
        ...


def most_sources_of(engine: Engine[Any]) -> MostSources | None:
    """Return how many sources an engine takes at once, if it takes only so many."""
    return engine.most_sources if isinstance(engine, Limited) else None


def _check_unused(bundle: Bundle, given: dict[str, bool]) -> None:
    named = [name for name, was_given in given.items() if was_given]
    if named:
        raise ConfigError(
            f"{bundle.path} is for {bundle.manifest.target}, which has no use for {', '.join(named)}: leave it out"
        )
