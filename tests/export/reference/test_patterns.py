"""Clusters, sorted blocks and mixing without attention: decisions, padding, numbers without limits, refusals."""

from typing import Any

import pytest
import torch
from torch import Tensor

from fatdeploy.errors import ConfigError
from fatdeploy.export.reference.attention import Visible
from fatdeploy.export.reference.decoder import Call
from fatdeploy.export.reference.encoder import Source
from fatdeploy.export.reference.mixing.aft import DecayingMixing, PositionMixing
from fatdeploy.export.reference.patterns.decisions import NEVER, clearness
from fatdeploy.export.reference.patterns.routing import RoutingAttention
from fatdeploy.export.reference.patterns.sinkhorn import SinkhornAttention, sorted_blocks
from fatdeploy.export.reference.presets import config_from_preset
from tests.support.choices import drawn_batch, name_of, tiny

SINKHORN: dict[str, Any] = {"encoder_attention": "sinkhorn", "block_length": 4}
ROUTING: dict[str, Any] = {"encoder_attention": "routing", "clusters": 4}


def source_of(lengths: list[int]) -> tuple[Tensor, Source]:
    """Return the input [B, S, 32] of an attention, and what it knows of the source."""
    draw = torch.Generator().manual_seed(3)
    h = torch.randn(len(lengths), max(lengths), 32, generator=draw, dtype=torch.float64)
    valid = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return h, Source(valid, h, Visible(valid[:, None, None, :], None))


@torch.no_grad()
def test_blocks_are_sorted_by_a_permutation_of_those_that_have_tokens() -> None:
    attention = tiny({**SINKHORN, "max_source": 40}).double().encoder.layers[0].attention
    assert isinstance(attention, SinkhornAttention)
    h, source = source_of([40, 22, 3])
    shares, filled = attention._shares(h, source.valid)
    assert filled.sum(1).tolist() == [10, 6, 1]
    partners = torch.stack([best for _, best in sorted_blocks(shares)], 1).tolist()
    for row, count in enumerate([10, 6, 1]):
        # Those without tokens keep themselves.
        assert sorted(partners[row][:count]) == list(range(count))
        assert partners[row][count:] == list(range(count, 10))
    assert partners[0] != list(range(10))


def test_shares_are_normalised_by_rows_and_columns_as_often_as_configured() -> None:
    h, source = source_of([40, 22])
    errors = []
    for rounds in (1, 30):
        attention = tiny({**SINKHORN, "max_source": 40, "sinkhorn_rounds": rounds}).double().encoder.layers[0].attention
        with torch.no_grad():
            attention.sort.weight.mul_(20)  # so that one round is not enough
            shares = attention._shares(h, source.valid)[0].exp()
        torch.testing.assert_close(shares.sum(1), torch.ones(2, 10, dtype=torch.float64))
        errors.append(float((shares.sum(2) - 1).abs().max()))
    assert errors[0] > 0.05
    assert errors[1] < 1e-3 * errors[0]


def test_a_block_without_tokens_is_never_chosen_although_it_would_be_the_best() -> None:
    shares = torch.full((1, 3, 3), NEVER)
    shares[0, :2, :2] = torch.tensor([[-5.0, -6.0], [-1.0, -9.0]])
    shares[0, 2, 2] = 0.0
    assert [int(best) for _, best in sorted_blocks(shares)] == [0, 1, 2]


@torch.no_grad()
def test_sorted_blocks_are_soft_in_training_and_a_permutation_in_inference() -> None:
    attention = tiny({**SINKHORN, "max_source": 40}).double().encoder.layers[0].attention
    h, source = source_of([40])
    changed = h.clone()
    # Block 5 and nothing of how blocks are sorted: what is added has a mean of zero.
    changed[0, 20:22] += torch.tensor([[1.0], [-1.0]])
    hard = (attention(changed, source) - attention(h, source))[0].abs().amax(-1).view(10, 4).amax(1) > 1e-12
    partners = [int(best) for _, best in sorted_blocks(attention._shares(h, source.valid)[0])]
    assert hard.tolist() == [block == 5 or partners[block] == 5 for block in range(10)]
    attention.train()
    assert ((attention(changed, source) - attention(h, source))[0].abs().amax(-1) > 1e-12).all()


def test_clusters_are_decided_in_training_as_in_inference_and_still_have_gradients() -> None:
    model = tiny(ROUTING).double()
    batch = drawn_batch(model.config, [9, 5], 4)
    expected = model(*batch)
    scores = model.train()(*batch)
    torch.testing.assert_close(scores, expected, rtol=0, atol=1e-12)
    scores.square().sum().backward()
    attention = model.encoder.layers[0].attention
    assert isinstance(attention, RoutingAttention)
    assert attention.centroids.grad is not None
    assert (attention.centroids.grad.abs().sum(1) > 0).all()


