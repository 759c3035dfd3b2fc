"""Time the two ways in which beams can share caches in one attention: copied rows, or indirection; writes JSON.

Either rows that continue another row are copied before the step, or the attention reads which row holds each position.
Both must give the same numbers before a time is recorded. The result is the minimum of many alternating calls.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from benchmarks.harness.provenance import RESULTS
from benchmarks.harness.recording import out_option, write_result
from fatdeploy.runtimes.engines.protocol import Floats
from fatdeploy.runtimes.engines.row_moves import move_rows
from fatdeploy.spec import cache_specs

OUT = RESULTS / "beam_rows.json"
HEADS, WIDTH, BEAMS = 8, 64, 4
ROUNDS = 10
TOLERANCE = 1e-5

Run = Callable[[], Any]


def attention(rows: int, capacity: int, *, indirect: bool) -> bytes:
    """Return a graph of one cached self-attention that reads one token per row."""
    cache, token = (rows, HEADS, capacity, WIDTH), (rows, 1, HEADS * WIDTH)
    shapes = {"q": token, "k": token, "v": token, "past_k": cache, "past_v": cache, "position": (1,)}
    names = {**dict.fromkeys(shapes, TensorProto.FLOAT), "position": TensorProto.INT32}
    outputs = {"y": token, "k_out": cache, "v_out": cache}
    if indirect:
        shapes |= {"beams": (1,), "holders": (rows // BEAMS, BEAMS, capacity)}
        names |= {"beams": TensorProto.INT32, "holders": TensorProto.INT32}
        inputs = ["q", "k", "v", "", "", "past_k", "past_v", "position", "beams", "holders"]
        kind = {"op_type": "DecoderMaskedMultiHeadAttention", "past_present_share_buffer": 1}
    else:
        inputs = ["q", "k", "v", "", "", "", "past_k", "past_v", "position"]
        kind = {"op_type": "MultiHeadAttention", "unidirectional": 1}
    node = helper.make_node(**kind, inputs=inputs, outputs=[*outputs], domain="com.microsoft", num_heads=HEADS)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, names[name], shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return model.SerializeToString()


def bound(graph: bytes, arrays: dict[str, np.ndarray]) -> tuple[Run, Floats]:
    """Return a call of a graph that writes its caches in place, and the array of its output."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    binding, result = session.io_binding(), np.empty_like(arrays["q"])
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in (("k_out", values["past_k"]), ("v_out", values["past_v"])):
        binding.bind_ortvalue_output(name, value)
    binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(result))
    return lambda: session.run_with_iobinding(binding), result


def ways(sources: int, position: int) -> dict[str, Run]:
    """Return a call of each way, and the copy of one row per source, after comparing the numbers of both ways."""
    draw, rows = np.random.default_rng(0), sources * BEAMS
    capacity = position + 1
    arrays = {name: draw.standard_normal((rows, 1, HEADS * WIDTH), np.float32) for name in "qkv"}
    arrays["position"] = np.array([position], np.int32)
    caches = {name: draw.standard_normal((rows, HEADS, capacity, WIDTH), np.float32) for name in ("past_k", "past_v")}
    holders = draw.integers(0, BEAMS, (sources, BEAMS, capacity), np.int32)
    # The caches after the copies of all earlier steps, position by position.
    owners = (holders + BEAMS * np.arange(sources)[:, None, None]).reshape(rows, capacity)
    copied = {
        name: np.ascontiguousarray(cache[owners, :, np.arange(capacity)].swapaxes(1, 2))
        for name, cache in caches.items()
    }
    plain, expected = bound(attention(rows, capacity, indirect=False), {**arrays, **copied})
    indirection = {"beams": np.array([BEAMS], np.int32), "holders": holders}
    indirect, result = bound(attention(rows, capacity, indirect=True), {**arrays, **caches, **indirection})
    plain()
    indirect()
    if np.abs(result - expected).max() > TOLERANCE:
        raise SystemExit("indirection gives other numbers than copied rows: no time was recorded")
    parents = np.arange(rows).reshape(sources, BEAMS)
    parents[:, -1] = parents[:, 0]
    specs, moved = cache_specs(0, HEADS, WIDTH), [*copied.values()]
    return {
        "attention": plain,
        "attention_with_indirection": indirect,
        "copy_of_a_row_a_source": lambda: move_rows(specs, moved, parents.ravel(), np.array(position)),
    }


def least_us(runs: dict[str, Run], calls: int) -> dict[str, float]:
    """Return the shortest time of each call, in microseconds."""
    least = dict.fromkeys(runs, np.inf)
    for _ in range(ROUNDS):
        for name, run in runs.items():
            for _ in range(calls // ROUNDS):
                started = time.perf_counter()
                run()
                least[name] = min(least[name], 1e6 * (time.perf_counter() - started))
    return least


@click.command()
@click.option("--position", "positions", multiple=True, type=click.IntRange(1), default=(16, 63, 200))
@click.option("--sources", multiple=True, type=click.IntRange(1), default=(1, 8))
@click.option("--calls", default=3000, show_default=True, type=click.IntRange(ROUNDS))
@out_option(OUT)
def main(positions: tuple[int, ...], sources: tuple[int, ...], calls: int, out: Path) -> None:
    """Measure, and write the result."""
    rows = [
        {"sources": count, "position": position, "min_us": least_us(ways(count, position), calls)}
        for count in sources
        for position in positions
    ]
    result = {
        "precision": "fp32",
        "threads": 1,
        "heads": HEADS,
        "head_width": WIDTH,
        "beams": BEAMS,
        "calls": calls,
        "numbers_checked": True,
        "results": rows,
    }
    write_result(out, result, ("fatdeploy", "onnxruntime", "numpy"))


if __name__ == "__main__":
    main()
