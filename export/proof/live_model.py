"""Compare a bundle with its live model on fresh random sources, ties counted apart."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np

from fatdeploy.bundle import Bundle
from fatdeploy.certificate import LogitAgreement, OriginalRecord
from fatdeploy.errors import SpecMismatch, in_one_line
from fatdeploy.export.models.eager import EagerEngine
from fatdeploy.export.models.exportable import Choices, Exportable, exportable_model
from fatdeploy.export.models.loading import Lengths, model_from_source
from fatdeploy.export.proof.original import original_record
from fatdeploy.manifest import PROBES
from fatdeploy.runtimes.defaults import default_options
from fatdeploy.runtimes.engines.protocol import Engine
from fatdeploy.runtimes.proof.lockstep import NOISE, TIE_MARGINS, Comparison, compared, logit_agreement
from fatdeploy.runtimes.proof.probes import read_probes
from fatdeploy.spec import Mask, ModelSpec, Tokens

BATCH, NEW_TOKENS = 8, 48

Batches = list[tuple[Tokens, Mask]]
# Shows how far a list has come while somebody goes through it.
Watched = Callable[[Batches], AbstractContextManager[Iterable[tuple[Tokens, Mask]]]]


def compared_with_model(
    bundle: Bundle, engine: Engine[Any], source: str, count: int, seed: int, watched: Watched
) -> tuple[LogitAgreement, OriginalRecord | None]:
    """Compare a bundle with the model that it was exported from; a miss is ParityFailed.

    An imported model is compared with its original as well, on the bundle's probes.
    """
    model, origin = model_from_source(source, lengths=Lengths(bundle.spec.max_source, bundle.spec.max_target))
    exportable = _like(bundle.spec, exportable_model(model), source)
    reference = EagerEngine(exportable)
    steps = min(NEW_TOKENS, bundle.spec.max_target)
    with watched(list(drawn_batches(bundle.spec, count, seed))) as batches:
        agreement = logit_agreement(
            [compared_by_decisions(engine, reference, ids, mask, steps) for ids, mask in batches]
        )
    if origin.original is None:
        return agreement, None
    probes = read_probes(bundle.file(PROBES))
    # The bundle's own defaults, not the folder's settings read again: they may have changed since.
    return agreement, original_record(origin.original, exportable, engine, probes, default_options(bundle))


def compared_by_decisions(
    engine: Engine[Any], reference: EagerEngine, ids: Tokens, mask: Mask, steps: int
) -> Comparison:
    """Compare a batch; rows whose encoder decides within the noise may differ, and count as ties if they do."""
    comparison = compared(engine, reference, ids, mask, steps)
    margins = reference.decision_margins(ids, mask)
    return comparison if margins is None else replace(comparison, undecided=margins <= TIE_MARGINS * NOISE)


def _like(spec: ModelSpec, model: Exportable, source: str) -> Exportable:
    """Return the model with the choices of the bundle's export; another model is refused."""
    choices = Choices(
        max_source=spec.max_source,
        max_target=spec.max_target,
        top_k=spec.top_k,
        attention_layer=None if spec.alignment is None else spec.alignment.layer,
    )
    chosen = exportable_model(model.inner, choices)
    # A choice of the exporter for the target, which says nothing about the model.
    chosen = chosen.with_spec(replace(chosen.spec, row_positions=spec.row_positions))
    model_values, bundle_values = chosen.spec.to_dict(), spec.to_dict()
    reasons = [
        f"{name} is {value}, the bundle's {bundle_values[name]}"
        for name, value in model_values.items()
        if value != bundle_values[name]
    ]
    if reasons:
        raise SpecMismatch(in_one_line(f"{source} is not the model of this bundle", reasons))
    return chosen


def drawn_batches(spec: ModelSpec, count: int, seed: int) -> Iterator[tuple[Tokens, Mask]]:
    """Yield random sources of random lengths, padded, in batches of up to eight."""
    draw = np.random.default_rng(seed)
    ordinary = spec.ordinary_ids()
    for start in range(0, count, BATCH):
        lengths = draw.integers(1, spec.max_source + 1, min(BATCH, count - start))
        mask = np.arange(lengths.max()) < lengths[:, None]
        yield np.where(mask, draw.choice(ordinary, mask.shape), spec.pad_id), mask
