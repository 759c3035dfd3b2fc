"""One turn of a bench, in a process of its own: it loads a bundle, warms up, checks, and only then times it."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import Parity
from fatdeploy.errors import ParityFailed
from fatdeploy.manifest import PROBES
from fatdeploy.records import RecordReader
from fatdeploy.runtimes.bench.plan import Setting, Turn
from fatdeploy.runtimes.bench.processes import answer
from fatdeploy.runtimes.bench.timing import (
    Endless,
    Times,
    measured_options,
    peak_bytes,
    random_sources,
    read_bandwidth,
    stopwatch_of,
    timed_decode,
)
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.doctor.gpu_clocks import gpus_here
from fatdeploy.runtimes.engines.opening import opened_engine
from fatdeploy.runtimes.engines.ort.sessions import onnxruntime_module
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.fidelity import Fidelity, token_fidelity
from fatdeploy.runtimes.proof.gate import forced_fidelity, read_material
from fatdeploy.runtimes.proof.probes import read_probes, verified
from fatdeploy.runtimes.proof.promise import Promise, promise_of
from fatdeploy.targets import TARGETS

TokenRows = list[tuple[int, ...]]  # the tokens of each source


@dataclass(frozen=True)
class Checked:
    """Accuracy of a bundle on this machine and where it was exported; ``parity`` is the full proof, if repeated."""

    fidelity: Fidelity
    promised: Promise
    parity: Parity | None


def measure_turn(turn: Turn, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return all measurements of a turn: seconds of loading and of every decode, fidelity, memory, bandwidth."""
    target = TARGETS[read_bundle(turn.bundle, check_hashes=False).manifest.target]
    # Imported before the clock starts: it measures how long loading the bundle takes.
    runtime = onnxruntime_module().__version__ if target.engine == "onnxruntime" else None
    started = time.perf_counter()
    bundle = read_bundle(turn.bundle)
    with closing(opened_for(turn, bundle)) as engine:
        load = time.perf_counter() - started
        tokens, peaks = {}, {}
        options = {
            setting: measured_options(bundle, target=turn.target, beams=setting.beams, plain=turn.plain)
            for setting in turn.settings
        }
        for setting in turn.settings:  # also the warm-up
            _, tokens[setting] = _decode(engine, turn, setting, options[setting])
            peaks[setting] = peak_bytes()
        checked = check(bundle, engine, thorough=turn.thorough)
        tick()
        times = _timed_repetitions(engine, turn, options, tokens, tick)
        # Read while the GPU still runs at the clocks of work.
        device = gpus_here().as_dict() if target.needs_gpu else None
    return {
        "load": load,
        "fidelity": checked.fidelity.as_dict(),
        "certified_share": checked.promised.share,
        "parity": None if checked.parity is None else asdict(checked.parity),
        "onnxruntime": runtime,
        "device": device,
        # Only of the host's memory, which a GPU does not read its weights from. The engine is closed by now: its
        # threads would read at the same time.
        "bandwidth": read_bandwidth(turn.decoder_bytes, turn.threads) if device is None else None,
        "settings": [
            {
                **asdict(setting),
                "peak_bytes": peaks[setting],
                "tokens": sum(map(len, tokens[setting])),
                "times": [asdict(decode) for decode in times[setting]],
            }
            for setting in turn.settings
        ],
    }


def opened_for(turn: Turn, bundle: Bundle) -> Engine[Any]:
    """Return the engine of a turn: TensorRT takes no threads, and records steps if the turn says so."""
    if TARGETS[bundle.manifest.target].flavour is not None:
        return opened_engine(bundle, cuda_graphs=turn.cuda_graphs)
    return opened_engine(bundle, threads=turn.threads, spinning=turn.spinning)


def check(bundle: Bundle, engine: Engine[Any], *, thorough: bool) -> Checked:
    """Return how many of the reference's tokens a bundle returns here; raise ParityFailed if they are too few.

    fp32 must return all of them, other precisions as many as the bar of the certificate requires; without a bar, about
    as many as when they were exported.
    """
    promised, probes = promise_of(bundle), read_probes(bundle.file(PROBES))
    exact = bundle.manifest.precision == "fp32"
    parity = verified(engine, probes) if exact and thorough else None
    quantized = bundle.manifest.quantization is not None
    # A quantized bundle has the sources of its gate; probes are random, and trained weights are not meant for them.
    fidelity = forced_fidelity(engine, read_material(bundle)) if quantized else token_fidelity(engine, probes)
    if exact and fidelity.same < fidelity.tokens:
        raise ParityFailed(
            f"{bundle.path} returns {fidelity.same} of the reference's {fidelity.tokens} tokens, and fp32 must return "
            f"all: no time was recorded; fatdeploy verify {bundle.path}"
        )
    if (reason := promised.lost(fidelity)) is not None:
        raise ParityFailed(f"{bundle.path}: {reason}: no time was recorded; fatdeploy verify {bundle.path}")
    return Checked(fidelity, promised, parity)


def _timed_repetitions(
    engine: Engine[Any],
    turn: Turn,
    options: Mapping[Setting, DecodeOptions],
    tokens: Mapping[Setting, TokenRows],
    tick: Callable[[], None],
) -> dict[Setting, list[Times]]:
    """Return the times of every setting; settings alternate, so that a disturbance does not hit only one of them."""
    times: dict[Setting, list[Times]] = {setting: [] for setting in turn.settings}
    for _ in range(turn.repetitions):
        for setting in turn.settings:
            decode = partial(_decode, engine, turn, setting, options[setting])
            times[setting].append(_timed_again(decode, setting, tokens[setting]))
        tick()
    return times


def _timed_again(decode: Callable[[], tuple[Times, TokenRows]], setting: Setting, expected: TokenRows) -> Times:
    times, tokens = decode()
    if tokens != expected:
        raise ParityFailed(f"the same batch of {setting.batch} decoded twice gave two results: no time was recorded")
    return times


def _decode(engine: Engine[Any], turn: Turn, setting: Setting, options: DecodeOptions) -> tuple[Times, TokenRows]:
    sources = random_sources(engine.spec, setting.batch, turn.source)
    return timed_decode(Endless(engine), sources, options, stopwatch_of(engine))


def turn_from_json(text: str) -> Turn:
    """Return the turn that the parent process described."""
    reader = RecordReader()
    turn = reader.read(Turn, json.loads(text))
    if turn is None:
        raise SystemExit(f"not a turn of a bench: {'; '.join(reader.reasons)}")
    return turn


def main() -> None:
    """Measure the turn that the argument describes."""
    turn = turn_from_json(sys.argv[1])
    answer(lambda tick: measure_turn(turn, tick))


if __name__ == "__main__":
    main()
