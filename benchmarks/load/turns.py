"""One model under load, in a process of its own: many threads, mixed requests, each compared with a single thread's."""

import json
import sys
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

from benchmarks.harness.memory_alone import resident_bytes
from benchmarks.harness.watched import Watched
from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.runtimes.decoding.hypothesis import Hypothesis
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.buffers import MOST_WAITING
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from fatdeploy.runtimes.model import Model
from fatdeploy.spec import ModelSpec

# A stream that is closed or dropped, and a timeout, are cancellations: what was said before them is all there is.
Kind = Literal["greedy", "beams", "samples", "stream", "closed", "dropped", "timeout"]

MOST_NEW_TOKENS, MOST_SOURCES, MOST_BEAMS, MOST_SAMPLES = 48, 3, 4, 3
TIMEOUTS_S = (0.0005, 0.03)
SAMPLED_EVERY_S = 0.05
WARM_UP = 0.25  # of the requests; what is held grows until every thread has met every shape
FLAT = 0.05  # how far memory may move from its level after that
SHOWN, SAMPLES_SHOWN = 5, 40  # failures, and samples of memory


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Which bundle, named as what."""

    name: str
    bundle: str


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much load."""

    requests: int
    threads: int
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """What somebody asks for; ``events`` are how many a stream is read for, if it is cancelled."""

    kind: Kind
    sources: tuple[tuple[int, ...], ...]
    options: DecodeOptions
    events: int


def drawn_requests(spec: ModelSpec, sizes: Sizes) -> list[Request]:
    """Return requests of all kinds, with sources from one token to as many as the model takes."""
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
    """Return what a request gets, cancelled if that is its kind."""
    if request.kind not in ("stream", "closed", "dropped"):
        return model.generate(request.sources, request.options)
    stream, said = model.stream(request.sources[0], request.options), []
    for index, event in enumerate(stream, 1):
        said += event.tokens
        if event.hypothesis is not None:
            # The pieces are compared: they must be the whole.
            return [replace(event.hypothesis, tokens=tuple(said))]
        if request.kind != "stream" and index == request.events:
            break
    if request.kind == "closed":
        stream.close()
    return [Hypothesis(tuple(said), "cancelled")]


def patient(request: Request) -> Request:
    """Return the same request without its cancellation."""
    kind: Kind = "stream" if request.kind in ("closed", "dropped") else request.kind
    return replace(request, kind=kind, options=replace(request.options, timeout_s=None))


def is_answer(found: Sequence[Hypothesis], expected: Sequence[Hypothesis]) -> bool:
    """Whether results are those that a single thread gets, or the beginnings of them where they were cancelled."""
    return len(found) == len(expected) and all(
        _begins(whole, one) if one.finish == "cancelled" else one == whole
        for one, whole in zip(found, expected, strict=True)
    )


def _begins(whole: Hypothesis, part: Hypothesis) -> bool:
    tokens, log_probs = part.tokens, part.log_probs or ()
    return whole.tokens[: len(tokens)] == tokens and (whole.log_probs or ())[: len(log_probs)] == log_probs


@dataclass
class Memory:
    """What the process held, sampled from beside the load."""

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
        later = [one["bytes"] for one in self.samples if one["finished"] >= WARM_UP * requests]
        level = float(np.median(later))
        moved = {"lowest": min(later) / level - 1, "highest": max(later) / level - 1}
        return {"level_bytes": level, **moved, "samples": self.samples[:: 1 + len(self.samples) // SAMPLES_SHOWN]}


def loaded(bundle: Bundle, sizes: Sizes) -> dict[str, Any]:
    """Return what became of a model under load, and which conditions it met."""
    # One thread a decode, and none that spins: there are more decodes than cores.
    engine = Watched(OrtEngine(bundle, OrtOptions(threads=1, spinning=False)))
    requests = drawn_requests(bundle.spec, sizes)
    with Model(bundle, engine) as model:
        expected = [answered(model, patient(request)) for request in requests]
        n_threads, memory, load = threading.active_count(), Memory(), Load(model, requests, expected)
        started = time.perf_counter()
        with memory.sampled(lambda: load.finished):
            load.run(sizes.threads)
        seconds = time.perf_counter() - started
        held, waiting = len(engine.held), len(engine.engine.pool)
    remembered, left = memory.as_dict(sizes.requests), threading.active_count() - n_threads
    return {
        "requests": sizes.requests,
        "threads": sizes.threads,
        "seconds": seconds,
        "kinds": dict(Counter(request.kind for request in requests)),
        "cancelled": load.cancelled,
        "failures": load.failures[:SHOWN],
        "n_failures": len(load.failures),
        "threads_left": left,
        "states_held": held,
        "most_states_held": engine.most_held,
        "buffers_waiting": waiting,
        "most_buffers_waiting": MOST_WAITING,
        "memory": remembered,
        "conditions": {
            "every_result_is_the_single_threaded_one": not load.failures and load.finished == len(requests),
            "memory_is_flat": max(-remembered["lowest"], remembered["highest"]) <= FLAT,
            "no_thread_is_left": left == 0,
            "no_state_is_held": held == 0,
            "the_pool_holds_no_more_than_it_may": waiting <= MOST_WAITING,
        },
    }


class Load:
    """Requests that many threads make at once. Answers are judged and not kept: they would look like a leak."""

    def __init__(self, model: Model, requests: Sequence[Request], expected: Sequence[list[Hypothesis]]) -> None:
        self.model, self.requests, self.expected = model, requests, expected
        self.finished = self.cancelled = 0
        self.failures: list[str] = []
        self._lock = threading.Lock()

    def run(self, threads: int) -> None:
        """Make every request, each thread one that nobody has made yet."""
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(self._make, range(len(self.requests))))

    def _make(self, index: int) -> None:
        request, failure, cancelled = self.requests[index], "", 0
        try:
            found = answered(self.model, request)
            failure = "" if is_answer(found, self.expected[index]) else f"another result: {request}"
            cancelled = sum(one.finish == "cancelled" for one in found)
        except Exception as error:  # noqa: BLE001 - whatever it is, the load brought it about
            failure = f"{type(error).__name__}: {error}: {request}"
        with self._lock:
            self.finished += 1
            self.cancelled += cancelled
            self.failures += [failure] if failure else []


def main() -> None:
    """Do the turn that the argument describes, and print its result."""
    described = json.loads(sys.argv[1])
    bundle = read_bundle(Path(Turn(**described["turn"]).bundle))
    print(json.dumps({"digest": bundle.digest, **loaded(bundle, Sizes(**described["sizes"]))}))


if __name__ == "__main__":
    main()
