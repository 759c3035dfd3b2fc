"""Folders of every supported family: drawn sizes and ids, lively weights, written by ``save_pretrained``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BlenderbotConfig,
    BlenderbotForConditionalGeneration,
    BlenderbotSmallConfig,
    BlenderbotSmallForConditionalGeneration,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    GenerationConfig,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PLBartConfig,
    PLBartForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from fatdeploy.runtimes.decoding.options import DecodeOptions
from fatdeploy.spec import ModelSpec

Draw = np.random.Generator
ACTIVATIONS = ("relu", "gelu", "gelu_new", "gelu_fast", "silu", "swish")
# Among them the norm that the output matrix reads: gains of both signs, or the last input token would always win.
LAST_NORMS = ("decoder.layer_norm.weight", "final_layer_norm.weight", "transform.LayerNorm.weight")
CROSS_ATTENTIONS = (".encoder_attn.", ".crossattention.", ".EncDecAttention.")


def _between(draw: Draw, least: int, most: int) -> int:
    return int(draw.integers(least, most + 1))


def _sometimes(draw: Draw) -> bool:
    return bool(draw.random() < 0.5)


def _ids(draw: Draw, vocabulary: int) -> dict[str, int]:
    """Return special ids in any order; the target starts with EOS, with an id of its own, or with padding."""
    pad, eos, bos = draw.permutation(min(vocabulary, 12))[:3].tolist()
    start = int(draw.choice([bos, eos, pad]))
    return {"pad_token_id": pad, "eos_token_id": eos, "bos_token_id": bos, "decoder_start_token_id": start}


def _stacks(draw: Draw) -> dict[str, Any]:
    vocabulary = _between(draw, 24, 48)
    return {
        "vocab_size": vocabulary,
        "d_model": 24,
        "encoder_layers": _between(draw, 1, 3),
        "decoder_layers": _between(draw, 1, 3),
        "encoder_attention_heads": int(draw.choice([1, 2, 3, 4])),
        "decoder_attention_heads": int(draw.choice([1, 2, 3, 4])),
        "encoder_ffn_dim": _between(draw, 8, 40),
        "decoder_ffn_dim": _between(draw, 8, 40),
        "max_position_embeddings": _between(draw, 20, 30),
        "activation_function": str(draw.choice(ACTIVATIONS)),
        "scale_embedding": _sometimes(draw),
        "tie_word_embeddings": _sometimes(draw),
        **_ids(draw, vocabulary),
    }


def _marian(draw: Draw) -> PreTrainedModel:
    values = _stacks(draw)
    shared = _sometimes(draw)
    targets = values["vocab_size"] if shared else _between(draw, 20, 60)
    return MarianMTModel(MarianConfig(**values, share_encoder_decoder_embeddings=shared, decoder_vocab_size=targets))


def _m2m(draw: Draw) -> PreTrainedModel:
    values = _stacks(draw)
    # There a target that starts with padding has other positions, see docs/hugging-face.md.
    values["decoder_start_token_id"] = values["eos_token_id"] if _sometimes(draw) else values["bos_token_id"]
    return M2M100ForConditionalGeneration(M2M100Config(**values))


def _t5_sizes(draw: Draw) -> dict[str, Any]:
    vocabulary = _between(draw, 24, 48)
    return {
        "vocab_size": vocabulary,
        "d_model": 24,
        "d_kv": int(draw.choice([4, 6, 8, 10])),
        "d_ff": _between(draw, 8, 40),
        "num_layers": _between(draw, 1, 3),
        "num_decoder_layers": _between(draw, 1, 3),
        "num_heads": _between(draw, 1, 4),
        "relative_attention_num_buckets": int(draw.choice([8, 10, 16])),
        "relative_attention_max_distance": _between(draw, 9, 14),
        "layer_norm_epsilon": float(draw.choice([1e-6, 1e-4])),
        "feed_forward_proj": str(draw.choice(["relu", "gelu", "gated-gelu", "gated-silu", "gated-relu"])),
        "tie_word_embeddings": _sometimes(draw),
        **_ids(draw, vocabulary),
    }


def _bert_side(draw: Draw, **values: Any) -> BertConfig:
    return BertConfig(
        vocab_size=_between(draw, 24, 48),
        hidden_size=24,
        num_hidden_layers=_between(draw, 1, 3),
        num_attention_heads=int(draw.choice([1, 2, 3, 4])),
        intermediate_size=_between(draw, 8, 40),
        max_position_embeddings=_between(draw, 20, 30),
        type_vocab_size=_between(draw, 1, 3),
        tie_word_embeddings=_sometimes(draw),
        **values,
    )


def _bert(draw: Draw) -> PreTrainedModel:
    shared = {"hidden_act": str(draw.choice(ACTIVATIONS)), "layer_norm_eps": float(draw.choice([1e-12, 1e-5]))}
    encoder, decoder = _bert_side(draw, **shared), _bert_side(draw, **shared)
    config = EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder, **_ids(draw, 24))
    return EncoderDecoderModel(config)


MODELS: dict[str, Callable[[Draw], PreTrainedModel]] = {
    "marian": _marian,
    "bart": lambda draw: BartForConditionalGeneration(BartConfig(**_stacks(draw))),
    "plbart": lambda draw: PLBartForConditionalGeneration(PLBartConfig(**_stacks(draw))),
    "mbart": lambda draw: MBartForConditionalGeneration(MBartConfig(**_stacks(draw))),
    "m2m_100": _m2m,
    "pegasus": lambda draw: PegasusForConditionalGeneration(PegasusConfig(**_stacks(draw))),
    "blenderbot": lambda draw: BlenderbotForConditionalGeneration(BlenderbotConfig(**_stacks(draw))),
    "blenderbot-small": lambda draw: BlenderbotSmallForConditionalGeneration(BlenderbotSmallConfig(**_stacks(draw))),
    "t5": lambda draw: T5ForConditionalGeneration(T5Config(**_t5_sizes(draw))),
    "mt5": lambda draw: MT5ForConditionalGeneration(MT5Config(**_t5_sizes(draw))),
    "umt5": lambda draw: UMT5ForConditionalGeneration(UMT5Config(**_t5_sizes(draw))),
    "encoder-decoder": _bert,
}


@dataclass(frozen=True)
class WrittenFolder:
    """A folder, and the class that reads it in transformers."""

    path: Path
    kind: type[PreTrainedModel]

    def model(self) -> PreTrainedModel:
        """Return the model as transformers reads it, in float64."""
        return self.kind.from_pretrained(self.path).double().eval()


def write_folder(family: str, seed: int, path: Path, **save: Any) -> WrittenFolder:
    """Write a drawn model of a family; ``save`` goes to ``save_pretrained``."""
    draw = np.random.default_rng([len(family), *family.encode(), seed])
    # transformers draws its initial weights from torch's global generator, which other tests use as well.
    with torch.random.fork_rng():
        model = MODELS[family](draw)
    make_lively(model, torch.Generator().manual_seed(seed))
    model.save_pretrained(path, **save)
    return WrittenFolder(path, type(model))


@torch.no_grad()
def make_lively(model: PreTrainedModel, generator: torch.Generator) -> None:
    """Draw all weights so that targets depend on the source and on earlier tokens."""
    spread = model.config.d_model**-0.5 if getattr(model.config, "scale_embedding", False) else 1.0
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            tensor.copy_(_drawn(name, tensor, spread, generator))
    for name, tensor in model.named_buffers():
        if name == "final_logits_bias":
            tensor.normal_(0, 0.3, generator=generator)


def _drawn(name: str, tensor: Tensor, spread: float, generator: torch.Generator) -> Tensor:
    normal = torch.randn(tensor.shape, generator=generator)
    if "norm" in name.lower() and name.endswith("weight"):
        signs = normal.sign() if name.endswith(LAST_NORMS) else 1.0
        return signs * (1 + 0.2 * normal.roll(1))
    if name.endswith("bias"):
        return 0.05 * normal
    if "embed" in name or "shared" in name:
        return spread * normal
    if "relative_attention_bias" in name or "lm_head" in name or "predictions.decoder" in name:
        return normal
    return _strength(name) * tensor.shape[1] ** -0.5 * normal


def _strength(name: str) -> float:
    """Return how strong a matrix is: more of the feed-forward network than of averages over positions."""
    if name.endswith("Attention.q.weight"):  # scores of T5 are not divided by √D
        return 0.3
    if any(part in name for part in CROSS_ATTENTIONS):
        return 1.0
    return 0.7 if "attn" in name or "ttention" in name else 3.0


@dataclass(frozen=True)
class GeneratedTarget:
    """Tokens without start and EOS, and the score of the whole target."""

    tokens: tuple[int, ...]
    score: float


def generated(
    model: PreTrainedModel,
    sources: Sequence[Sequence[int]],
    options: DecodeOptions,
    spec: ModelSpec,
    cached: bool = False,
) -> list[GeneratedTarget]:
    """Return the best target of ``generate`` for each source of one padded batch.

    Not ``cached`` by default: the cache of T5 has as many layers as the encoder, and fails if the decoder has more.
    """
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
        use_cache=cached,
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
        targets.append(GeneratedTarget(tuple(new[:length]), float(score)))
    return targets
