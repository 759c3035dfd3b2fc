"""Folders are dependency sets: device-side code runs where torch and its like cannot be imported."""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fatdeploy
from fatdeploy import bundle
from fatdeploy.export import api
from fatdeploy.runtimes import inspection, loading, model
from fatdeploy.runtimes.decoding import streaming
from fatdeploy.runtimes.proof import verify

ROOT = Path(__file__).parents[2]

BLOCKED = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "onnx", "onnxsim", "onnxscript", "safetensors", "transformers"} or (
            name.split(".")[:2] == ["fatdeploy", "export"]
        ):
            raise ImportError(f"{name} is not for devices")
sys.meta_path.insert(0, Blocked())
"""

# Packages of every depth: one that cannot be imported is an error, not a package without modules.
IMPORTS = (
    BLOCKED
    + """
import importlib, pkgutil
import fatdeploy, fatdeploy.runtimes
def failed(name):
    raise ImportError(name)
modules = [*pkgutil.iter_modules(fatdeploy.__path__, "fatdeploy.")]
modules += pkgutil.walk_packages(fatdeploy.runtimes.__path__, "fatdeploy.runtimes.", failed)
names = {module.name for module in modules} - {"fatdeploy.export", "fatdeploy.__main__"}
for name in sorted(names):
    importlib.import_module(name)
"""
)
DECODES = (
    IMPORTS
    + """
assert "fatdeploy.runtimes.engines.trt.build.network" in names
from fatdeploy.runtimes.decoding.loop import decode
from tests.support.engines.scripted import ScriptedEngine
print(decode(ScriptedEngine({5: [7, 8, 2]}), [[5]]))
"""
)


def test_device_side_code_imports_and_decodes_without_torch_and_its_like() -> None:
    run = subprocess.run([sys.executable, "-c", DECODES], capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.stdout.startswith("[Hypothesis(tokens=(7, 8), finish='eos', text=None, dropped=0, "), run.stderr


@pytest.mark.parametrize("folder", ["fatdeploy", "runtimes"])
def test_device_side_files_import_nothing_of_the_exporter_not_even_inside_of_a_function(folder: str) -> None:
    assert modules_in(ROOT / folder)
    assert forbidden_imports(ROOT / folder) == []


def modules_in(folder: Path) -> list[Path]:
    """Return the modules of a folder and of all folders in it, without following links."""
    return sorted(Path(place, name) for place, _, names in os.walk(folder) for name in names if name.endswith(".py"))


def forbidden_imports(folder: Path) -> list[str]:
    return [
        f"{path.relative_to(folder).as_posix()}:{node.lineno}"
        for path in modules_in(folder)
        for node in ast.walk(executed(path))
        for name in names_imported(node)
        if name.split(".")[:2] == ["fatdeploy", "export"] or name.split(".")[0] in {"export", "torch", "onnx"}
    ]


def executed(path: Path) -> ast.Module:
    """Return the code of a module; of an ``__init__.py``, without its imports for type checkers."""
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py":
        tree.body = [
            node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
        ]
    return tree


NESTED = ["decoding/loop.py", "engines/ort/engine.py", "engines/trt/build/network.py"]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """Return a copy of the device's side, to plant something in."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("fatdeploy", "runtimes"):
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored)
    return tmp_path


def imports_all(checkout: Path) -> subprocess.CompletedProcess[str]:
    code = f"{IMPORTS}\nprint(fatdeploy.__file__)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=checkout, check=False)


def test_a_copy_with_nothing_planted_passes(copied: Path) -> None:
    assert forbidden_imports(copied / "runtimes") == []
    run = imports_all(copied)
    assert run.stdout == f"{copied / 'fatdeploy' / '__init__.py'}\n", run.stderr