@torch.no_grad()
def test_one_cluster_for_all_is_attention_to_everything() -> None:
    attention = tiny(ROUTING).double().encoder.layers[0].attention
    h, source = source_of([9, 5])
    restricted = attention(h, source)
    attention.centroids.fill_(1.0)  # all equal: the first is the nearest
    q, k, v = (part.view(2, 9, 2, 16).transpose(1, 2) for part in attention.qkv(h).chunk(3, -1))
    mask = source.valid[:, None, None, :]
    everything = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    torch.testing.assert_close(attention(h, source)[source.valid], attention.out(everything)[source.valid])
    assert float((restricted - attention(h, source)).abs().max()) > 0.01


def test_the_clearness_of_a_row_is_its_closest_margin_by_its_largest_score() -> None:
    scores = torch.tensor([[[3.0, 8.0, 7.5], [1.0, 0.0, -9.0]], [[0.25, NEVER, 0.0], [0.0, 0.0, 0.0]]])
    decides = torch.tensor([[True, True], [True, False]])
    assert clearness(scores, decides).tolist() == pytest.approx([0.5 / 9, 0.25])


@pytest.mark.parametrize("changes", [ROUTING, SINKHORN], ids=name_of)
@torch.no_grad()
def test_margins_of_decisions_do_not_depend_on_padding(changes: dict[str, Any]) -> None:
    model = tiny(changes).double()
    source, mask, _ = drawn_batch(model.config, [13, 9, 6], 1)
    together = model.decision_margins(source, mask)
    assert together is not None
    for row, length in enumerate([13, 9, 6]):
        alone = model.decision_margins(source[row : row + 1, :length], mask[row : row + 1, :length])
        torch.testing.assert_close(together[row : row + 1], alone)
        assert 0 < float(together[row]) < 1
    assert tiny({}).decision_margins(source, mask) is None


@pytest.mark.parametrize("size", [0.0, 1e4])
@torch.no_grad()
def test_averages_without_attention_stay_exact_with_keys_of_any_size(size: float) -> None:
    model = tiny({"encoder_attention": "aft", "decoder_attention": "aft"})
    encoder, decoder = model.encoder.layers[0].attention, model.decoder.layers[0].attention
    assert isinstance(encoder, PositionMixing)
    assert isinstance(decoder, DecayingMixing)
    for mixing in (encoder, decoder):
        mixing.qkv.weight[32:64].mul_(size)
        mixing.qkv.bias[32:64].mul_(size)
    h, source = source_of([200])
    h = h.float()
    call = Call(torch.arange(200), torch.arange(200), source.visible, None, frozenset())
    whole, _ = decoder(h, (), call, 0)
    state = (torch.zeros(1, 2, 16, 1), torch.zeros(1, 2, 16))
    for position in range(200):
        step, state = decoder(h[:, position : position + 1], state, call, position)
        torch.testing.assert_close(step[:, 0], whole[:, position], rtol=0, atol=1e-5)
    encoded = encoder(h, source)
    expected = encoder.double()(h.double(), source)
    assert expected.isfinite().all()
    assert float((encoded - expected).abs().max()) < 1e-3 * max(1.0, float(expected.abs().max()))


@torch.no_grad()
def test_a_mixing_matrix_reads_nothing_beyond_the_source() -> None:
    mixing = tiny({"encoder_attention": "gmlp"}).double().encoder.layers[0].attention
    h, source = source_of([9, 4])
    expected = mixing(h, source)
    mixing.matrix[:, 9:].fill_(torch.nan)
    mixing.matrix[9:].fill_(torch.nan)
    changed = h.clone()
    changed[1, 4:] = 1e6
    torch.testing.assert_close(mixing(changed, source)[source.valid], expected[source.valid])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"encoder_attention": "fnet"},
            "encoder_attention: fnet is a Fourier transform over the padded length, so a source would depend on how "
            "far its batch is padded; use gmlp or aft",
        ),
        (SINKHORN | {"encoder_direction": "left_to_right"}, "sinkhorn attention has no direction, use both"),
        (
            SINKHORN | {"block_length": 3},
            r"sinkhorn sorts 2…64 blocks, found 86 blocks of 3 in max_source = 256",
        ),
        (SINKHORN | {"block_length": 256}, "found 1 blocks of 256 in max_source = 256"),
        (SINKHORN | {"biases": False}, "biases: encoder_attention = sinkhorn has matrices of the model's width"),
        ({"encoder_attention": "gmlp", "inner_width": 48}, "inner_width: encoder_attention = gmlp has matrices"),
        ({"encoder_attention": "gmlp", "relative": "table"}, "encoder_attention = gmlp takes no relative scores"),
        ({"encoder_attention": "aft", "relative": "angle"}, "encoder_attention = aft takes no relative scores"),
        ({"decoder_attention": "aft", "relative": "table"}, "decoder_attention = aft takes no relative scores"),
        (ROUTING | {"clusters": 1}, "clusters: must be at least 2, found 1"),
        ({"decoder_attention": "routing"}, r"decoder_attention: expected one of .* found 'routing'"),
    ],
    ids=name_of,
)
def test_what_does_not_go_together_is_refused_with_its_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config_from_preset("transformer-tiny", **changes)
