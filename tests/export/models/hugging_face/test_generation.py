"""Imported models, decoded by our loop, say what ``generate`` says: the same tokens, the same scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.hugging_face.folder import model_from_folder
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.spec import ModelSpec
from tests.support.hugging_face_folders import MODELS, write_folder

TOLERANCE = 1e-4
in_every_family = pytest.mark.parametrize("family", MODELS)


@dataclass(frozen=True)
class Target:
    """Tokens without start and EOS, and the score of the whole target."""

    tokens: tuple[int, ...]
    score: float


def generated(
    model: PreTrainedModel, sources: Sequence[Sequence[int]], options: DecodeOptions, spec: ModelSpec
) -> list[Target]:
    """Return the best target of ``generate`` for each source of one padded batch."""
    lengths = np.array([len(source) for source in sources])
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    ids = torch.full(mask.shape, spec.pad_id)
    ids[mask] = torch.tensor([token for source in sources for token in source])
    model.generation_config = GenerationConfig(
        pad_token_id=spec.pad_id, eos_token_id=spec.eos_id, decoder_start_token_id=spec.bos_id
    )
    out = model.generate(
        ids,
        attention_mask=mask.long(),
        num_beams=options.num_beams,
        max_new_tokens=options.max_new_tokens,
        min_new_tokens=options.min_new_tokens,
        # The cache of T5 has as many layers as the encoder, and fails if the decoder has more.
        use_cache=False,
        suppress_tokens=list(options.suppress_tokens),
        return_dict_in_generate=True,
        output_scores=True,
    )
    log_probs = torch.stack(out.scores, 1).log_softmax(-1)
    targets = []
    for row, new in enumerate(out.sequences[:, 1:].tolist()):
        length = (*new, spec.eos_id).index(spec.eos_id)
        if options.num_beams > 1:
            score = out.sequences_scores[row]
        else:
            score = sum(log_probs[row, step, token] for step, token in enumerate(new[: length + 1]))
        targets.append(Target(tuple(new[:length]), float(score)))
    return targets


def drawn_sources(draw: np.random.Generator, spec: ModelSpec, count: int) -> list[list[int]]:
    """Return sources of different lengths without padding inside."""
    ordinary = np.delete(np.arange(spec.n_source_ids), spec.pad_id)
    return [draw.choice(ordinary, size=length).tolist() for length in draw.permutation(12)[:count] + 1]


@in_every_family
@pytest.mark.parametrize("beams", range(1, 9))
@pytest.mark.parametrize("shortest", [0, 6])
def test_targets_match_generate(family: str, beams: int, shortest: int, tmp_path: Path) -> None:
    theirs = write_folder(family, 100 * beams + shortest, tmp_path).model()
    engine = EagerEngine(model_from_folder(tmp_path)[0].double())
    sources = drawn_sources(np.random.default_rng(beams), engine.spec, 3)
    options = DecodeOptions(
        num_beams=beams,
        max_new_tokens=12,
        min_new_tokens=shortest,
        suppress_tokens=[engine.spec.pad_id],  # padding that is generated would move the positions of M2M100
        scores=True,
    )
    expected = generated(theirs, sources, options, engine.spec)
    results = decode(engine, sources, options)
    assert [result.tokens for result in results] == [target.tokens for target in expected]
    assert [result.score for result in results] == pytest.approx([target.score for target in expected], abs=TOLERANCE)


@in_every_family
def test_drawn_models_are_lively(family: str, tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    targets = []
    for seed in range(8):
        write_folder(family, seed, tmp_path)
        engine = EagerEngine(model_from_folder(tmp_path)[0])
        options = DecodeOptions(max_new_tokens=12, min_new_tokens=6)
        targets += decode(engine, drawn_sources(draw, engine.spec, 8), options)
    assert len({target.tokens for target in targets}) >= 40
    assert np.mean([len(set(target.tokens)) for target in targets]) >= 3
