"""Sources that wait for a place: how many a worker takes at once."""

from collections import deque

import numpy as np
import pytest

from fatdeploy.runtimes.bulk.jobs import ENCODED_TOGETHER, Job
from fatdeploy.runtimes.decoding.loop import task_of
from fatdeploy.runtimes.decoding.options import DecodeOptions
from tests.support.engines.tables import ALIGNED, RefilledEngine

LENGTH = 8
TOGETHER = ENCODED_TOGETHER // LENGTH


def job_of(count: int, workers: int) -> Job:
    """Return a job of equally long sources that all wait but one per worker."""
    engine = RefilledEngine(spec=ALIGNED)
    sources = np.random.default_rng(0).integers(3, 24, (count + workers, LENGTH)).tolist()
    job = Job(task_of(engine.spec, sources, DecodeOptions()), range(count + workers))
    job.share_out(engine, 10**6, most_rows=1, n_workers=workers)
    return job


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_more_sources_than_places_are_taken_while_there_are_enough_for_all_workers(workers: int) -> None:
    job = job_of(4 * TOGETHER, workers)
    taken = deque(len(job.take(2)) for _ in range(4))
    # The last ones are left for whoever has a free place.
    assert list(taken) == [TOGETHER] * (4 - workers) + [2] * workers


def test_never_fewer_than_asked_for_while_there_are_some() -> None:
    job = job_of(9 * TOGETHER, 2)
    assert len(job.take(2 * TOGETHER)) == 2 * TOGETHER
    job = job_of(5, 2)
    assert [len(job.take(3)) for _ in range(3)] == [3, 2, 0]


def test_each_source_is_taken_once() -> None:
    job = job_of(3 * TOGETHER, 2)
    taken = []
    while sources := job.take(5):
        taken += sources
    begun = [source for _ in range(2) for source in job.batch() or []]
    assert sorted(taken + begun) == list(range(3 * TOGETHER + 2))
