"""``fatdeploy.export_model``: the export command as a Python call."""

from pathlib import Path

import pytest

import fatdeploy
from fatdeploy.errors import BackendUnavailable, ConfigError, FatdeployError
from fatdeploy.export.models.exportable import Choices
from fatdeploy.runtimes.engines.trt.build.build import BuildRequest
from tests.support.bundles import bundle_of, model_of

TINY = "transformer-tiny"


def test_a_name_and_a_model_give_the_bundle_of_the_command(tmp_path: Path) -> None:
    stages: list[str] = []
    named = fatdeploy.export_model(TINY, tmp_path / "named", progress=stages.append)
    assert isinstance(named, fatdeploy.Bundle)
    assert named.digest == bundle_of(TINY).digest
    assert stages[:2] == ["tracing the encoder", "tracing the decoder"]
    with pytest.raises(FatdeployError, match="named"):
        fatdeploy.export_model(TINY, tmp_path / "named")


def test_a_model_itself_is_exported_with_its_choices(tmp_path: Path) -> None:
    bundle = fatdeploy.export_model(
        model_of(TINY), str(tmp_path / "live"), choices=Choices(max_source=12, max_target=10), licence="CC0-1.0"
    )
    assert (bundle.spec.max_source, bundle.spec.max_target) == (12, 10)
    assert (bundle.manifest.source.name, bundle.manifest.source.licence) == ("ReferenceModel", "CC0-1.0")
    assert bundle.manifest.source.sha256 == bundle_of(TINY).manifest.source.sha256


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"target": "web"}, "target must be one of ort-cpu, ort-cuda, onnx, tensorrt or tensorrt-rtx, found 'web'"),
        ({"precision": "int2"}, "precision must be one of fp32, fp16, bf16, int8 or int4, found 'int2'"),
        ({"precision": "fp16"}, "ort-cpu takes fp32, int8 or int4, found fp16"),
        ({"precision": "int4", "target": "onnx"}, "onnx takes .*, found int4"),
        (
            {"target": "tensorrt-rtx", "engines": BuildRequest(flavour="tensorrt")},
            "engines for tensorrt-rtx are built by tensorrt-rtx, found a request for tensorrt",
        ),
        ({"engines": False}, "no engines are built for ort-cpu: say --target tensorrt or tensorrt-rtx"),
    ],
)
def test_unsupported_choices_are_refused_before_anything_is_traced(
    options: dict[str, object], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        fatdeploy.export_model(TINY, tmp_path / "out", **options)  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_engines_may_be_left_to_the_device(tmp_path: Path) -> None:
    bundle = fatdeploy.export_model(
        TINY, tmp_path / "out", target="tensorrt", engines=False, choices=Choices(max_source=8, max_target=8)
    )
    assert (bundle.manifest.target, bundle.manifest.dialect, bundle.manifest.plans) == ("tensorrt", "standard", ())


def test_without_the_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'fatdeploy\[export\]'"):
        fatdeploy.export_model(TINY, tmp_path / "out")
