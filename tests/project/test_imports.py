"""Folders are dependency sets: device-side code runs where torch and its like cannot be imported."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fatdeploy
from fatdeploy.runtimes import model, streaming

ROOT = Path(__file__).parent.parent

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnx", "onnxsim", "onnxscript", "safetensors", "transformers"} or (
            name.startswith("fatdeploy.export")
        ):
            raise ImportError(f"{name} is not for devices")
sys.meta_path.insert(0, Blocked())
"""

DECODES = (
    BLOCKED
    + """
import importlib, pkgutil
import fatdeploy, fatdeploy.runtimes
for package in (fatdeploy, fatdeploy.runtimes):
    for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if module.name not in ("fatdeploy.export", "fatdeploy.__main__"):
            importlib.import_module(module.name)
from fatdeploy.runtimes.decode import decode
from tests.scripted import ScriptedEngine
print(decode(ScriptedEngine({5: [7, 8, 2]}), [[5]]))
"""
)


def test_device_side_code_imports_and_decodes_without_torch_and_its_like() -> None:
    run = subprocess.run([sys.executable, "-c", DECODES], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stdout.startswith("[Hypothesis(tokens=(7, 8), finish='eos', text=None, dropped=0, "), run.stderr


@pytest.mark.parametrize("folder", ["fatdeploy", "runtimes"])
def test_device_side_files_import_nothing_of_the_exporter_not_even_inside_of_a_function(folder: str) -> None:
    # The links in fatdeploy/ lead to the other folders.
    files = list((ROOT / folder).glob("*.py"))
    imported = [
        f"{path.name}:{node.lineno}"
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names_imported(node)
        if name.split(".")[:2] == ["fatdeploy", "export"] or name.split(".")[0] in {"export", "torch", "onnx"}
    ]
    assert files
    assert imported == []


def names_imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{one.name}" for one in node.names]
    return [one.name for one in node.names] if isinstance(node, ast.Import) else []


def test_the_block_would_notice_an_import_of_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED + "import fatdeploy.export.eager"], capture_output=True, text=True, check=False
    )
    assert "is not for devices" in run.stderr


def test_export_and_runtimes_are_links_to_real_folders() -> None:
    for name in ("export", "runtimes"):
        link = ROOT / "fatdeploy" / name
        assert link.is_symlink()
        assert link.readlink() == Path("..") / name
        assert not (ROOT / name).is_symlink()


def test_importing_the_folders_by_their_own_names_is_banned() -> None:
    code = "import export\nfrom runtimes import decode\n"
    run = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--output-format=concise", "--stdin-filename", "tests/x.py", "-"],
        input=code,
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert run.stdout.count("TID251") == 2


def test_onnxruntimes_telemetry_is_off_before_anything_of_export_imports_it() -> None:
    code = """
import os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print(os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Watch())
import fatdeploy.export.pipeline
"""
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"}
    for chosen, seen in (({}, "1"), ({"ORT_DISABLE_TELEMETRY": "0"}, "0")):
        run = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, env={**environment, **chosen}, check=False
        )
        assert set(run.stdout.split()) == {seen}, run.stderr


def test_the_public_surface_is_what_it_says() -> None:
    assert sorted(fatdeploy.__all__) == fatdeploy.__all__
    assert all(hasattr(fatdeploy, name) for name in fatdeploy.__all__)
    others = {"DecodeOptions", "Event", "Hypothesis", "Model", "Stream", "__version__", "inspect", "load"}
    errors = [getattr(fatdeploy, name) for name in fatdeploy.__all__ if name not in others]
    assert all(issubclass(error, fatdeploy.FatdeployError) for error in errors)
    assert fatdeploy.load is model.load
    assert (fatdeploy.Model, fatdeploy.DecodeOptions, fatdeploy.Hypothesis) == (
        model.Model,
        model.DecodeOptions,
        model.Hypothesis,
    )
    assert (fatdeploy.Event, fatdeploy.Stream) == (streaming.Event, streaming.Stream)
    with pytest.raises(AttributeError, match="module 'fatdeploy' has no attribute 'lod'"):
        fatdeploy.lod  # noqa: B018


def test_importing_fatdeploy_imports_neither_numpy_nor_a_runtime() -> None:
    code = "import sys, fatdeploy; print({'numpy', 'onnxruntime', 'tokenizers'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stdout == "set()\n", run.stderr


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
from fatdeploy.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["run", "--help"], ["verify", "--help"], ["eval", "--help"], ["bench", "--help"], ["doctor"]],
    ids=str,
)
def test_the_help_and_the_doctor_run_where_numpy_cannot_be_imported(arguments: list[str]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_NUMPY, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert "Traceback" not in run.stderr
    assert ("Usage:" if "--help" in arguments else "Packages") in run.stdout


def test_an_application_on_a_cpu_loads_nothing_of_tensorrt() -> None:
    kinds = "('fatdeploy.runtimes.trt', 'fatdeploy.runtimes.cuda_device', 'tensorrt', 'cuda.')"
    code = (
        f"import sys; import fatdeploy.runtimes.model; print([one for one in sys.modules if one.startswith({kinds})])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
