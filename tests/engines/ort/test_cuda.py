"""Bundles for onnxruntime's CUDA provider: right for any number of tokens and rows, with ops that fit their schemas."""

import json
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.errors import BackendUnavailable, ConfigError
from fatdeploy.export import pipeline
from fatdeploy.export.graph_files import graphs_of, read_structure
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.proof.cuda_ops import cuda_record, decoder_seams
from fatdeploy.export.quantize.request import QuantizeRequest
from fatdeploy.export.tracing.dialect_ort_cuda import CudaHalfSeams
from fatdeploy.manifest import DECODER, ENCODER, PARITY, PROBES
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.doctor.cuda_driver import cuda_here
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import PROVIDERS, OrtOptions
from fatdeploy.runtimes.engines.ort.sessions import _provider_options, opened_sessions
from fatdeploy.runtimes.engines.protocol import Capacity, Want
from fatdeploy.runtimes.loading import load
from fatdeploy.runtimes.proof.fidelity import token_fidelity
from fatdeploy.runtimes.proof.probes import read_probes
from fatdeploy.targets import TARGETS
from tests.support.bundles import bundle_of, model_of, shared_bundle
from tests.support.cuda_half import TINY, half, written
from tests.support.devices.counting import on_device
from tests.support.engines.equalities import BEAMS, assert_alike, sources_of

SCHEMAS = {schema.name: schema for schema in get_all_operator_schema() if schema.domain == "com.microsoft"}


@cache
def grouped() -> Bundle:
    """Return the fp16 graphs in fp32: only the CPU has kernels for them, so their numbers can be compared.

    They pass the same proof as every fp32 bundle when they are written: each token, each logit, each row alone.
    """

    def write(folder: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "decoder_seams", lambda target, half: CudaHalfSeams())
            written(folder)

    return shared_bundle(f"{TINY}-grouped", write)


def nodes_of(bundle: Bundle, part: str = DECODER) -> list[onnx.NodeProto]:
    return [node for graph in graphs_of(read_structure(bundle.file(part)).graph) for node in graph.node]


@pytest.mark.parametrize("placed", [OrtEngine, on_device])
def test_grouped_attention_gives_the_references_tokens_beams_and_prefixes(placed: Any) -> None:
    engine, reference, sources = placed(grouped()), EagerEngine(model_of(TINY)), sources_of(TINY)
    for options in (DecodeOptions(max_new_tokens=24), BEAMS):
        assert_alike(decode(engine, sources, options), decode(reference, sources, options))
    tokens = decode(engine, sources[:1], DecodeOptions(max_new_tokens=24))[0].tokens
    rest = DecodeOptions(prefix=tokens[:9], max_new_tokens=15)
    assert decode(engine, sources[:1], rest)[0].tokens == tokens


def test_calls_of_one_and_of_several_tokens_follow_each_other_in_any_order() -> None:
    # The grouped op alone refuses this: several tokens after a past, for several rows.
    engines = OrtEngine(grouped()), EagerEngine(model_of(TINY))
    source, mask = np.array([[5, 6, 7], [8, 9, 2]]), np.array([[True] * 3, [True, True, False]])
    states = [engine.encode(source, mask, Capacity(1, 16)) for engine in engines]
    draw = np.random.default_rng(3)
    for steps in (1, 3, 1, 1, 4, 2, 1):
        tokens = draw.integers(3, 64, (2, steps))
        logits, expected = (
            engine.step(tokens, state, Want.LOGITS).logits for engine, state in zip(engines, states, strict=True)
        )
        assert expected is not None
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))


def test_in_fp16_one_token_is_one_op_and_several_are_standard_ops() -> None:
    histogram = half().manifest.histograms[DECODER]["half"]
    assert histogram["GroupQueryAttention"] == 2
    assert histogram["TensorScatter"] == 4
    # Cross-attention only: with a past, cuDNN's kernel would read the whole cache, not only its written part.
    assert [bool(node.input[6:8]) for node in nodes_of(half()) if node.op_type == "MultiHeadAttention"] == [False] * 2


def test_fp32_is_traced_as_for_the_cpu_and_proved_token_by_token_there() -> None:
    assert decoder_seams(TARGETS["ort-cuda"], "fp32") is decoder_seams(TARGETS["ort-cpu"], "fp32") is None
    # Encoders have no caches, so they are the same as for the CPU whatever the decoder is.
    assert grouped().file(ENCODER).read_bytes() == bundle_of(TINY).file(ENCODER).read_bytes()
    certificate = json.loads(grouped().file(PARITY).read_text())
    assert (grouped().manifest.target, certificate["engine"]) == ("ort-cuda", "onnxruntime CPU")
    assert certificate["parity"]["tokens"] == 832
    assert certificate["cuda"]["executed"].startswith("no GPU ran anything")


