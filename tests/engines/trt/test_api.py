"""Every TensorRT and CUDA attribute that the code uses exists in all supported versions.

This needs neither a GPU nor TensorRT: the names of the three versions are in tests/data.
"""

import ast
import builtins
import collections
import contextlib
import ctypes
import dataclasses
import functools
import importlib
import io
import json
import logging
import math
import os
import pathlib
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

ROOT = Path(__file__).parents[3]
API: dict[str, dict[str, list[str] | None]] = json.loads((ROOT / "tests/data/tensorrt_api.json").read_text())
FILES = [
    *sorted(path for path in ROOT.glob("runtimes/engines/trt/**/*.py") if path.name != "__init__.py"),
    ROOT / "runtimes" / "doctor" / "cuda_driver.py",
]
# Names in this code do not show that an attribute is ours.
UNRELATED = {"reference", "training", "g2p"}

# Attributes that only TensorRT-RTX has, and the functions that may use them: they run for this flavour only.
RTX_ONLY = {
    "ComputeCapability": {"_check_capabilities", "aim"},
    "num_compute_capabilities": {"aim"},
    "set_compute_capability": {"aim"},
}
# How the code calls the module of TensorRT.
MODULES = {"module", "trt", "tensorrt", "_tensorrt"}
# Objects of Python, numpy and click whose attributes are not TensorRT's.
PLAIN: list[Any] = [
    builtins, str, bytes, bytearray, int, float, list, dict, tuple, set, frozenset, Exception, ImportError, OSError,
    pathlib, Path, re, re.compile(""), json, logging, logging.getLogger(), functools, functools.partial, threading,
    threading.Lock(), threading.Event(), ctypes, ctypes.CDLL, ctypes.c_int(), ctypes.c_char_p(), importlib, click, np,
    np.zeros(1), np.dtype("i8"), np.random.default_rng(0), ast, Iterator, memoryview, io.StringIO, sys, shutil, time,
    math, os, contextlib, contextlib.ExitStack, tempfile, collections, collections.deque, dataclasses,
]  # fmt: skip


def names_everywhere() -> set[str]:
    """Return the names of classes, functions and members that all versions have."""
    return set.intersection(*(known_to(version) for version in API))


def known_to(version: str) -> set[str]:
    return {*API[version], *(member for members in API[version].values() for member in members or [])}


@functools.cache
def own_names() -> set[str]:
    """Return the names our own code defines: functions, classes, arguments, fields, and attributes that are set."""
    names: set[str] = set()
    places = ("fatdeploy/*.py", "export/**/*.py", "runtimes/**/*.py")
    paths = [path for pattern in places for path in ROOT.glob(pattern)]
    for path in (path for path in paths if path.parent.name not in UNRELATED):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign):
                names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                names.add(node.target.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and of_self(node):
                names.add(node.attr)
    return names


def of_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "self"


@functools.cache
def plain_names() -> set[str]:
    return {name for kind in PLAIN for name in dir(kind)}


@functools.cache
def cuda_names() -> set[str]:
    """Return the names of CUDA's runtime and driver, and of their types."""
    modules = [importlib.import_module(f"cuda.bindings.{name}") for name in ("runtime", "driver")]
    types = [getattr(owner, name) for owner in modules for name in dir(owner) if isinstance(getattr(owner, name), type)]
    return {name for owner in (*modules, *types) for name in dir(owner)} | {"bindings"}


def attributes_of(source: str) -> Iterator[tuple[str, ast.Attribute]]:
    """Yield every attribute that code uses, with the function around it."""

    def walked(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Attribute]]:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Attribute):
            yield function, node
        for child in ast.iter_child_nodes(node):
            yield from walked(child, function)

    yield from walked(ast.parse(source), "")


def chain_of(node: ast.Attribute) -> list[str]:
    """Return the names after the module of TensorRT, ``ILogger`` and ``log`` of ``module.ILogger.log``."""
    names = [node.attr]
    inner = node.value
    while isinstance(inner, ast.Attribute):
        if inner.attr in MODULES:
            return names[::-1]
        names.append(inner.attr)
        inner = inner.value
    return names[::-1] if isinstance(inner, ast.Name) and inner.id in MODULES else []


def wrong_attributes(source: str) -> list[str]:
    """Return a reason for each attribute that some version lacks."""
    reasons = []
    for function, node in attributes_of(source):
        name, chain = node.attr, chain_of(node)
        if name.startswith("__") and name.endswith("__"):
            continue
        if chain:
            if function in RTX_ONLY.get(chain[0], ()):
                continue
            lacking = [version for version in API if not has(version, chain)]
            reasons += [f"{'.'.join(chain)} is not in {version}" for version in lacking]
            continue
        if function in RTX_ONLY.get(name, ()) or name in own_names() | plain_names() | cuda_names():
            continue
        if name not in names_everywhere():
            lacking = [version for version in API if name not in known_to(version)]
            reasons.append(f"{name} is not in {', '.join(lacking)}, in our code or in CUDA")
    return reasons


def has(version: str, chain: list[str]) -> bool:
    if chain[0] not in API[version]:
        return False
    members = API[version][chain[0]]
    return len(chain) == 1 or (members is not None and chain[1] in members) or chain[1].startswith("__")


def test_files_of_the_build_are_checked() -> None:
    names = {str(path.relative_to(ROOT)) for path in FILES}
    assert {
        "runtimes/engines/trt/build/build.py",
        "runtimes/engines/trt/build/network.py",
        "runtimes/engines/trt/modules.py",
        "runtimes/doctor/cuda_driver.py",
    } <= names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_attribute_exists_in_all_versions(path: Path) -> None:
    assert wrong_attributes(path.read_text()) == []


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("builder.platform_has_fast_fp16", "platform_has_fast_fp16 is not in tensorrt 11.4.0, tensorrt_rtx 1.7.1, in"),
        ("builder.creat_network(0)", "creat_network is not in tensorrt 10.16.1, tensorrt 11.4.0, tensorrt_rtx 1.7.1"),
        ("plan.module.BuilderFlag.FP16", "BuilderFlag.FP16 is not in tensorrt 11.4.0"),
        ("module.BuilderFlag.FP32", "BuilderFlag.FP32 is not in tensorrt 10.16.1"),
        ("trt.IInt8Calibrator", "IInt8Calibrator is not in tensorrt 11.4.0"),
        ("module.ComputeCapability", "ComputeCapability is not in tensorrt 10.16.1"),
        (
            "config.set_compute_capability(x, 0)",
            "set_compute_capability is not in tensorrt 10.16.1, tensorrt 11.4.0, in",
        ),
        ("cudart.cudaGraphLunch(x)", "cudaGraphLunch is not in tensorrt 10.16.1"),
    ],
)
def test_an_attribute_that_some_version_lacks_is_reported(code: str, reason: str) -> None:
    assert any(text.startswith(reason) for text in wrong_attributes(f"def any(): {code}"))


def test_an_attribute_of_all_versions_is_accepted() -> None:
    code = (
        "context.execute_async_v3(module.Runtime); cudart.cudaGraphLaunch(cudart.cudaMemcpyKind.cudaMemcpyDeviceToHost)"
    )
    assert wrong_attributes(f"def any(): {code}") == []
    assert wrong_attributes("def aim(): config.set_compute_capability(module.ComputeCapability, 0)") == []
