"""Streams on scripted engines: however one ends, its state is released, but never while a step runs."""

import asyncio
import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from fatdeploy import ConfigError, DecodeOptions, Event, Hypothesis, Stream
from fatdeploy.runtimes.decoding import loop as decode
from fatdeploy.runtimes.decoding.loop import Decoding
from fatdeploy.runtimes.decoding.streaming import Deltas
from tests.support.engines.gated import PATIENCE, GatedEngine, collected, eventually
from tests.support.engines.scripted import SPEC, ScriptedEngine

EOS = 2


def stream_of(engine: ScriptedEngine, options: DecodeOptions | None = None, *, in_reading_order: bool = True) -> Stream:
    options = options or DecodeOptions()
    return Stream(
        partial(Decoding, engine, [[5]], options),
        Deltas(options.stop, None),
        lambda results: results,
        in_reading_order=in_reading_order,
    )


def test_each_token_is_an_event_and_the_last_one_has_the_result() -> None:
    whole = Hypothesis((7, 8, 9), "eos")
    expected = [Event((7,)), Event((8,)), Event((9,)), Event((), None, whole)]
    assert list(stream_of(GatedEngine([7, 8, 9, EOS]))) == expected
    assert asyncio.run(collected(stream_of(GatedEngine([7, 8, 9, EOS])))) == expected


def test_a_target_that_ends_at_the_limit_has_its_last_token_in_the_last_event() -> None:
    events = list(stream_of(GatedEngine([7, 8, 9]), DecodeOptions(max_new_tokens=2)))
    assert events == [Event((7,)), Event((8,), None, Hypothesis((7, 8), "length"))]


def test_steps_without_new_tokens_are_not_events() -> None:
    options = DecodeOptions(stop=[(7, 8, 9)])
    events = list(stream_of(GatedEngine([4, 7, 8, 3, 7, EOS]), options))
    whole = Hypothesis((4, 7, 8, 3, 7), "eos")
    assert events == [Event((4,)), Event((7, 8, 3)), Event((7,), None, whole)]
    events = list(stream_of(GatedEngine([4, 7, 8, 9, 7]), options))
    assert events == [Event((4,)), Event((), None, Hypothesis((4,), "stop"))]


def test_targets_generated_out_of_reading_order_are_sent_at_the_end() -> None:
    engine = GatedEngine([7, 8, 9, EOS], replace(SPEC, target_order="right_to_left"))
    whole = Hypothesis((9, 8, 7), "eos")
    assert list(stream_of(engine, in_reading_order=False)) == [Event((9, 8, 7), None, whole)]


def test_nothing_runs_before_the_first_event_is_requested() -> None:
    engine = GatedEngine([7, 8, EOS])
    stream = stream_of(engine)
    iter(stream)
    assert engine.encoded == 0
    next(stream)
    assert (engine.encoded, len(engine.fed)) == (1, 1)


# How a stream ends.


def test_the_state_goes_back_with_the_last_event() -> None:
    engine = GatedEngine([7, EOS])
    stream = stream_of(engine)
    assert next(stream).tokens == (7,)
    assert engine.released == 0
    assert next(stream).hypothesis == Hypothesis((7,), "eos")
    assert engine.released == 1
    assert list(stream) == []
    stream.close()
    assert (engine.encoded, engine.released) == (1, 1)


def test_closing_ends_a_stream_at_once() -> None:
    engine = GatedEngine([7, 8, 9, EOS])
    stream = stream_of(engine)
    next(stream)
    stream.close()
    stream.close()
    assert engine.released == 1
    assert list(stream) == []
    assert len(engine.fed) == 1


def test_a_stream_that_was_closed_before_it_began_decodes_nothing() -> None:
    engine = GatedEngine([7, EOS])
    stream = stream_of(engine)
    stream.close()
    assert list(stream) == []
    assert (engine.encoded, engine.released) == (0, 0)


def test_leaving_its_block_ends_a_stream() -> None:
    engine = GatedEngine([7, 8, EOS])
    with stream_of(engine) as stream:
        next(stream)
    assert engine.released == 1


def test_breaking_out_of_the_loop_and_dropping_the_stream_ends_it() -> None:
    engine = GatedEngine([7, 8, EOS])
    for _ in stream_of(engine):
        break
    assert engine.released == 1


def test_a_dropped_stream_that_only_the_garbage_collector_finds_is_ended_too() -> None:
    engine = GatedEngine([7, 8, EOS])
    stream = stream_of(engine)
    circle: list[Any] = [stream]
    circle.append(circle)
    next(stream)
    del stream, circle
    assert engine.released == 0
    gc.collect()
    assert engine.released == 1


def test_an_error_in_a_step_ends_a_stream_and_gives_the_state_back() -> None:
    engine = GatedEngine([7])  # its script is over after one step
    stream = stream_of(engine)
    next(stream)
    with pytest.raises(IndexError):
        next(stream)
    assert engine.released == 1
    assert list(stream) == []


