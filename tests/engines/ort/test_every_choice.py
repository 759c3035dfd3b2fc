"""Every model choice on ONNX Runtime; compatible choices share an export, because exporting is slow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fatdeploy.errors import ConfigError
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.pipeline import Origin, write_bundle
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.engines.ort.engine import OrtEngine
from tests.support.choices import DECODER, DIRECTIONS, ENCODER, PLAIN, REST, name_of, tiny

SMALL = {"encoder_layers": 1, "decoder_layers": 1, "max_source": 40, "max_target": 48}


def goes_together(changes: dict[str, Any], other_changes: dict[str, Any]) -> bool:
    if changes.keys() & other_changes.keys():
        return False
    try:
        config_from_preset("fast-tiny", **{**PLAIN, **SMALL, **changes, **other_changes})
    except ConfigError:
        return False
    return True


def directed() -> list[dict[str, Any]]:
    """Return the encoder's choices: each attention in one direction, and linear in both, where its form differs."""
    kept: list[dict[str, Any]] = []
    for index, choice in enumerate(ENCODER):
        alike = len(DIRECTIONS) if "encoder_direction" in choice else 1
        turn = (index // alike) % alike == index % alike
        if turn or (choice["encoder_attention"] == "linear" and choice["encoder_direction"] == "both"):
            kept.append(choice)
    return kept


def joined() -> list[dict[str, Any]]:
    """Return the encoder's choices, each joined with one of the decoder and one of the rest while any are left."""
    together = directed()
    for others in (DECODER, REST):
        waiting = list(others)
        for index, choice in enumerate(together):
            fitting = next((other for other in waiting if goes_together(choice, other)), None)
            if fitting is not None:
                waiting.remove(fitting)
                together[index] = {**choice, **fitting}
        together += waiting
    return together


JOINED = joined()


def test_no_choice_is_left_out() -> None:
    for choice in (*directed(), *DECODER, *REST):
        assert any(choice.items() <= together.items() for together in JOINED)
    values = [(name, value) for choice in ENCODER for name, value in choice.items()]
    assert all(any(choice.get(name) == value for choice in JOINED) for name, value in values)


@pytest.mark.parametrize("changes", JOINED, ids=name_of)
def test_every_choice_gives_the_references_tokens(changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny({**SMALL, **changes})
    engine, reference = (
        OrtEngine(write_bundle(model, tmp_path / "bundle", origin=Origin(name="choice"))),
        EagerEngine(model),
    )
    draw = np.random.default_rng(3)
    sources = [draw.integers(3, model.spec.n_source_ids, length).tolist() for length in (1, 2, 9, 40)]
    options = DecodeOptions(max_new_tokens=24)
    expected = decode(reference, sources, options)
    assert decode(engine, sources, options) == expected
    assert [decode(engine, [source], options)[0] for source in sources] == expected
