"""One model under load in a process of its own: mixed requests from many threads, compared with those of one thread."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from benchmarks.harness.memory import resident_bytes
from benchmarks.harness.rounds import print_turn
from benchmarks.harness.watched import WatchedEngine
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.buffers import MOST_WAITING
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.model import Model
from fatdeploy.spec import ModelSpec

# Closed and dropped streams and timeouts are cancellations: their result ends there.
Kind = Literal["greedy", "beams", "samples", "stream", "closed", "dropped", "timeout"]

MOST_NEW_TOKENS, MOST_SOURCES, MOST_BEAMS, MOST_SAMPLES = 48, 3, 4, 3
TIMEOUTS_S = (0.0005, 0.03)
SAMPLED_EVERY_S = 0.05
WARM_UP = 0.25  # of the requests; memory grows until every thread has had every shape
FLAT = 0.05  # how far memory may then move from its level
SHOWN, SAMPLES_SHOWN = 5, 40  # failures and samples of memory in the result


@dataclass(frozen=True, kw_only=True)
class LoadTurn:
    """A bundle and its name in the result."""

    name: str
    bundle: str


@dataclass(frozen=True, kw_only=True)
class LoadSizes:
    """How much load."""

    requests: int
    threads: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request; a stream that is cancelled is read for ``events`` events."""

    kind: Kind
    sources: tuple[tuple[int, ...], ...]
    options: DecodeOptions
    events: int


def drawn_requests(spec: ModelSpec, sizes: LoadSizes) -> list[Request]:
    """Return requests of all kinds, with sources from one token to the model's maximum."""
    draw = np.random.default_rng(sizes.seed)
    special = {spec.pad_id, spec.bos_id, spec.eos_id}
    ids = np.array([token for token in range(spec.vocab_size) if token not in special])
    return [_drawn_request(spec, ids, draw) for _ in range(sizes.requests)]


def _drawn_request(spec: ModelSpec, ids: np.ndarray, draw: np.random.Generator) -> Request:
    kind: Kind = draw.choice(get_args(Kind))
    n_sources = 1 if kind in ("stream", "closed", "dropped") else int(draw.integers(1, 1 + MOST_SOURCES))
    lengths = [int(draw.choice([1, spec.max_source, draw.integers(1, 1 + spec.max_source)])) for _ in range(n_sources)]
    new_tokens = int(draw.integers(1, 1 + min(MOST_NEW_TOKENS, spec.max_target)))
    options = DecodeOptions(max_new_tokens=new_tokens, scores=bool(draw.random() < 0.5))
    if kind == "beams":
        beams = int(draw.integers(2, 1 + MOST_BEAMS))
        options = replace(options, num_beams=beams, num_return_sequences=int(draw.integers(1, 1 + beams)))
    elif kind == "samples" or (kind != "greedy" and draw.random() < 0.5):
        options = replace(options, sample=True, top_p=0.9, seed=int(draw.integers(1000)))
    if kind == "samples":
        options = replace(options, num_return_sequences=int(draw.integers(1, 1 + MOST_SAMPLES)))
    if kind == "timeout":
        options = replace(options, timeout_s=float(np.exp(draw.uniform(*np.log(TIMEOUTS_S)))))
    return Request(
        kind=kind,
        sources=tuple(tuple(draw.choice(ids, length).tolist()) for length in lengths),
        options=options,
        events=int(draw.integers(1, 1 + new_tokens)),
    )


def answered(model: Model, request: Request) -> list[Hypothesis]:
    """Return the result of a request, cancelled if that is its kind."""
    if request.kind not in ("stream", "closed", "dropped"):
        return model.generate(request.sources, request.options)
    stream, tokens = model.stream(request.sources[0], request.options), []
    for index, event in enumerate(stream, 1):
        tokens += event.tokens
        if event.hypothesis is not None:
            # The pieces, so that they are compared with the whole.
            return [replace(event.hypothesis, tokens=tuple(tokens))]
        if request.kind != "stream" and index == request.events:
            break
    if request.kind == "closed":
        stream.close()
    return [Hypothesis(tuple(tokens), "cancelled")]


def patient(request: Request) -> Request:
    """Return the same request without its cancellation."""
    kind: Kind = "stream" if request.kind in ("closed", "dropped") else request.kind
    return replace(request, kind=kind, options=replace(request.options, timeout_s=None))


