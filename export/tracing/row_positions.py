"""Which models are traced with a position per row, so that rows of one decode may be at different positions."""

from dataclasses import replace

from fatdeploy.export.models.exportable import Exportable, ExportableReference
from fatdeploy.export.reference.sparse.kinds import ring_length
from fatdeploy.export.tracing.dialect_ort import WIDTH_UNIT
from fatdeploy.targets import TargetRecord


def with_row_positions(model: Exportable, target: TargetRecord) -> Exportable:
    """Return the model with the contract that its target's graphs can have; the model itself if it has it."""
    row_positions = target.row_positions and _can_have_row_positions(model)
    if model.spec.row_positions == row_positions:
        return model
    return model.with_spec(replace(model.spec, row_positions=row_positions))


def _can_have_row_positions(model: Exportable) -> bool:
    """Whether every op of the decoder that depends on the position exists for a position per row.

    These are the table of positions, plain causal caches, rings, whose window is computed for each row, and recurrent
    state, which has no positions. Relative scores would have to be computed for each row.
    """
    if not isinstance(model, ExportableReference):
        return False  # a model of the user expects one number
    config = model.inner.config
    if ring_length(config):
        return config.relative == "none"
    plain = config.decoder_attention in ("scaled_dot", "dot") and config.relative == "none"
    without_positions = config.decoder_attention in ("linear", "none") or config.recurrent_decoder
    return without_positions or (plain and config.target_heads.width % WIDTH_UNIT == 0)
