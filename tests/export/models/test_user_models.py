"""A model of your own: the example of its page through the command line, and every mistake in one line."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from torch import Tensor, nn

from fatdeploy.bundle import Bundle
from fatdeploy.cli import main
from fatdeploy.errors import ConfigError, ExportFailed, SpecMismatch
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.models.user_models import check_user_model
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want
from fatdeploy.spec import StateSpec
from fatdeploy.targets import Dialect
from tests.support.bundles import shared_bundle
from tests.support.pages import blocks

[EXAMPLE] = [block.code for block in blocks("python") if block.page.name == "your-own-model.md"]
TARGETS: list[tuple[str, Dialect]] = [("ort-cpu", "ort"), ("onnx", "standard")]


def build() -> Any:
    names: dict[str, Any] = {}
    exec(compile(EXAMPLE, "your-own-model.md", "exec"), names)
    return names["build"]()


def exported(folder: Path, source: str, out: Path, *options: str) -> Result:
    """Run the command in a folder, without leaving its modules or its entry in ``sys.path`` to other tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", [*sys.path])
        result = CliRunner().invoke(main, ["-q", "export", source, "--out", str(out), *options])
    sys.modules.pop(source.partition(":")[0], None)
    return result


@pytest.fixture(params=TARGETS, ids=lambda target: target[0])
def bundle(request: pytest.FixtureRequest, tmp_path: Path) -> Bundle:
    target, dialect = request.param

    def write(out: Path) -> None:
        (tmp_path / "my_model.py").write_text(EXAMPLE)
        result = exported(tmp_path, "my_model:build", out, "--target", target)
        assert (result.exit_code, result.stderr) == (0, "")
        assert "624 tokens of 13 rows are the reference's" in result.stdout

    bundle = shared_bundle(f"own-{target}", write)
    assert (bundle.manifest.dialect, bundle.manifest.source.name) == (dialect, "my_model:build")
    return bundle


def test_the_model_of_the_page_is_decoded_as_in_pytorch(bundle: Bundle) -> None:
    draw = np.random.default_rng(0)
    sources = [draw.integers(3, 64, length).tolist() for length in (1, 2, 5, 31, 32, 7, 8, 9)]
    expected = decode(EagerEngine(build()), sources)
    assert decode(OrtEngine(bundle), sources) == expected
    assert len({hypothesis.tokens for hypothesis in expected}) == 8
    assert sum(len(set(hypothesis.tokens)) for hypothesis in expected) >= 8 * 6


def stepped(engine: Engine[Any]) -> list[np.ndarray]:
    """Return logits and best tokens of calls; between them, rows are copied, swapped and dropped."""
    source = np.array([[5, 6, 7, 8], [40, 41, 0, 0], [9, 10, 11, 0]])
    state = engine.encode(source, source != 0, Capacity(2, 12))
    first = engine.step(np.array([[1, 30], [1, 31], [1, 32]]), state, Want.LOGITS).logits
    arrays = [np.array(first)]
    engine.reorder(state, np.array([0, 0, 1, 1, 2, 2]))
    arrays.append(np.array(engine.step(np.arange(20, 26)[:, None], state, Want.LOGITS).logits))
    engine.reorder(state, np.array([5, 4, 1, 0]))
    last = engine.step(np.arange(8).reshape(4, 2) + 12, state, Want.TOPK)
    return [*arrays, np.array(last.top_log_probs), np.array(last.top_ids)]


def test_rows_of_one_source_are_decoded_separately(bundle: Bundle) -> None:
    arrays, references = stepped(OrtEngine(bundle)), stepped(EagerEngine(build()))
    assert [array.shape for array in arrays] == [(3, 2, 64), (6, 1, 64), (4, 2, 16), (4, 2, 16)]
    for array, expected in zip(arrays, references, strict=True):
        np.testing.assert_allclose(array, expected, rtol=0, atol=1e-5 * max(1.0, float(np.abs(expected).max())))
    # Two rows of one source that read different tokens have different logits.
    assert np.abs(arrays[1][0] - arrays[1][1]).max() > 0.1


def test_a_request_for_a_hidden_state_that_the_model_does_not_return_is_refused(bundle: Bundle) -> None:
    for engine in (OrtEngine(bundle), EagerEngine(build())):
        state = engine.encode(np.array([[5]]), np.ones((1, 1), bool), Capacity(1, 4))
        with pytest.raises(SpecMismatch, match="its hidden state is not available"):
            engine.step(np.array([[1]]), state, Want.HIDDEN)
        assert engine.step(np.array([[1]]), state, Want.LOGITS).hidden is None
        assert engine.output_rows(np.array([3])) is None


