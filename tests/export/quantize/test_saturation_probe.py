"""The probe for CPUs that overflow: it accepts this machine, and refuses a CPU that adds two products in 16 bits."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from click.testing import CliRunner
from onnx import TensorProto, helper, numpy_helper

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.cli import main
from fatdeploy.errors import BackendUnavailable, BundleError
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.quantize import saturation_probe as saturation
from fatdeploy.export.quantize.integers import WeightBits
from fatdeploy.export.quantize.saturation_probe import write_saturation_probe
from fatdeploy.machine import this_machine
from fatdeploy.manifest import DECODER, ENCODER, SATURATION, Quantization
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.saturation import check_saturation, refuse_overflow
from fatdeploy.runtimes.proof.cpu_checks import cpu_class
from fatdeploy.runtimes.proof.verify import verified_quantized
from fatdeploy.spec import SATURATION_INPUT, SATURATION_OUTPUT
from fatdeploy.targets import CpuClass
from tests.support.bundles import bundle_of, model_of
from tests.support.quantized import hollow_bundle, quantized_of

EXACT = {7: 72 * 255 * 63, 8: 72 * 255 * 127}
CLASSES: dict[int, CpuClass] = {7: "any", 8: "x86-vnni"}


def probed(folder: Path, bits: WeightBits) -> Bundle:
    """Return a bundle with a probe and nothing else."""
    write_saturation_probe(folder / SATURATION, bits)
    return hollow_bundle(
        folder / "bundle",
        Quantization(CLASSES[bits], bits, {}, enforced=False),
        saturation_onnx=(folder / SATURATION).read_bytes(),
    )


def weights_of(bundle: Bundle) -> np.ndarray:
    (weights,) = onnx.load(bundle.file(SATURATION)).graph.initializer
    return numpy_helper.to_array(weights)


def added_in_16_bits(bytes_: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return a product as vpmaddubsw computes it: the sum of two neighbours saturates, those sums are added exactly."""
    products = bytes_.astype(np.int32)[:, :, None] * weights.astype(np.int32)
    pairs = products[:, ::2] + products[:, 1::2]
    sums: np.ndarray = np.clip(pairs, -(2**15), 2**15 - 1).sum(1).astype(np.int32)
    return sums


