"""The classical parts of the reference models against torch.nn's layers, and the whole transformer against Marian."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset
from fatdeploy.export.reference.weights import model_from_preset, random_model

ACTIVATIONS: dict[str, Any] = {"relu": functional.relu, "gelu": functional.gelu, "swish": functional.silu}
SOURCE_LENGTHS = (13, 6, 1)


def batch_of(model: ReferenceModel, steps: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    """Return a padded source, its mask and a target."""
    generator = torch.Generator().manual_seed(7)
    vocabulary = model.config.vocab_size
    source = torch.randint(3, vocabulary, (len(SOURCE_LENGTHS), max(SOURCE_LENGTHS)), generator=generator)
    mask = torch.arange(source.shape[1]) < torch.tensor(SOURCE_LENGTHS)[:, None]
    target = torch.randint(3, vocabulary, (len(source), steps), generator=generator)
    target[:, 0] = model.config.bos_id
    return source.where(mask, model.config.pad_id), mask, target


def double_model(**changes: Any) -> ReferenceModel:
    return random_model(config_from_preset("transformer-tiny", **changes), seed=2).double()


def called_with(module: nn.Module, run: Callable[[], object]) -> tuple[Tensor, Any]:
    """Return the first argument and the result of a module's only call during ``run``."""
    calls: list[tuple[Tensor, Any]] = []
    hook = module.register_forward_hook(lambda _, arguments, result: calls.append((arguments[0], result)))
    run()
    hook.remove()
    ((argument, result),) = calls
    return argument, result


