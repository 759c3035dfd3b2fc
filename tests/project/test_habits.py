"""Project files that no program of ours reads: workflows, forms, the security policy, the citation and the version."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from fatdeploy import __version__

# Found by a file, not by counting folders up: this test may move.
ROOT = next(folder for folder in Path(__file__).parents if (folder / "pyproject.toml").is_file())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]
PROSE = [
    ROOT / "SECURITY.md",
    ROOT / ".github" / "pull_request_template.md",
    *FORMS,
    *WORKFLOWS,
]
PACKAGES = ("fatdeploy", "runtimes", "export")
# Files that commands write, or that are part of a bundle or a checkpoint.
WRITTEN = {"gpu-report.json", "manifest.json", "parity.json", "tokenizer.json"}
NETWORK = {"aiohttp", "ftplib", "http", "httpx", "huggingface_hub", "requests", "smtplib", "socket", "ssl", "urllib"}
PICKLES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}

Yaml = dict[Any, Any]


def read_yaml(path: Path) -> Yaml:
    content = yaml.safe_load(path.read_text())
    assert isinstance(content, dict), path
    return content


def project() -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def steps_of(workflow: Yaml) -> Iterator[Yaml]:
    for job in workflow["jobs"].values():
        yield from job.get("steps", [])


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def made_targets(text: str) -> set[str]:
    """Return the targets of ``make`` calls in lines of shell; ``NAME=value`` is a setting, not a target."""
    calls = re.findall(r"\bmake((?: +[\w-]+(?:=\S+)?)+)", text)
    return {word for call in calls for word in call.split() if "=" not in word}


def missing_paths(text: str) -> list[str]:
    """Return paths of the repository that a text names and that do not exist."""
    named = re.findall(r"(?<![\w/.*-])\.?(?:[\w-]+/)*[\w-]+\.(?:cff|json|md|py|toml|txt|yml)\b", text)
    return sorted({name for name in named if name not in WRITTEN and not (ROOT / name).exists()})


def forbidden_uses(source: str) -> list[str]:
    """Return what code does that SECURITY.md says it never does."""
    uses = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if ast.unparse(node) == "from pickle import UnpicklingError":
                continue  # what torch.load raises
            uses += [f"import {name}" for name in names if name.partition(".")[0] in NETWORK | PICKLES]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"eval", "exec"} or called.endswith(".register_custom_ops_library"):
                uses.append(called)
            settings = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
            if called == "torch.load" and settings.get("weights_only") != "True":
                uses.append("torch.load without weights_only=True")
            if called == "np.load" and settings.get("allow_pickle") != "False":
                uses.append("np.load without allow_pickle=False")
    return uses


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_few_rights_a_time_limit_and_no_address(path: Path) -> None:
    workflow = read_yaml(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "://" not in path.read_text()
    for name, job in workflow["jobs"].items():
        assert "uses" in job or job["timeout-minutes"] <= 45, name


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_make_targets_that_exist_and_pinned_actions(path: Path) -> None:
    steps = list(steps_of(read_yaml(path)))
    called = set().union(*(made_targets(step.get("run", "")) for step in steps))
    assert called
    assert called <= make_targets()
    for step in steps:
        if "uses" in step:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(v\d+|release/v\d+)", step["uses"])


def test_make_calls_are_read_with_all_their_targets_and_without_settings() -> None:
    assert made_targets('make dist wheel-test PYTHON=python TAG="$X" && make lint') == {"dist", "wheel-test", "lint"}
    assert "no-such-target" not in make_targets()
    assert {"lint", "types", "pytest", "dist"} <= make_targets()


def test_ci_runs_every_part_of_make_test() -> None:
    ci = read_yaml(ROOT / ".github" / "workflows" / "ci.yml")
    called = set().union(*(made_targets(step.get("run", "")) for step in steps_of(ci)))
    [parts] = re.findall(r"^test: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert called == set(parts.split())


def test_ci_classifiers_and_requires_python_name_the_same_versions() -> None:
    ci = read_yaml(ROOT / ".github" / "workflows" / "ci.yml")
    versions = ci["jobs"]["test"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    classified = [f"3.{line.removeprefix(prefix)}" for line in project()["classifiers"] if line.startswith(prefix)]
    assert versions == classified == ["3.11", "3.12", "3.13", "3.14"]
    assert project()["requires-python"] == f">={versions[0]}"


def test_only_the_job_that_publishes_can_prove_its_identity_and_it_waits_for_all_others() -> None:
    jobs = read_yaml(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert {name: job["permissions"] for name, job in jobs.items() if "permissions" in job} == {
        "publish": {"id-token": "write"}
    }
    assert set(jobs["publish"]["needs"]) == jobs.keys() - {"publish"}
    assert jobs["publish"]["environment"] == "release"
    # It runs no code of the repository: only these two actions see the identity.
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


def test_a_release_is_of_a_tag_and_checks_builds_and_tries_in_this_order() -> None:
    workflow = read_yaml(ROOT / ".github" / "workflows" / "release.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}  # YAML 1.1 reads the key `on` as true
    runs = [step["run"].split()[1] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    assert runs == ["check-tag", "dist", "wheel-test"]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("tag", "code", "message"),
    [
        (f"v{__version__}", 0, f"check-tag: v{__version__} is the version"),
        (__version__, 2, f"expected TAG=v{__version__} as in fatdeploy/_version.py, found TAG={__version__}"),
        ("v9.9.9", 2, f"expected TAG=v{__version__} as in fatdeploy/_version.py, found TAG=v9.9.9"),
        ("", 2, f"expected TAG=v{__version__} as in fatdeploy/_version.py, found TAG=\n"),
    ],
)
def test_a_tag_must_name_the_version_of_the_package(tag: str, code: int, message: str) -> None:
    command = ["make", "check-tag", f"PYTHON={sys.executable}", f"TAG={tag}"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ran.returncode, message in ran.stdout + ran.stderr) == (code, True)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_has_what_github_requires(path: Path) -> None:
    form = read_yaml(path)
    assert form.keys() >= {"name", "description", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_the_forms_ask_for_the_reports_that_our_commands_write() -> None:
    required = {
        path.stem: [
            field["attributes"]["label"]
            for field in read_yaml(path)["body"]
            if field.get("validations", {}).get("required")
        ]
        for path in FORMS
    }
    assert "Output of `fatdeploy doctor --json`" in required["bug"]
    assert "gpu-report.json" in required["gpu-report"]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_every_file_and_make_target_that_is_named_exists(path: Path) -> None:
    text = path.read_text()
    assert not missing_paths(text)
    assert made_targets("\n".join(re.findall(r"`([^`\n]+)`", text))) <= make_targets()


def test_the_makefile_names_tests_that_exist() -> None:
    named = re.findall(r"tests/[\w/]+\.py", (ROOT / "Makefile").read_text())
    assert named
    assert all((ROOT / name).is_file() for name in named)


def test_a_path_that_does_not_exist_is_noticed() -> None:
    text = "See `docs/no-such-page.md`, README.md, `fatdeploy/_version.py` and .github/workflows/none.yml."
    assert missing_paths(text) == [".github/workflows/none.yml", "docs/no-such-page.md"]


def test_the_citation_is_of_this_version_and_licence() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # what the format requires
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"] == [{"name": "The fatdeploy developers"}]
    assert (citation["version"], citation["license"]) == (__version__, project()["license"])


def test_the_changelog_and_the_security_policy_know_this_version() -> None:
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[:2] == ["Unreleased", __version__]
    major, minor, _ = __version__.split(".")
    assert f"| {major}.{minor}.x | yes |" in (ROOT / "SECURITY.md").read_text()


def test_no_module_unpickles_opens_connections_or_loads_foreign_code() -> None:
    modules = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(modules) > 100
    uses = {str(path.relative_to(ROOT)): forbidden_uses(path.read_text()) for path in modules}
    assert {name: reasons for name, reasons in uses.items() if reasons} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from urllib.request import urlopen",
        "import http.client as client",
        "def read(path):\n    import socket",
        "from pickle import load, UnpicklingError",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "np.load(path, allow_pickle=True)",
        "options.register_custom_ops_library('ops.so')",
        "eval(text)",
    ],
)
def test_a_use_that_the_security_policy_excludes_is_noticed(source: str) -> None:
    assert len(forbidden_uses(source)) == 1