def write_narrow_probe(path: Path, bits: WeightBits) -> None:
    """Write a probe that gives, on every CPU, the result of a CPU without VNNI."""
    write_saturation_probe(path, bits)
    weights = numpy_helper.to_array(onnx.load(path).graph.initializer[0]).astype(np.int32)
    n_rows, n_columns = weights.shape
    constants = {
        "weights": weights.reshape(n_rows // 2, 2, n_columns),
        "pairs": np.array([-1, n_rows // 2, 2, 1]),
        "low": np.array(-(2**15), np.int32),
        "high": np.array(2**15 - 1, np.int32),
        "within": np.array([2]),
        "among": np.array([1]),
    }
    graph = helper.make_graph(
        [
            helper.make_node("Cast", [SATURATION_INPUT], ["numbers"], to=TensorProto.INT32),
            helper.make_node("Reshape", ["numbers", "pairs"], ["in_pairs"]),
            helper.make_node("Mul", ["in_pairs", "weights"], ["products"]),
            helper.make_node("ReduceSum", ["products", "within"], ["two_each"], keepdims=0),
            helper.make_node("Clip", ["two_each", "low", "high"], ["saturated"]),
            helper.make_node("ReduceSum", ["saturated", "among"], [SATURATION_OUTPUT], keepdims=0),
        ],
        "narrow",
        [helper.make_tensor_value_info(SATURATION_INPUT, TensorProto.UINT8, ["rows", n_rows])],
        [helper.make_tensor_value_info(SATURATION_OUTPUT, TensorProto.INT32, ["rows", n_columns])],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)


def narrow_bundle(folder: Path, bits: WeightBits) -> Bundle:
    """Return a quantized bundle whose probe computes as a CPU without VNNI does."""
    plain = quantized_of("transformer-tiny", "int8")
    shutil.copytree(plain.path, folder)
    write_narrow_probe(folder / SATURATION, bits)
    quantization = plain.manifest.quantization
    assert quantization is not None
    return write_manifest(
        folder, replace(plain.manifest, quantization=replace(quantization, cpu=CLASSES[bits], weight_bits=bits))
    )


def test_seven_bits_are_accepted_on_every_machine(tmp_path: Path) -> None:
    bundle = probed(tmp_path, 7)
    check_saturation(onnxruntime, bundle)
    assert sorted(np.unique(weights_of(bundle)).tolist()) == [-63, 63]


def test_eight_bits_are_accepted_if_this_cpu_has_vnni_and_refused_otherwise(tmp_path: Path) -> None:
    bundle = probed(tmp_path, 8)
    assert sorted(np.unique(weights_of(bundle)).tolist()) == [-127, 127]
    match cpu_class(this_machine()):
        case "x86-vnni" | "arm64":
            check_saturation(onnxruntime, bundle)
        case "x86-avx2":
            with pytest.raises(BackendUnavailable, match="this CPU overflows"):
                check_saturation(onnxruntime, bundle)
        case unknown:
            pytest.skip(f"nobody knows what a CPU of the class {unknown} does")


@pytest.mark.parametrize("rows", [1, 9])
def test_products_that_are_added_in_16_bits_are_refused_with_eight_bits_and_exact_with_seven(
    tmp_path: Path, rows: int
) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "8").mkdir()
    seven, eight = probed(tmp_path / "7", 7), probed(tmp_path / "8", 8)
    largest = np.full((rows, 72), 255, np.uint8)
    exact = added_in_16_bits(largest, weights_of(seven))
    assert np.unique(exact).tolist() == [-EXACT[7], EXACT[7]]
    refuse_overflow(exact, EXACT[7], seven)
    wrong = added_in_16_bits(largest, weights_of(eight))
    # The results of onnxruntime on a Haswell.
    assert np.unique(wrong).tolist() == [-36 * 2**15, 36 * (2**15 - 1)] == [-1179648, 1179612]
    with pytest.raises(
        BackendUnavailable,
        match=r"has 8-bit weights for CPUs of the class x86-vnni, and this CPU overflows when it adds their products "
        r"\(1179612 instead of 2331720\)",
    ):
        refuse_overflow(wrong, EXACT[8], eight)


def test_one_wrong_sum_among_right_ones_is_refused(tmp_path: Path) -> None:
    sums = np.full((9, 36), EXACT[8], np.int32)
    bundle = probed(tmp_path, 8)
    refuse_overflow(sums, EXACT[8], bundle)
    sums[8, 35] -= 1
    with pytest.raises(BackendUnavailable, match=r"\(2331719 instead of 2331720\)"):
        refuse_overflow(sums, EXACT[8], bundle)


def test_an_engine_of_eight_bits_does_not_start_on_a_cpu_that_overflows(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"Export it with --cpu any, which is right everywhere"):
        OrtEngine(narrow_bundle(tmp_path / "eight", 8))


@pytest.mark.parametrize("cpu", ["x86-vnni", "arm64"])
def test_an_export_that_needs_another_cpu_says_what_to_type_before_anything_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpu: str
) -> None:
    monkeypatch.setattr(saturation, "write_saturation_probe", write_narrow_probe)
    options = ["--out", str(tmp_path / "out"), "--precision", "int8", "--cpu", cpu]
    result = CliRunner().invoke(main, ["export", "transformer-tiny", *options])
    here = cpu_class(this_machine()) or "of unknown class"
    assert (result.exit_code, result.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert result.stderr == (
        f"Error: --cpu {cpu} needs 8-bit weights, and this CPU ({here}) overflows when it adds their products, so the "
        f"gate cannot judge them here: export on a CPU of the class {cpu}, or use --cpu any, "
        "which is right everywhere\n"
    )


@pytest.mark.parametrize("cpu", ["any", "x86-avx2"])
def test_an_export_of_seven_bits_is_judged_there(monkeypatch: pytest.MonkeyPatch, cpu: CpuClass) -> None:
    monkeypatch.setattr(saturation, "write_saturation_probe", write_narrow_probe)
    saturation.check_cpu(cpu)


def test_a_bundle_of_eight_bits_uses_them_and_is_right_where_nothing_overflows() -> None:
    here = cpu_class(this_machine())
    if here not in ("x86-vnni", "arm64"):
        pytest.skip(f"8-bit weights overflow on a CPU of the class {here}, or nobody knows whether they do")
    saturation.check_cpu(here)
    bundle, seven = quantized_of("transformer-tiny", "int8", here), quantized_of("transformer-tiny", "int8")
    quantization = bundle.manifest.quantization
    assert quantization is not None
    assert (quantization.cpu, quantization.weight_bits) == (here, 8)
    assert [largest_weight(candidate) for candidate in (bundle, seven)] == [127, 63]
    engine = OrtEngine(bundle)
    check = verified_quantized(bundle, engine)
    assert (check.row_difference, check.share) == (0.0, check.recorded_share)
    ids = np.arange(64)
    exact = EagerEngine(model_of("transformer-tiny")).output_rows(ids)
    errors = [np.square(backend.output_rows(ids) - exact).mean() for backend in (engine, OrtEngine(seven))]
    assert errors[0] < errors[1] / 3  # one more bit quarters the squared error


def largest_weight(bundle: Bundle) -> int:
    """Return the largest of all 8-bit weights of a bundle."""
    tensors = [
        numpy_helper.to_array(tensor, str(bundle.path))
        for part in (ENCODER, DECODER)
        for tensor in onnx.load(bundle.path / part).graph.initializer
        if tensor.data_type == TensorProto.INT8
    ]
    return max(int(np.abs(tensor.astype(int)).max()) for tensor in tensors)


def test_an_engine_of_seven_bits_starts_there(tmp_path: Path) -> None:
    engine = OrtEngine(narrow_bundle(tmp_path / "seven", 7))
    assert engine.spec == quantized_of("transformer-tiny", "int8").spec


def test_an_fp32_bundle_is_not_probed() -> None:
    nothing = object()  # reading a session of it raises AttributeError
    bundle = bundle_of("transformer-tiny")
    assert SATURATION not in bundle.manifest.files
    check_saturation(nothing, bundle)


def test_a_quantized_bundle_without_a_probe_or_with_a_damaged_one_is_refused(tmp_path: Path) -> None:
    quantization = Quantization("any", 7, {}, enforced=False)
    with pytest.raises(BundleError, match=r"does not list saturation\.onnx"):
        check_saturation(onnxruntime, hollow_bundle(tmp_path / "without", quantization))
    damaged = hollow_bundle(tmp_path / "damaged", quantization, saturation_onnx=b"no graph")
    with pytest.raises(BundleError, match=r"onnxruntime cannot run .*saturation\.onnx: .*fatdeploy verify"):
        check_saturation(onnxruntime, damaged)
