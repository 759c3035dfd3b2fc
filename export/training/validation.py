"""How good a model in training is: the loss of validation pairs, and the errors of its own decodes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.training.batches import IdPair, batch_of
from fatdeploy.export.training.losses import Objective
from fatdeploy.export.training.settings import Criterion
from fatdeploy.export.training.tokenizers import TextCoder
from fatdeploy.export.training.trainer import ValidationScore, finite
from fatdeploy.pairs import Pair
from fatdeploy.runtimes.decoding.loop import decode
from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.runtimes.evaluation.metrics import bleu, chrf, sequence_error_rate, token_error_rate

BATCH = 256
# A model that has not learned to stop yet would decode to the last position for every source.
LONGER_THAN_LONGEST = 1.5


@dataclass(frozen=True)
class Validation:
    """Pairs that are not trained on; a source may have several accepted targets.

    BLEU and chrF are computed only to select by them.
    """

    pairs: Sequence[Pair]
    ids: Sequence[IdPair]
    coder: TextCoder
    select_by: Criterion = "token_error_rate"

    def __call__(self, model: ReferenceModel) -> ValidationScore:
        """Return the score of the current model."""
        loss = finite(self._loss(model), "the validation loss")  # before any decoding
        references: dict[tuple[int, ...], list[str]] = {}
        for pair, ids in zip(self.pairs, self.ids, strict=True):
            references.setdefault(tuple(ids.source), []).append(pair.target)
        sources = sorted(references, key=len)
        texts = self._decoded(model, sources)
        accepted = [references[source] for source in sources]
        return ValidationScore(
            loss=loss,
            token_error_rate=token_error_rate(texts, accepted).value,
            sequence_error_rate=sequence_error_rate(texts, accepted).value,
            bleu=bleu(texts, accepted).value if self.select_by == "bleu" else None,
            chrf=chrf(texts, accepted).value if self.select_by == "chrf" else None,
        )

    def _decoded(self, model: ReferenceModel, sources: list[tuple[int, ...]]) -> list[str]:
        longest = int(LONGER_THAN_LONGEST * max(len(ids.target) for ids in self.ids)) + 2
        options = DecodeOptions(max_new_tokens=min(longest, model.config.max_target))
        if model.config.parallel:
            options = DecodeOptions()
        engine, hypotheses = EagerEngine(model), []
        for start in range(0, len(sources), BATCH):
            hypotheses += decode(engine, sources[start : start + BATCH], options)
        return [self.coder.text(hypothesis.tokens) for hypothesis in hypotheses]

    @torch.inference_mode()
    def _loss(self, model: ReferenceModel) -> float:
        by_length = sorted(self.ids, key=lambda ids: len(ids.source))
        total, count = 0.0, 0
        for start in range(0, len(by_length), BATCH):
            batch = batch_of(by_length[start : start + BATCH], model.config)
            total += float(Objective().losses(model, batch).tokens) * batch.n_tokens
            count += batch.n_tokens
        return total / count
