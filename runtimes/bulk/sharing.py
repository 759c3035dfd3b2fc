"""How the jobs of a call are cut into batches, and who decodes them."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from fatdeploy.bundle import Bundle
from fatdeploy.machine import usable_cores
from fatdeploy.runtimes.bulk.crews import Crews
from fatdeploy.runtimes.bulk.jobs import Job
from fatdeploy.runtimes.engines.opening import most_sources_of, opened_engine
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.targets import TARGETS, Provider

# Default number of positions, of sources and targets, in one batch: many more are not faster, and take memory.
BATCH_TOKENS = 8192
# The same for a crew, whose rows are limited too. Memory is used as targets grow, and most are much shorter than the
# positions that are reserved for them.
BULK_TOKENS = 4 * BATCH_TOKENS


def crews_of(
    bundle: Bundle,
    engine: Engine[Any],
    *,
    threads: int | None,
    spinning: bool,
    providers: Sequence[Provider] | None,
) -> Crews | None:
    """Return the crews for a bundle on a CPU; None elsewhere: a GPU runs a batch at a time."""
    record = TARGETS[bundle.manifest.target]
    if record.engine != "onnxruntime" or list(providers or record.providers) != ["cpu"]:
        return None
    threads = threads or usable_cores()
    opened = partial(opened_engine, bundle, threads=1, spinning=spinning, providers=providers)
    return Crews(engine, threads, opened, f"{bundle.digest}|onnxruntime {onnxruntime_module().__version__}|{threads}")


class Sharing:
    """Cuts jobs into batches: for a crew if there are many sources, otherwise for the engine alone."""

    def __init__(self, engine: Engine[Any], crews: Crews | None) -> None:
        self._engine, self._crews, self._most_sources = engine, crews, most_sources_of(engine)

    def shared_out(self, jobs: Sequence[Job], batch_tokens: int | None, *, hurried: bool) -> tuple[Engine[Any], int]:
        """Return the engine that decodes the jobs, now cut into batches, and the number of workers that share it.

        A call in a hurry does not wait for a measurement.
        """
        crew = None
        # A caller's own processors may count on being called by one thread.
        if self._crews is not None and not any(job.task.options.processors for job in jobs):
            crew = self._crews.crew_for(sum(job.n_rows for job in jobs), hurried=hurried)
        for job in jobs:
            if crew is None:
                job.cut(batch_tokens or BATCH_TOKENS, self._most_sources)
            else:
                job.share_out(crew.engine, batch_tokens or BULK_TOKENS, crew.rows, crew.workers)
        return (self._engine, 1) if crew is None else (crew.engine, crew.workers)
