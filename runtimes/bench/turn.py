"""One turn of a bench, in a process of its own: a bundle is loaded, warmed up, checked, and only then timed.

A line of standard output is a JSON object: ``ticks`` as they are done, then ``result`` or ``error``.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import click

from fatdeploy.bundle import Bundle, read_bundle
from fatdeploy.certificate import Parity
from fatdeploy.errors import FatdeployError, ParityFailed
from fatdeploy.manifest import PROBES
from fatdeploy.records import RecordReader
from fatdeploy.runtimes.bench.plan import Setting, Turn
from fatdeploy.runtimes.bench.timing import (
    Endless,
    Times,
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

Said = list[tuple[int, ...]]


@dataclass(frozen=True)
class Checked:
    """How right a bundle is on this machine, and was where it was exported; ``parity`` is the proof, if repeated."""

    fidelity: Fidelity
    promised: Promise
    parity: Parity | None


def measure_turn(turn: Turn, tick: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return all that a turn measures: seconds of loading and of every decode, fidelity, memory, bandwidth."""
    target = TARGETS[read_bundle(turn.bundle, check_hashes=False).manifest.target]
    # Before the clock starts: loading a bundle is what is measured.
    runtime = onnxruntime_module().__version__ if target.engine == "onnxruntime" else None
    started = time.perf_counter()
    bundle = read_bundle(turn.bundle)
    engine = opened_for(turn, bundle)
    load = time.perf_counter() - started
    said, peaks = {}, {}
    for setting in turn.settings:  # also the warm-up
        _, said[setting] = _decode(engine, turn, setting)
        peaks[setting] = peak_bytes()
    checked = check(bundle, engine, thorough=turn.thorough)
    tick()
    times: dict[Setting, list[Times]] = {setting: [] for setting in turn.settings}
    for _ in range(turn.repetitions):
        for setting in turn.settings:
            times[setting].append(_timed_again(engine, turn, setting, said[setting]))
        tick()
    # While the clocks are those of work, and not of waiting.
    device = gpus_here().as_dict() if target.needs_gpu else None
    engine.close()  # its threads would read beside ours
    return {
        "load": load,
        "fidelity": checked.fidelity.as_dict(),
        "certified_share": checked.promised.share,
        "parity": None if checked.parity is None else asdict(checked.parity),
        "onnxruntime": runtime,
        "device": device,
        # Of the host's memory: a device reads its weights from its own.
        "bandwidth": read_bandwidth(turn.decoder_bytes, turn.threads) if device is None else None,
        "settings": [
            {
                **asdict(setting),
                "peak_bytes": peaks[setting],
                "tokens": sum(map(len, said[setting])),
                "times": [asdict(one) for one in times[setting]],
            }
            for setting in turn.settings
        ],
    }


def opened_for(turn: Turn, bundle: Bundle) -> Engine[Any]:
    """Return the engine of a turn: TensorRT has no threads of its own, and records steps if it is to."""
    if TARGETS[bundle.manifest.target].flavour is not None:
        return opened_engine(bundle, cuda_graphs=turn.cuda_graphs)
    return opened_engine(bundle, threads=turn.threads, spinning=turn.spinning)


def check(bundle: Bundle, engine: Engine[Any], *, thorough: bool) -> Checked:
    """Return how many of the reference's tokens a bundle says here; fewer than it must say is ParityFailed.

    Of fp32 it must say all, of others as many as its certificate's bar asks for; integers without a bar about as many
    as when they were exported.
    """
    promised, probes = promise_of(bundle), read_probes(bundle.file(PROBES))
    exact = bundle.manifest.precision == "fp32"
    parity = verified(engine, probes) if exact and thorough else None
    quantized = bundle.manifest.quantization is not None
    # A quantized bundle brings the sources of its gate; probes are random, and trained weights are not meant for them.
    fidelity = forced_fidelity(engine, read_material(bundle)) if quantized else token_fidelity(engine, probes)
    if exact and fidelity.same < fidelity.tokens:
        raise ParityFailed(
            f"{bundle.path} says {fidelity.same} of the reference's {fidelity.tokens} tokens, and fp32 must say all: "
            f"no time was recorded; fatdeploy verify {bundle.path}"
        )
    # How far a device's half precision is from the emulated one without a bar, nobody knows yet.
    judged = quantized or promised.bar is not None
    if judged and (reason := promised.lost(fidelity)) is not None:
        # Of half precision there is nothing to verify: its certificate is all that is known.
        command = "verify" if quantized else "inspect"
        raise ParityFailed(f"{bundle.path}: {reason}: no time was recorded; fatdeploy {command} {bundle.path}")
    return Checked(fidelity, promised, parity)


def _timed_again(engine: Engine[Any], turn: Turn, setting: Setting, expected: Said) -> Times:
    times, said = _decode(engine, turn, setting)
    if said != expected:
        raise ParityFailed(f"the same batch of {setting.batch} decoded twice gave two answers: no time was recorded")
    return times


def _decode(engine: Engine[Any], turn: Turn, setting: Setting) -> tuple[Times, Said]:
    sources = random_sources(engine.spec, setting.batch, turn.source)
    options = DecodeOptions(max_new_tokens=turn.target, num_beams=setting.beams)
    return timed_decode(Endless(engine), sources, options, stopwatch_of(engine))


def turn_from_json(text: str) -> Turn:
    """Return the turn that the starting process described."""
    reader = RecordReader()
    turn = reader.read(Turn, json.loads(text))
    if turn is None:
        raise SystemExit(f"no turn of a bench: {'; '.join(reader.reasons)}")
    return turn


def main() -> None:
    """Do the turn that the argument describes."""
    turn = turn_from_json(sys.argv[1])
    try:
        result = measure_turn(turn, lambda: say({"ticks": 1}))
    except FatdeployError as error:
        say({"error": {"kind": type(error).__name__, "message": str(error)}})
    except KeyboardInterrupt:  # who started this process was interrupted too, and says so
        raise SystemExit(130) from None
    else:
        say({"result": result})


def say(message: dict[str, Any]) -> None:
    """Tell the starting process something."""
    click.echo(json.dumps(message))


if __name__ == "__main__":
    main()
