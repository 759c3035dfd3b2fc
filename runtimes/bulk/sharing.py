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


def shared_out(
    jobs: Sequence[Job], engine: Engine[Any], crews: Crews | None, batch_tokens: int | None, *, hurried: bool
) -> tuple[Engine[Any], int]:
    """Cut jobs into batches; return the engine that decodes them and the number of workers that share it."""
    # A caller's own processors may count on being called by one thread.
    if crews is not None and not any(job.task.options.processors for job in jobs):
        crew = crews.crew_for(sum(job.n_rows for job in jobs), hurried=hurried)
        if crew is not None:
            for job in jobs:
                job.share_out(crew.engine, batch_tokens or BULK_TOKENS, crew.rows, crew.workers)
            return crew.engine, crew.workers
    for job in jobs:
        job.cut(batch_tokens or BATCH_TOKENS, most_sources_of(engine))
    return engine, 1