def load(module: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    """Load all weights of a torch.nn module; a missing or additional name is an error."""
    module.double().load_state_dict(weights)
    return module.eval()


def attention_weights(prefix: str, attention: nn.Module) -> dict[str, Tensor]:
    """Return the weights of our self- or cross-attention under the names of torch.nn.MultiheadAttention."""
    fused = [attention.qkv] if hasattr(attention, "qkv") else [attention.q, attention.kv]
    return {
        f"{prefix}in_proj_weight": torch.cat([part.weight for part in fused]),
        f"{prefix}in_proj_bias": torch.cat([part.bias for part in fused]),
        f"{prefix}out_proj.weight": attention.out.weight,
        f"{prefix}out_proj.bias": attention.out.bias,
    }


def layer_weights(layer: nn.Module) -> dict[str, Tensor]:
    """Return a layer's weights under the names of torch.nn.TransformerEncoderLayer or TransformerDecoderLayer."""
    named = {"linear1": layer.ffn.into, "linear2": layer.ffn.out}
    weights = attention_weights("self_attn.", layer.attention)
    if hasattr(layer, "cross"):
        weights |= attention_weights("multihead_attn.", layer.cross)
        norms = [layer.self_residual.norm, layer.cross_residual.norm, layer.ffn.residual.norm]
    else:
        norms = [layer.residual.norm, layer.ffn.residual.norm]
    named |= {f"norm{number}": norm for number, norm in enumerate(norms, 1)}
    return weights | {
        f"{name}.{key}": value for name, part in named.items() for key, value in part.state_dict().items()
    }


def torch_layer(kind: Any, layer: nn.Module, model: ReferenceModel) -> nn.Module:
    config = model.config
    torch_module = kind(
        config.width,
        config.heads,
        config.ffn_width,
        dropout=0.0,
        activation=ACTIVATIONS[config.activation],
        layer_norm_eps=1e-5,
        batch_first=True,
        norm_first=config.norm == "pre",
    )
    return load(torch_module, layer_weights(layer))


def embedded(model: ReferenceModel, tokens: Tensor) -> Tensor:
    """Return tied embeddings times √M plus the position vectors."""
    table = model.source_positions.table
    assert table is not None
    return model.source_embedding.weight[tokens] * model.config.width**0.5 + table[: tokens.shape[1]]


@torch.no_grad()
def test_scaled_dot_attention_is_multi_head_attention_of_torch() -> None:
    model = double_model()
    source, mask, _ = batch_of(model)
    for layer in model.encoder.layers:
        x, attended = called_with(layer.attention, lambda: model.encode(source, mask))
        theirs = load(nn.MultiheadAttention(32, 2, batch_first=True), attention_weights("", layer.attention))
        expected, _ = theirs(x, x, x, key_padding_mask=~mask)
        torch.testing.assert_close(attended[mask], expected[mask], rtol=1e-9, atol=1e-10)


@torch.no_grad()
def test_weights_of_cross_attention_are_those_of_torch() -> None:
    model = double_model()
    source, mask, target = batch_of(model)
    cross = model.decoder.layers[-1].cross
    encoded = model.encoder(embedded(model, source), mask)[-1]
    last, memory = model.config.decoder_layers - 1, model.encode(source, mask)
    x, (attended, weights) = called_with(
        cross, lambda: model.decode(target, model.stateless(), memory, weights_of=last)
    )
    theirs = load(nn.MultiheadAttention(32, 2, batch_first=True), attention_weights("", cross))
    expected, alphas = theirs(x, encoded, encoded, key_padding_mask=~mask, average_attn_weights=False)
    torch.testing.assert_close(attended, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(weights, alphas, rtol=1e-9, atol=1e-10)
    assert not weights[(~mask)[:, None, None, :].expand_as(weights)].any()


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_an_encoder_layer_is_that_of_torch(norm: str, activation: str) -> None:
    model = double_model(norm=norm, activation=activation)
    source, mask, _ = batch_of(model)
    for layer in model.encoder.layers:
        x, output = called_with(layer, lambda: model.encode(source, mask))
        theirs = torch_layer(nn.TransformerEncoderLayer, layer, model)
        expected = theirs(x, src_key_padding_mask=~mask)
        torch.testing.assert_close(output[mask], expected[mask], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("norm", ["post", "pre"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@torch.no_grad()
def test_the_whole_model_is_layers_of_torch_between_tied_embeddings(norm: str, activation: str) -> None:
    model = double_model(norm=norm, activation=activation)
    source, mask, target = batch_of(model)
    finals = [nn.Identity(), nn.Identity()]
    if norm == "pre":
        finals = [load(nn.LayerNorm(32), stack.norm.state_dict()) for stack in (model.encoder, model.decoder)]
    x = embedded(model, source)
    for layer in model.encoder.layers:
        x = torch_layer(nn.TransformerEncoderLayer, layer, model)(x, src_key_padding_mask=~mask)
    memory = finals[0](x)
    future = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
    y = embedded(model, target)
    for layer in model.decoder.layers:
        theirs = torch_layer(nn.TransformerDecoderLayer, layer, model)
        y = theirs(y, memory, tgt_mask=future, memory_key_padding_mask=~mask)
    expected = finals[1](y) @ model.source_embedding.weight.T
    torch.testing.assert_close(model(source, mask, target), expected, rtol=1e-9, atol=1e-9)


# Marian in transformers is a post-norm transformer with tied, scaled embeddings; only the layout of its sinusoids
# differs, so its position tables, which are among its weights, are overwritten with ours.
RENAMED = {
    "attention.out": "self_attn.out_proj",
    "cross.out": "encoder_attn.out_proj",
    "cross.q": "encoder_attn.q_proj",
    "cross_residual.norm": "encoder_attn_layer_norm",
    "self_residual.norm": "self_attn_layer_norm",
    "ffn.residual.norm": "final_layer_norm",
    "residual.norm": "self_attn_layer_norm",
    "ffn.into": "fc1",
    "ffn.out": "fc2",
}
FUSED = {
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "cross.kv": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
}


def marian_weights(model: ReferenceModel) -> dict[str, Tensor]:
    """Return all weights of our transformer under Marian's names."""
    weights = {"final_logits_bias": torch.zeros(1, model.config.vocab_size)}
    for name, tensor in model.state_dict().items():
        if not name.startswith(("encoder.", "decoder.")):
            continue
        stack, _, layer, rest = name.split(".", 3)
        part, kind = rest.rsplit(".", 1)
        theirs = FUSED.get(part) or (RENAMED[part],)
        for new, piece in zip(theirs, tensor.chunk(len(theirs)), strict=True):
            weights[f"model.{stack}.layers.{layer}.{new}.{kind}"] = piece
    for name in ("model.shared", "model.encoder.embed_tokens", "model.decoder.embed_tokens", "lm_head"):
        weights[f"{name}.weight"] = model.source_embedding.weight
    for stack, positions in (("encoder", model.source_positions), ("decoder", model.target_positions)):
        assert positions.table is not None
        weights[f"model.{stack}.embed_positions.weight"] = positions.table
    return weights


def marian_of(model: ReferenceModel) -> nn.Module:
    """Return a Marian model of the same sizes with the same weights."""
    from transformers import MarianConfig, MarianMTModel

    ours = model.config
    config = MarianConfig(
        vocab_size=ours.vocab_size,
        d_model=ours.width,
        encoder_layers=ours.encoder_layers,
        decoder_layers=ours.decoder_layers,
        encoder_attention_heads=ours.heads,
        decoder_attention_heads=ours.heads,
        encoder_ffn_dim=ours.ffn_width,
        decoder_ffn_dim=ours.ffn_width,
        max_position_embeddings=ours.max_source,
        activation_function="relu",
        scale_embedding=True,
        dropout=0.0,
        pad_token_id=ours.pad_id,
        bos_token_id=ours.bos_id,
        eos_token_id=ours.eos_id,
        forced_eos_token_id=ours.eos_id,
        decoder_start_token_id=ours.bos_id,
        attn_implementation="eager",
    )
    marian = MarianMTModel(config)
    marian.load_state_dict(marian_weights(model))
    return marian.eval()


@pytest.fixture(scope="module", params=["transformer-tiny", "transformer-small"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[ReferenceModel, nn.Module]]:
    """Yield a preset and its Marian; any attempt to reach the network fails the test."""

    def refuse(*call: object) -> None:
        raise AssertionError(f"network access: {call[1:]}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        model = model_from_preset(request.param, seed=1)
        yield model, marian_of(model)


def logits_of(marian: nn.Module, source: Tensor, mask: Tensor, target: Tensor) -> Tensor:
    """Return Marian's logits for a whole target (teacher forcing)."""
    logits: Tensor = marian(input_ids=source, attention_mask=mask, decoder_input_ids=target, use_cache=False).logits
    return logits


def bound_of(logits: Tensor) -> float:
    """Return the largest allowed difference of float32 logits."""
    return 1e-5 * max(1.0, float(logits.abs().max()))


def check_agreement(logits: Tensor, expected: Tensor) -> None:
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= bound_of(expected)


@torch.no_grad()
def test_the_transformer_preset_is_marian(pair: tuple[ReferenceModel, nn.Module]) -> None:
    model, marian = pair
    source, mask, target = batch_of(model, steps=23)
    check_agreement(model(source, mask, target), logits_of(marian, source, mask.long(), target))


@torch.no_grad()
def test_greedy_steps_with_caches_are_marian_without_any(pair: tuple[ReferenceModel, nn.Module]) -> None:
    model, marian = pair
    source, mask, target = batch_of(model)
    memory = model.encode(source, mask)
    state, tokens, scores = model.start(memory), target[:, :1], []
    for _ in range(20):
        step, state = model.step(tokens[:, -1:], state, memory)
        scores.append(step)
        tokens = torch.cat([tokens, step.argmax(-1)], 1)
    assert all(len(set(row.tolist())) >= 6 for row in tokens), "one repeated token would prove nothing"
    expected = logits_of(marian, source, mask.long(), tokens[:, :-1])
    check_agreement(torch.cat(scores, 1), expected)
    first, second = expected.topk(2).values.unbind(-1)
    assert (first - second).min() >= 10 * bound_of(expected), "a tie: the next line would pass or fail by chance"
    assert torch.equal(expected.argmax(-1), tokens[:, 1:])