def is_answer(results: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> bool:
    """Whether results are those of a single thread, or their beginnings where they were cancelled."""
    return len(results) == len(expected) and all(
        _begins(whole, result) if result.finish == "cancelled" else result == whole
        for result, whole in zip(results, expected, strict=True)
    )


def _begins(whole: Hypothesis, part: Hypothesis) -> bool:
    tokens, log_probs = part.tokens, part.log_probs or ()
    return whole.tokens[: len(tokens)] == tokens and (whole.log_probs or ())[: len(log_probs)] == log_probs


@dataclass
class MemorySamples:
    """The memory of the process, sampled while the load runs."""

    samples: list[dict[str, float]] = field(default_factory=list)

    @contextmanager
    def sampled(self, finished: Callable[[], int]) -> Iterator[None]:
        """Sample while the body runs."""
        over, started = threading.Event(), time.perf_counter()

        def sample() -> None:
            ended = False
            while not ended:
                ended = over.wait(SAMPLED_EVERY_S)
                # Also once after the end: a short load may have no other sample after its warm-up.
                seconds = time.perf_counter() - started
                self.samples.append({"seconds": seconds, "finished": finished(), "bytes": resident_bytes()})

        sampler = threading.Thread(target=sample)
        sampler.start()
        try:
            yield
        finally:
            over.set()
            sampler.join()

    def as_dict(self, requests: int) -> dict[str, Any]:
        """Return the level after the warm-up, how far memory moves from it, and some of the samples."""
        later = [sample["bytes"] for sample in self.samples if sample["finished"] >= WARM_UP * requests]
        level = float(np.median(later))
        moved = {"lowest": min(later) / level - 1, "highest": max(later) / level - 1}
        return {"level_bytes": level, **moved, "samples": self.samples[:: 1 + len(self.samples) // SAMPLES_SHOWN]}


def loaded(bundle: Bundle, sizes: LoadSizes) -> dict[str, Any]:
    """Return what happened to a model under load, and which conditions it met."""
    # One thread per decode, without spinning: there are more decodes than cores.
    engine = WatchedEngine(OrtEngine(bundle, OrtOptions(threads=1, spinning=False)))
    requests = drawn_requests(bundle.spec, sizes)
    with Model(bundle, engine) as model:
        expected = [answered(model, patient(request)) for request in requests]
        n_threads, memory, load = threading.active_count(), MemorySamples(), Load(model, requests, expected)
        started = time.perf_counter()
        with memory.sampled(lambda: load.finished):
            load.run(sizes.threads)
        seconds = time.perf_counter() - started
        states, waiting = len(engine.states), len(engine.engine.pool)
    sampled, left = memory.as_dict(sizes.requests), threading.active_count() - n_threads
    return {
        "requests": sizes.requests,
        "threads": sizes.threads,
        "seconds": seconds,
        "kinds": dict(Counter(request.kind for request in requests)),
        "cancelled": load.cancelled,
        "failures": load.failures[:SHOWN],
        "n_failures": len(load.failures),
        "threads_left": left,
        "states_held": states,
        "most_states_held": engine.most_states,
        "buffers_waiting": waiting,
        "most_buffers_waiting": MOST_WAITING,
        "memory": sampled,
        "conditions": {
            "every_result_is_the_single_threaded_one": not load.failures and load.finished == len(requests),
            "memory_is_flat": max(-sampled["lowest"], sampled["highest"]) <= FLAT,
            "no_thread_is_left": left == 0,
            "no_state_is_held": states == 0,
            "the_pool_holds_no_more_than_it_may": waiting <= MOST_WAITING,
        },
    }


class Load:
    """Requests that many threads make at once. Results are judged and dropped: kept ones would look like a leak."""

    def __init__(self, model: Model, requests: Sequence[Request], expected: Sequence[list[Hypothesis]]) -> None:
        self.model, self.requests, self.expected = model, requests, expected
        self.finished = self.cancelled = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def run(self, threads: int) -> None:
        """Make every request once, from a pool of threads."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._make, range(len(self.requests))))

    def _make(self, index: int) -> None:
        request, failure, cancelled = self.requests[index], "", 0
        try:
            results = answered(self.model, request)
            failure = "" if is_answer(results, self.expected[index]) else f"another result: {request}"
            cancelled = sum(result.finish == "cancelled" for result in results)
        except Exception as error:  # noqa: BLE001 - any error under load is a failure
            failure = f"{type(error).__name__}: {error}: {request}"
        with self._lock:
            self.finished += 1
            self.cancelled += cancelled
            self.failures += [failure] if failure else []


def load(turn: LoadTurn, sizes: LoadSizes) -> dict[str, Any]:
    """Return what happened to a turn's bundle under load."""
    bundle = read_bundle(Path(turn.bundle))
    return {"digest": bundle.digest, **loaded(bundle, sizes)}


if __name__ == "__main__":
    print_turn(LoadTurn, LoadSizes, load)