def test_a_deadline_ends_a_stream_with_the_tokens_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [50.0]
    monkeypatch.setattr(decode, "monotonic", lambda: now[0])

    def slow(tokens: np.ndarray, scores: np.ndarray) -> np.ndarray:
        now[0] += 1
        return scores

    engine = GatedEngine([7, 8, 9, EOS])
    # The 8 may begin a stop sequence, so it is sent only when no more can follow.
    stream = stream_of(engine, DecodeOptions(timeout_s=1.5, stop=[(8, 9, 9)], processors=[slow]))
    # The time before the first event is requested does not count.
    now[0] += 10
    assert list(stream) == [Event((7,)), Event((8,), None, Hypothesis((7, 8), "cancelled"))]
    assert engine.released == 1


# From many threads.


def test_a_stream_that_is_closed_during_a_step_gives_its_state_back_after_it() -> None:
    engine = GatedEngine([7, 8, EOS], gated=True)
    stream = stream_of(engine)
    with ThreadPoolExecutor(1) as threads:
        events = threads.submit(list, stream)
        assert engine.entered.wait(PATIENCE)
        stream.close()
        stream.close()
        assert engine.released == 0
        engine.gate.set()
        assert events.result(PATIENCE) == []
    assert engine.released == 1
    assert len(engine.fed) == 1


def test_a_stream_has_one_reader_at_a_time() -> None:
    engine = GatedEngine([7, EOS], gated=True)
    stream = stream_of(engine)
    with ThreadPoolExecutor(1) as threads:
        events = threads.submit(list, stream)
        assert engine.entered.wait(PATIENCE)
        with pytest.raises(ConfigError, match=r"is reading this stream: open another with model\.stream"):
            next(stream)
        engine.gate.set()
        # The other one goes on.
        assert [event.tokens for event in events.result(PATIENCE)] == [(7,), ()]
    assert engine.released == 1


def test_threads_that_close_a_stream_all_at_once_give_its_state_back_once() -> None:
    for _ in range(50):
        engine = GatedEngine([7, 8, 9, EOS])
        stream = stream_of(engine)
        start = threading.Barrier(4)

        def read(stream: Stream = stream, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            for _ in stream:
                pass

        def close(stream: Stream = stream, start: threading.Barrier = start) -> None:
            start.wait(PATIENCE)
            stream.close()

        with ThreadPoolExecutor(4) as threads:
            for future in [threads.submit(job) for job in (read, close, close, close)]:
                future.result(PATIENCE)
        assert engine.released == engine.encoded


# In an event loop.


def test_the_event_loop_goes_on_while_a_step_runs() -> None:
    async def both() -> list[Event]:
        engine = GatedEngine([7, EOS], gated=True)
        events = asyncio.create_task(collected(stream_of(engine)))
        while not engine.entered.is_set():
            await asyncio.sleep(0)
        assert not events.done()
        # Only the loop can open the gate.
        engine.gate.set()
        return await events

    assert [event.tokens for event in asyncio.run(asyncio.wait_for(both(), PATIENCE))] == [(7,), ()]


def test_cancelling_the_task_that_waits_gives_the_state_back_when_the_step_is_over() -> None:
    async def cancelled() -> tuple[GatedEngine, Stream]:
        engine = GatedEngine([7, 8, EOS], gated=True)
        stream = stream_of(engine)
        task = asyncio.create_task(collected(stream))
        while not engine.entered.is_set():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The task is gone, its step is not.
        assert engine.in_step
        assert engine.released == 0
        engine.gate.set()
        return engine, stream

    engine, stream = asyncio.run(cancelled())
    assert eventually(lambda: engine.released == 1)
    assert list(stream) == []
    assert len(engine.fed) == 1


def test_a_time_limit_of_asyncio_ends_a_stream() -> None:
    async def limited() -> GatedEngine:
        engine = GatedEngine([7, 8, EOS], gated=True)
        task = asyncio.create_task(collected(stream_of(engine)))
        while not engine.entered.is_set():
            await asyncio.sleep(0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.01)
        engine.gate.set()
        return engine

    engine = asyncio.run(limited())
    assert eventually(lambda: engine.released == 1)


def test_cancelling_a_task_whose_step_waits_for_a_thread_decodes_nothing() -> None:
    async def cancelled() -> GatedEngine:
        loop, engine, gate = asyncio.get_running_loop(), GatedEngine([7, EOS]), threading.Event()
        loop.set_default_executor(ThreadPoolExecutor(1))
        busy = loop.run_in_executor(None, gate.wait, PATIENCE)
        task = asyncio.create_task(collected(stream_of(engine)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.set()
        await busy
        return engine

    engine = asyncio.run(cancelled())
    assert (engine.encoded, engine.released) == (0, 0)


def test_leaving_an_asynchronous_loop_or_block_ends_a_stream() -> None:
    async def left() -> list[int]:
        engines = [GatedEngine([7, 8, EOS]) for _ in range(3)]
        async for _ in stream_of(engines[0]):
            break
        async with stream_of(engines[1]) as stream:
            await anext(stream)
        stream = stream_of(engines[2])
        await anext(stream)
        await stream.aclose()
        assert await collected(stream) == []
        return [engine.released for engine in engines]

    assert asyncio.run(left()) == [1, 1, 1]


def test_an_error_in_a_step_reaches_the_task_that_waits() -> None:
    engine = GatedEngine([7])

    async def failing() -> None:
        with pytest.raises(IndexError):
            await collected(stream_of(engine))

    asyncio.run(failing())
    assert engine.released == 1