def test_the_fp16_certificate_records_what_ran_where() -> None:
    certificate = json.loads(half().file(PARITY).read_text())
    assert (half().manifest.target, half().manifest.precision, half().manifest.dialect) == ("ort-cuda", "fp16", "ort")
    assert certificate["cuda"]["executed"].startswith("no GPU ran anything")
    assert certificate["cuda"]["ops_without_cuda_kernel"] == {ENCODER: [], DECODER: []}
    assert certificate["executed"].endswith("No GPU ran anything")
    for parity in (certificate["parity"], certificate["own_graphs"]):
        assert parity["agreement"] > 0.99
        assert 0 < parity["largest_difference"] < 0.01 * max(1, parity["largest_logit"])


def test_fp16_graphs_hold_their_caches_and_memory_in_fp16_on_a_device_too() -> None:
    engine = on_device(half())
    spec = engine.spec
    assert {tensor.dtype for tensor in (*spec.state, *spec.memory)} == {"float16"}
    fidelity = token_fidelity(engine, read_probes(half().file(PROBES)))
    assert fidelity.share > 0.98
    assert fidelity == token_fidelity(OrtEngine(half()), read_probes(half().file(PROBES)))


@pytest.mark.parametrize("name", ["half", "grouped"])
def test_contributed_ops_fit_their_schemas(name: str) -> None:
    bundle = {"half": half, "grouped": grouped}[name]()
    kind = {"half": "tensor(float16)", "grouped": "tensor(float)"}[name]
    nodes = [node for part in (ENCODER, DECODER) for node in nodes_of(bundle, part) if node.domain == "com.microsoft"]
    assert {node.op_type for node in nodes} == {"FusedMatMul", "GroupQueryAttention", "MultiHeadAttention"}
    for node in nodes:
        schema = SCHEMAS[node.op_type]
        names = {attribute.name for attribute in node.attribute}
        assert names <= set(schema.attributes)
        assert {name for name, attribute in schema.attributes.items() if attribute.required} <= names
        assert schema.min_input <= len(node.input) <= schema.max_input
        assert schema.min_output <= len(node.output) <= schema.max_output
        kinds = {constraint.type_param_str: constraint.allowed_type_strs for constraint in schema.type_constraints}
        assert kind in kinds["T"]


def test_an_op_without_a_cuda_kernel_is_named(tmp_path: Path) -> None:
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    made = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    graph = onnx.helper.make_graph([onnx.helper.make_node("Acosh", ["x"], ["y"])], "g", [value], [made])
    onnx.save(onnx.helper.make_model(graph), tmp_path / DECODER)
    assert cuda_record({DECODER: tmp_path / DECODER}).ops_without_cuda_kernel == {DECODER: ("Acosh",)}


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"precision": "bf16"}, "takes fp32 or fp16, found bf16.*--target onnx"),
        ({"precision": QuantizeRequest(precision="int8")}, "takes fp32 or fp16, found int8.*--target ort-cpu"),
    ],
    ids=str,
)
def test_choices_the_target_lacks_are_refused_before_anything_is_traced(
    choices: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        written(tmp_path / "bundle", **choices)
    assert not (tmp_path / "bundle").exists()


def test_a_bundle_for_cuda_runs_there_or_says_why_not_and_on_the_cpu_if_asked() -> None:
    with pytest.raises(BackendUnavailable, match=r"has no \['CUDAExecutionProvider'\]"):
        load(half().path)
    ran = CliRunner().invoke(main, ["run", str(half().path), "--ids", "5 6 7"])
    assert (ran.exit_code, ran.stdout) == (1, "")
    ran = CliRunner().invoke(
        main, ["run", str(half().path), "--ids", "5 6 7", "--provider", "cpu", "--max-new-tokens", "4"]
    )
    assert ran.exit_code == 0, ran.output
    assert len(ran.stdout.split()) == 4


def test_a_bundle_for_the_cpu_whose_attention_runs_nowhere_else_says_what_to_export() -> None:
    everywhere = SimpleNamespace(__version__="900.0", get_available_providers=lambda: list(PROVIDERS.values()))
    with pytest.raises(
        BackendUnavailable, match=r"was exported for the CPU: .* fatdeploy export .* --target ort-cuda$"
    ):
        opened_sessions(everywhere, bundle_of(TINY), OrtOptions(providers=("cuda", "cpu")))
    assert not half().spec.row_positions


def test_fp32_on_cuda_is_not_rounded_to_tf32() -> None:
    assert _provider_options("cuda", bundle_of(TINY)) == {"use_tf32": "0"}
    assert _provider_options("cuda", half()) == _provider_options("cpu", bundle_of(TINY)) == {}


def test_onnxruntime_has_no_option_for_cuda_graphs() -> None:
    with pytest.raises(TypeError, match="cuda_graphs"):
        OrtOptions(providers=("cuda",), cuda_graphs=True)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="is for ort-cuda, which has no use for cuda_graphs"):
        load(half().path, cuda_graphs=False)


@pytest.mark.gpu
@pytest.mark.skipif(not cuda_here().devices, reason="there is no CUDA device here")
def test_fp16_on_a_gpu_agrees_with_the_reference() -> None:
    engine = OrtEngine(half(), OrtOptions(providers=("cuda",)))
    assert token_fidelity(engine, read_probes(half().file(PROBES))).share > 0.98
