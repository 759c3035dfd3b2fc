"""ONNX Runtime sessions: the requested provider and options or an error; damage is reported with its file."""

import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest

from fatdeploy.bundle import Bundle, write_manifest
from fatdeploy.errors import BackendUnavailable, BundleError, ConfigError
from fatdeploy.manifest import DECODER, ENCODER, WEIGHTS
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.ort.options import OrtOptions
from tests.support.bundles import bundle_of

TINY = "transformer-tiny"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"threads": 0}, "threads must be a whole number from 1 up, found 0"),
        ({"threads": True}, "threads must be a whole number from 1 up, found True"),
        ({"threads": 1.5}, "threads must be a whole number from 1 up, found 1.5"),
        ({"spinning": 1}, "spinning must be True or False, found 1"),
        ({"providers": ()}, r"providers must be a list of cpu or cuda or tensorrt, found \(\)"),
        ({"providers": "cpu"}, "providers must be a list of cpu or cuda or tensorrt, found 'cpu'"),
        ({"providers": ("tpu",)}, r"providers must be a list of cpu or cuda or tensorrt, found \('tpu',\)"),
        ({"providers": ("cpu", "cpu")}, r"providers must be different, found \['cpu', 'cpu'\]"),
        ({"providers": ("cpu", "cuda")}, r"cpu must be the last provider, found \['cpu', 'cuda'\]"),
        ({"threads": -1, "providers": []}, r"threads must .* found -1; providers must .* found \[\]"),
    ],
    ids=str,
)
def test_unavailable_options_are_refused_with_every_reason_at_once(options: dict, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^engine options refused: {reason}$"):
        OrtOptions(**options)


def test_threads_and_spinning_reach_both_sessions() -> None:
    engine = OrtEngine(bundle_of(TINY), OrtOptions(threads=1, spinning=False))
    assert engine._sessions is not None
    for session in (engine._sessions.encoder, engine._sessions.decoder):
        chosen = session.get_session_options()
        assert chosen.intra_op_num_threads == 1
        assert chosen.get_session_config_entry("session.intra_op.allow_spinning") == "0"
        assert session.get_providers() == ["CPUExecutionProvider"]


def test_neither_session_spins_long_beside_the_other() -> None:
    engine = OrtEngine(bundle_of(TINY))
    assert engine._sessions is not None
    encoder, decoder = (
        session.get_session_options() for session in (engine._sessions.encoder, engine._sessions.decoder)
    )
    assert encoder.get_session_config_entry("session.force_spinning_stop") == "1"
    assert decoder.get_session_config_entry("session.intra_op.spin_duration_us") == "1000"


def test_a_provider_that_onnxruntime_lacks_is_an_error_with_what_to_type() -> None:
    with pytest.raises(
        BackendUnavailable,
        match=r"has no \['CUDAExecutionProvider'\], only .*: pip uninstall -y onnxruntime && pip install 'fatdeploy",
    ):
        OrtEngine(bundle_of(TINY), OrtOptions(providers=("cuda", "cpu")))


@pytest.mark.parametrize("providers", [("cuda",), ("cuda", "cpu")], ids=str)
def test_a_silent_fall_back_to_the_cpu_is_noticed_and_refused(
    monkeypatch: pytest.MonkeyPatch, providers: tuple
) -> None:
    claimed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: claimed)
    with pytest.raises(
        BackendUnavailable,
        match=r"does not run encoder\.onnx on \['cuda'.*\['CPUExecutionProvider'\].*fatdeploy doctor",
    ):
        OrtEngine(bundle_of("fast-tiny"), OrtOptions(providers=providers))


@pytest.mark.parametrize("kind", [ValueError, RuntimeError, onnxruntime.capi.onnxruntime_pybind11_state.EPFail])
def test_a_provider_that_cannot_start_is_not_the_bundles_fault(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: type[Exception]
) -> None:
    def failing(*arguments: object) -> None:
        raise kind("no driver")

    claimed = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: claimed)
    monkeypatch.setattr(onnxruntime.InferenceSession, "_create_inference_session", failing)
    with pytest.raises(BackendUnavailable, match=r"as requested: no driver\. See what is missing: fatdeploy doctor"):
        OrtEngine(bundle_of("fast-tiny"), OrtOptions(providers=("cuda",)))
    assert capsys.readouterr().out == ""


def test_two_packages_that_overwrite_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "onnxruntime_gpu-1.31.1.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime-gpu\nVersion: 1.31.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        BackendUnavailable, match=r"both installed .* pip uninstall -y onnxruntime onnxruntime-gpu && pip"
    ):
        OrtEngine(bundle_of(TINY))


def copied(folder: Path) -> Bundle:
    shutil.copytree(bundle_of(TINY).path, folder)
    return write_manifest(folder, bundle_of(TINY).manifest)


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def with_weights_beyond_the_end(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    stored = next(tensor for tensor in model.graph.initializer if tensor.external_data)
    next(entry for entry in stored.external_data if entry.key == "offset").value = str(1 << 40)
    path.write_bytes(model.SerializeToString())


def without_an_op(path: Path) -> None:
    model = onnx.load(path, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOp"
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize(
    ("name", "damage", "blamed"),
    [
        (ENCODER, lambda path: path.write_bytes(b"no graph"), ENCODER),
        (DECODER, cut_in_half, DECODER),
        (DECODER, with_weights_beyond_the_end, DECODER),
        (DECODER, without_an_op, DECODER),
        (WEIGHTS, cut_in_half, ENCODER),
        (WEIGHTS, Path.unlink, ENCODER),
    ],
)
def test_a_damaged_graph_is_one_line_that_names_the_file(
    tmp_path: Path, name: str, damage: Callable[[Path], object], blamed: str, capfd: pytest.CaptureFixture[str]
) -> None:
    bundle = copied(tmp_path / "bundle")
    damage(bundle.file(name))
    with pytest.raises(BundleError, match=f"^onnxruntime cannot open {bundle.file(blamed)}: .* --force$") as error:
        OrtEngine(bundle)
    assert "\n" not in str(error.value)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("level", "speaks"), [(logging.WARNING, False), (logging.INFO, True)])
def test_warnings_of_onnxruntime_are_shown_on_request(
    level: int, speaks: bool, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(level, "fatdeploy"):
        OrtEngine(bundle_of(TINY))
    assert ("[W:onnxruntime" in capfd.readouterr().err) == speaks
