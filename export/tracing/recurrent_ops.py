"""Recurrences in a graph: ONNX's LSTM and GRU, and a Scan of any other."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._higher_order_ops.scan import scan

from fatdeploy.export.reference.attention import LayerState
from fatdeploy.export.reference.recurrent.cells import Cell, ConnectedCell

# The places of ONNX's gates among PyTorch's: i, o, f, c from i, f, c, o; z, r, h from r, z, h.
LSTM_ORDER, GRU_ORDER = (0, 3, 1, 2), (1, 0, 2)


def recurrent_op(x: Tensor, cell: Cell, valid: Tensor | None, past: LayerState) -> tuple[Tensor, LayerState]:
    """Return the states [B, L, M] of one LSTM or GRU op, zero at padding, and the last state."""
    is_lstm, ways = isinstance(cell, nn.LSTM), 2 if cell.bidirectional else 1
    length, batch, width = x.shape[1], x.shape[0], cell.hidden_size
    lengths = None if valid is None else valid.sum(1).to(torch.int32)
    attributes: dict[str, Any] = {"hidden_size": width, "direction": "bidirectional" if ways == 2 else "forward"}
    outputs, *last = torch.onnx.ops.symbolic_multi_out(
        "LSTM" if is_lstm else "GRU",
        (x.transpose(0, 1), *_weights(cell), lengths, *(tensor[None] for tensor in past)),
        attributes if is_lstm else {**attributes, "linear_before_reset": 1},
        dtypes=(x.dtype,) * (3 if is_lstm else 2),
        shapes=((length, ways, batch, width), *((ways, batch, width),) * (2 if is_lstm else 1)),
        version=22,
    )
    # [L, ways, B, M / ways] to [B, L, M].
    return outputs.permute(2, 0, 1, 3).flatten(2), tuple(tensor[0] for tensor in last)


def _weights(cell: Cell) -> tuple[Tensor, Tensor, Tensor]:
    """Return the matrices of inputs and states and the biases, by way, with gates in ONNX's order."""
    order = LSTM_ORDER if isinstance(cell, nn.LSTM) else GRU_ORDER
    ways = ["l0", "l0_reverse"] if cell.bidirectional else ["l0"]

    def ordered(name: str) -> Tensor:
        # Slices, not chunks: the optimiser computes only ops with one result while it exports.
        gates, size = getattr(cell, name), cell.hidden_size
        return torch.cat([gates[place * size : (place + 1) * size] for place in order])

    inputs, states = (torch.stack([ordered(f"weight_{part}_{way}") for way in ways]) for part in ("ih", "hh"))
    biases = torch.stack([torch.cat([ordered(f"bias_ih_{way}"), ordered(f"bias_hh_{way}")]) for way in ways])
    return inputs, states, biases


def connected_scan(
    x: Tensor, scored: Tensor, cell: ConnectedCell, context: Tensor, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Return AT's states [B, n, L, M] after inputs x, and the last one [B, n, M]."""

    def advance(state: Tensor, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        following = cell(state, *inputs, context)
        return following, following.clone()  # torch refuses outputs that are one tensor

    last, states = scan(advance, hidden, (x.movedim(2, 0), scored.movedim(2, 0)))
    return states.movedim(0, 2), last


def scanned(
    advance: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], state: Tensor, inputs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the last state and all outputs [t, …] of a Scan over inputs [t, …]."""
    last, outputs = scan(advance, state.contiguous(), inputs.contiguous())
    return last, outputs
