"""What an error costs, compared with errors that are really made."""

import numpy as np
import pytest
import torch

from fatdeploy.export.models.exportable import exportable_model
from fatdeploy.export.quantize.calibrate import CalibrationRow
from fatdeploy.export.quantize.planning.sensitivity import LOGITS, sensitivities_of
from fatdeploy.manifest import EMBEDDING
from tests.support.bundles import model_of

DRAW = np.random.default_rng(0)
ROWS = [CalibrationRow(DRAW.integers(4, 60, 6), DRAW.integers(4, 60, 7)) for _ in range(24)]
MODULES = ("encoder.layers.0.ffn.out", "decoder.layers.1.attention.out", "decoder.layers.1.ffn.out")


def divergence(name: str, noise: float) -> float:
    """Return the mean divergence of the next token's distribution if a module's results are noisy."""
    model = model_of("transformer-tiny")
    sources, targets = (torch.tensor(np.stack([getattr(row, part) for row in ROWS])) for part in ("source", "target"))
    inputs = torch.cat([torch.full((len(ROWS), 1), model.spec.bos_id), targets], 1)
    generator = torch.Generator().manual_seed(1)

    def disturbed(_module: object, _inputs: object, result: torch.Tensor) -> torch.Tensor:
        return result + noise * torch.randn(result.shape, generator=generator)

    with torch.no_grad():
        exact = model(sources, torch.ones_like(sources, dtype=torch.bool), inputs).log_softmax(-1)
        hook = model.get_submodule(name).register_forward_hook(disturbed)
        try:
            noisy = model(sources, torch.ones_like(sources, dtype=torch.bool), inputs).log_softmax(-1)
        finally:
            hook.remove()
    return float((exact.exp() * (exact - noisy)).sum(-1).mean())


def test_small_errors_cost_what_the_gradients_say() -> None:
    model = exportable_model(model_of("transformer-tiny"))
    sensitivities = sensitivities_of(model, dict.fromkeys(MODULES, 32), ROWS)
    assert sensitivities.keys() == {*MODULES, EMBEDDING, LOGITS}
    for name in MODULES:
        noise = 0.02
        predicted = float(sensitivities[name].sum()) * noise**2
        assert divergence(name, noise) == pytest.approx(predicted, rel=0.5)
    assert sensitivities[LOGITS].shape == (model.spec.vocab_size,)
    assert 0 < sensitivities[LOGITS].sum() < 0.5


def test_modules_with_other_results_are_left_out_and_the_model_stays_as_it_was() -> None:
    inner = model_of("transformer-tiny")
    before = {name: parameter.detach().clone() for name, parameter in inner.named_parameters()}
    required = [parameter.requires_grad for parameter in inner.parameters()]
    found = sensitivities_of(exportable_model(inner), {MODULES[0]: 33, "nothing": 32}, ROWS[:2])
    assert found.keys() == {EMBEDDING, LOGITS}
    assert all(torch.equal(parameter, before[name]) for name, parameter in inner.named_parameters())
    assert [parameter.requires_grad for parameter in inner.parameters()] == required
    assert all(parameter.grad is None for parameter in inner.parameters())


@pytest.mark.parametrize("preset", ["fat-tiny", "at-linear-tiny"])
def test_every_matrix_of_a_preset_is_reached(preset: str) -> None:
    model = exportable_model(model_of(preset))
    columns = {
        name: module.out_features for name, module in model.inner.named_modules() if isinstance(module, torch.nn.Linear)
    }
    found = sensitivities_of(model, columns, ROWS[:4])
    assert columns.keys() - {"copy", "length"} <= found.keys()
