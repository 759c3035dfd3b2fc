"""Who decodes many sources: measured once per machine, with an engine that is opened when it is first needed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fatdeploy
from fatdeploy.runtimes.bulk import crews as module
from fatdeploy.runtimes.bulk.crews import Crew, Crews
from fatdeploy.runtimes.bulk.sharing import crews_of
from fatdeploy.runtimes.bulk.speed import Speeds
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import StepOut
from tests.support.bundles import bundle_of
from tests.support.engines.tables import WORDS, TableEngine

TINY = "transformer-tiny"


class Closing(TableEngine):
    """Counts how often it is closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATDEPLOY_CACHE", str(tmp_path / "cache"))


Script = Callable[[dict[tuple[int, int], float]], list[tuple[int, int]]]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Script:
    """Return a function that sets the speed of each number of workers and rows; it returns what is measured."""
    measured: list[tuple[int, int]] = []

    def script(speeds: dict[tuple[int, int], float]) -> list[tuple[int, int]]:
        class Scripted:
            def __init__(self, engine: Any, workers: int, patience_s: float) -> None:
                self.workers = workers

            def rows_per_second(self, rows: int) -> float | None:
                measured.append((self.workers, rows))
                return speeds.get((self.workers, rows))

        monkeypatch.setattr(module, "Speeds", Scripted)
        return measured

    return script


def crews_with(engine: Closing, single: Closing, threads: int = 2, key: str = "a") -> tuple[Crews, list[Closing]]:
    opened: list[Closing] = []

    def open_single() -> Closing:
        opened.append(single)
        return single

    return Crews(engine, threads, open_single, key), opened


def test_the_fastest_choice_is_measured_once_and_its_engine_opened_once(scripted: Script) -> None:
    measured = scripted({(1, 32): 50, (1, 64): 60, (1, 128): 61, (2, 32): 80, (2, 64): 90, (2, 128): 91})
    engine, single = Closing(), Closing()
    crews, opened = crews_with(engine, single)
    assert crews.crew_for(255) is None
    assert not opened
    assert crews.crew_for(256) == Crew(single, 2, 64)  # 128 rows are not 3 % faster
    assert (crews.crew_for(64), crews.crew_for(63)) == (Crew(single, 2, 64), None)
    assert measured == [(1, 32), (1, 64), (1, 128), (2, 32), (2, 64), (2, 128)]
    # Another model on this machine opens its engine, and measures nothing.
    again, others = crews_with(engine, Closing())
    assert again.crew_for(256) == Crew(others[0], 2, 64)
    assert len(measured) == 6
    crews.close()
    crews.close()
    assert (len(opened), single.closed, engine.closed) == (1, 1, 0)


def test_where_all_threads_on_one_batch_are_faster_the_second_engine_is_closed(scripted: Script) -> None:
    scripted({(1, 32): 50, (1, 64): 100, (2, 32): 70, (2, 64): 102})
    engine, single = Closing(), Closing()
    crews, _ = crews_with(engine, single)
    assert crews.crew_for(1000) == Crew(engine, 1, 64)
    assert single.closed == 1
    crews.close()
    assert single.closed == 1


def test_one_thread_needs_no_second_engine(scripted: Script) -> None:
    measured = scripted({(1, 32): 50, (1, 64): 70, (1, 128): 90})
    engine, single = Closing(), Closing()
    crews, opened = crews_with(engine, single, threads=1)
    assert crews.crew_for(1000) == Crew(engine, 1, 128)
    assert not opened
    assert len(measured) == 3


def test_a_call_with_a_deadline_does_not_wait_for_a_measurement(scripted: Script) -> None:
    scripted({(1, 32): 50})
    engine = Closing()
    crews, _ = crews_with(engine, Closing())
    assert crews.crew_for(1000, hurried=True) is None
    assert crews.crew_for(1000) == Crew(engine, 1, 32)
    assert crews.crew_for(1000, hurried=True) == Crew(engine, 1, 32)


def test_other_keys_are_measured_on_their_own(scripted: Script) -> None:
    measured = scripted({(1, 32): 50})
    for key in ("a", "b", "a"):
        crews_with(Closing(), Closing(), threads=1, key=key)[0].crew_for(256)
    # A choice without a speed ends the growth of batches.
    assert measured == [(1, 32), (1, 64)] * 2


@pytest.mark.parametrize("workers", [1, 3])
def test_a_speed_is_that_of_all_workers_and_leaves_no_state(workers: int) -> None:
    engine = TableEngine()
    speed = Speeds(engine, workers, 60).rows_per_second(4)
    assert speed is not None
    assert speed > 0
    assert engine.n_states == 0
    assert len(engine.calls) == workers * 5
    assert {shape for shape, _ in engine.calls} == {(4, 1)}


def test_a_batch_that_would_take_too_long_is_not_measured() -> None:
    speeds = Speeds(TableEngine(), 1, 0)
    assert speeds.rows_per_second(2) is not None
    assert speeds.rows_per_second(4) is None


def test_an_engine_that_fails_while_it_is_measured_says_so_and_leaves_no_state() -> None:
    class Broken(TableEngine):
        def step(self, *arguments: Any) -> StepOut:
            if len(self.calls) == 1:
                raise RuntimeError("a step failed")
            return super().step(*arguments)

    engine = Broken(spec=WORDS)
    with pytest.raises(RuntimeError, match="a step failed"):
        Speeds(engine, 2, 60).rows_per_second(2)
    assert engine.n_states == 0


def test_only_bundles_on_a_cpu_have_crews() -> None:
    bundle = bundle_of(TINY)
    engine = TableEngine()
    assert crews_of(bundle, engine, threads=2, spinning=True, providers=None) is not None
    assert crews_of(bundle, engine, threads=2, spinning=True, providers=["cpu"]) is not None
    assert crews_of(bundle, engine, threads=2, spinning=True, providers=["cuda", "cpu"]) is None


def test_a_model_opens_its_second_engine_for_many_sources_only_and_closes_it() -> None:
    model = fatdeploy.load(bundle_of(TINY).path, threads=2, spinning=False)
    crews = model._crews
    assert crews is not None
    model.generate([[5, 6]] * 255, max_new_tokens=3)
    assert crews._crew is None
    single = crews._engine_of_one
    assert isinstance(single, OrtEngine)
    crews._crew = Crew(single, 2, 16)
    counts: list[int] = []
    results = model.generate([[5, 6]] * 100, max_new_tokens=3, progress=counts.append)
    assert len(set(results)) == 1
    assert sum(counts) == 100
    model.close()
    with pytest.raises(fatdeploy.ConfigError, match="this engine is closed"):
        single._open  # noqa: B018