@pytest.mark.parametrize("module", NESTED)
def test_an_import_of_torch_planted_in_a_nested_module_is_noticed(copied: Path, module: str) -> None:
    with (copied / "runtimes" / module).open("a") as file:
        file.write("\nimport torch\n")
    assert [place.partition(":")[0] for place in forbidden_imports(copied / "runtimes")] == [module]
    assert "ImportError: torch is not for devices" in imports_all(copied).stderr


@pytest.mark.parametrize("module", NESTED)
@pytest.mark.parametrize(
    "planted", ["import onnx", "from fatdeploy.export import pipeline", "import fatdeploy.export.proof.certify"]
)
def test_an_import_planted_inside_of_a_function_of_a_nested_module_is_noticed(
    copied: Path, module: str, planted: str
) -> None:
    with (copied / "runtimes" / module).open("a") as file:
        file.write(f"\ndef planted():\n    {planted}\n")
    assert [place.partition(":")[0] for place in forbidden_imports(copied / "runtimes")] == [module]


def test_no_test_file_imports_another() -> None:
    imported = [
        f"{path.relative_to(ROOT).as_posix()}:{node.lineno}"
        for path in modules_in(ROOT / "tests")
        for node in ast.walk(ast.parse(path.read_text()))
        for name in names_imported(node)
        if name.startswith("tests.") and any(part.startswith("test_") for part in name.split(".")[1:])
    ]
    assert imported == []


@pytest.mark.parametrize("folder", ["runtimes", "export", "benchmarks", "tests"])
def test_every_folder_is_a_package_of_at_most_14_modules(folder: str) -> None:
    names: dict[Path, set[str]] = {}
    for path in modules_in(ROOT / folder):
        names.setdefault(path.parent, set()).add(path.name)
    assert [str(place) for place, modules in names.items() if "__init__.py" not in modules] == []
    assert [str(place) for place, modules in names.items() if len(modules - {"__init__.py"}) > 14] == []


def names_imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return [alias.name for alias in node.names] if isinstance(node, ast.Import) else []


def test_the_block_would_notice_an_import_of_torch() -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED + "import fatdeploy.export.models.eager"],
        capture_output=True,
        text=True,
        check=False,
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
    types = {"Bundle", "DecodeOptions", "Event", "Hypothesis", "Inspection", "Model", "Stream", "Verification"}
    calls = {"build_shortlist", "export_model", "inspect", "load", "verify"}
    assert all(callable(getattr(fatdeploy, name)) for name in calls)
    others = {"__version__", *types, *calls}
    errors = [getattr(fatdeploy, name) for name in fatdeploy.__all__ if name not in others]
    assert all(issubclass(error, fatdeploy.FatdeployError) for error in errors)
    assert fatdeploy.load is loading.load
    assert (fatdeploy.Model, fatdeploy.DecodeOptions, fatdeploy.Hypothesis) == (
        model.Model,
        model.DecodeOptions,
        model.Hypothesis,
    )
    assert fatdeploy.Bundle is bundle.Bundle
    assert (fatdeploy.inspect, fatdeploy.Inspection) == (inspection.inspect, inspection.Inspection)
    assert (fatdeploy.verify, fatdeploy.Verification) == (verify.verify, verify.Verification)
    assert fatdeploy.export_model is api.export_model
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
    assert modules_of_tensorrt_after("fatdeploy.runtimes.loading") == []


def test_a_loaded_tensorrt_module_would_be_noticed() -> None:
    loaded = modules_of_tensorrt_after("fatdeploy.runtimes.engines.trt.cuda")
    assert {"fatdeploy.runtimes.engines.trt", "fatdeploy.runtimes.engines.trt.cuda"} <= set(loaded)


def modules_of_tensorrt_after(module: str) -> list[str]:
    """Return the modules of TensorRT and CUDA, and ours for them, that importing a module loads."""
    kinds = ("fatdeploy.runtimes.engines.trt", "fatdeploy.runtimes.doctor.cuda_driver", "tensorrt", "cuda.")
    code = f"import sys; import {module}; print(*(name for name in sys.modules if name.startswith({kinds})))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.split()