@pytest.mark.parametrize(
    ("source", "options", "reason"),
    [
        ("no_such_module:build", [], "cannot load no_such_module:build: No module named 'no_such_module'"),
        (
            "own_model:no_such_factory",
            [],
            "cannot load own_model:no_such_factory: module 'own_model' has no attribute",
        ),
        ("own_model:number", [], "int is not a model that can be exported: it must be a torch.nn.Module"),
        ("own_model:build", ["--attention", "0"], "the exporter does not know the attention of your own model"),
        (
            "own_model:",
            [],
            "own_model: is not g2p, a preset (see: fatdeploy presets), a Hugging Face folder, a checkpoint folder",
        ),
    ],
)
def test_a_factory_that_returns_no_model_is_one_line(
    tmp_path: Path, source: str, options: list[str], reason: str
) -> None:
    (tmp_path / "own_model.py").write_text(f"{EXAMPLE}\n\ndef number():\n    return 3\n")
    result = exported(tmp_path, source, tmp_path / "out", *options)
    assert result.exit_code == 1
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["own_model.py"]


def test_everything_that_a_model_lacks_is_listed_at_once() -> None:
    for model in (object(), nn.Linear(2, 2), nn.Module()):
        reasons = ["it has no spec", *(f"it has no method {name}" for name in ("encode", "start", "step"))]
        reasons = [*["it must be a torch.nn.Module"] * (not isinstance(model, nn.Module)), *reasons]
        reasons += ["it has no method forward"] * (not isinstance(model, nn.Linear))
        with pytest.raises(ConfigError, match="not a model that can be exported") as caught:
            exportable_model(model)
        listed = str(caught.value).partition(": ")[2].split("; ")
        assert [re.split(r",| \(", reason)[0] for reason in listed] == reasons


def test_an_own_model_with_a_ring_is_refused_with_what_to_write_instead() -> None:
    model = build()
    ring = StateSpec("keys", "float32", ("rows", 1, 8, 4), "ring")
    model.spec = replace(model.spec, state=(ring,), tokens_per_call=4)
    with pytest.raises(ConfigError, match=r'its state has a "ring", which only our own decoders have: use "recurrent"'):
        exportable_model(model)


def changed(method: str, change: Callable[..., Any]) -> nn.Module:
    """Return the page's model with a changed result of one of its methods."""
    model = build()
    old = getattr(model, method)
    setattr(model, method, lambda *arguments: change(old(*arguments), *arguments))
    return model


def step_result(change: Callable[[Tensor, Tensor, Any], tuple[Tensor, tuple[Tensor, ...]]]) -> nn.Module:
    return changed("step", lambda output, _, state, __: change(output[0], output[1][0], state))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            lambda: changed("encode", lambda tensors, *_: (*tensors, *tensors)),
            "encode returned 2 tensors, the spec describes 1",
        ),
        (
            lambda: changed("encode", lambda tensors, *_: (tensors[0][..., :31],)),
            r"encode returned encoded as float32 \[2, 3, 31\], the spec says float32 \[2, 3, 32\]",
        ),
        (
            lambda: changed("start", lambda tensors, *_: (tensors[0].double(),)),
            r"start returned sum as float64 \[2, 32\], the spec says float32 \[2, 32\]",
        ),
        (
            lambda: step_result(lambda logits, sums, _: (logits, (sums[:1],))),
            r"step returned sum as float32 \[1, 32\], the spec says float32 \[2, 32\]",
        ),
        (
            lambda: step_result(lambda logits, sums, _: (logits[:, [0] * 4], (sums,))),
            r"step returned logits \[2, 4, 64\], expected \[2, 1, 64\]",
        ),
        (
            lambda: changed("forward", lambda logits, *_: logits[..., 1:]),
            r"forward returned logits \[2, 4, 63\], expected \[2, 4, 64\]",
        ),
    ],
)
def test_a_model_that_does_not_fit_its_spec_is_refused(model: Callable[[], nn.Module], reason: str) -> None:
    with pytest.raises(ExportFailed, match=f"^the model does not fit its spec: {reason}$"):
        check_user_model(exportable_model(model()))


def test_memory_and_state_that_are_both_wrong_are_listed_at_once() -> None:
    model = build()
    model.spec = replace(model.spec, memory=(), state=())
    with pytest.raises(
        ExportFailed, match=r"encode returned 1 tensors, the spec describes 0; start returned 1 tensors"
    ):
        check_user_model(exportable_model(model))


def test_steps_that_forget_what_came_before_are_named_with_their_position() -> None:
    def forgetful(logits: Tensor, sums: Tensor, state: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        # Positions 0 and 1 are right; what the second step should have kept is missing from the third step onwards.
        return logits, (sums if int(state.position) != 1 else torch.zeros_like(sums),)

    with pytest.raises(ExportFailed, match=r"step and forward disagree at position 2 by .* more than 1\.\de-05"):
        check_user_model(exportable_model(step_result(forgetful)))


def test_nan_does_not_count_as_agreement() -> None:
    model = step_result(lambda logits, sums, _: (logits * torch.nan, (sums,)))
    with pytest.raises(ExportFailed, match="step and forward disagree at position 0 by nan"):
        check_user_model(exportable_model(model))


def test_a_model_with_short_targets_is_checked_up_to_its_limit() -> None:
    model = build()
    model.spec = replace(model.spec, max_source=1, max_target=1)
    check_user_model(exportable_model(model))
