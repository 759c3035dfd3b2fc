"""Every family gives the logits of transformers on padded batches, and through our loop the targets of ``generate``."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fatdeploy.export.models.hugging_face.folder import model_from_folder
from fatdeploy.export.proof.original import AllInDouble
from fatdeploy.export.reference.model import ReferenceModel
from tests.support.hugging_face_folders import MODELS, write_folder

in_every_family = pytest.mark.parametrize("family", MODELS)


def drawn_batch(model: ReferenceModel, draw: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a padded batch of sources, its mask, and targets that are read at once."""
    config = model.config
    lengths = draw.integers(1, min(config.max_source, 20) + 1, size=3)
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    source = ordinary(draw, config.source_vocab_size or config.vocab_size, mask.shape, config.pad_id)
    target = ordinary(draw, config.vocab_size, (3, int(draw.integers(1, 20))), config.pad_id)
    target[:, 0] = config.bos_id
    return source.masked_fill(~mask, config.pad_id), mask, target


def ordinary(draw: np.random.Generator, vocabulary: int, shape: tuple[int, ...], pad: int) -> torch.Tensor:
    """Return random ids; padding among them would move the positions of M2M100."""
    return torch.from_numpy(draw.choice(np.delete(np.arange(vocabulary), pad), shape))


@in_every_family
@pytest.mark.parametrize("seed", range(50))
@torch.inference_mode()
def test_logits_match_transformers(family: str, seed: int, tmp_path: Path) -> None:
    folder = write_folder(family, seed, tmp_path)
    theirs = folder.model()
    ours = model_from_folder(tmp_path)[0].double()
    source, mask, target = drawn_batch(ours, np.random.default_rng(seed))
    with AllInDouble():
        expected = theirs(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target).logits
    assert expected.dtype is torch.float64
    difference = (ours(source, mask, target) - expected).abs().max()
    assert difference <= 1e-6 * expected.abs().max()
