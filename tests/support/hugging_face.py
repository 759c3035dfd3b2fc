"""Tiny lively models of ``transformers``, behind our Engine protocol and through their own ``generate``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    MarianConfig,
    MarianMTModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.modeling_outputs import BaseModelOutput

from fatdeploy.errors import SpecMismatch
from fatdeploy.runtimes.decoding.options import DecodeOptions, LogitsProcessor
from fatdeploy.runtimes.engines.checks import check_want, sources_of_rows
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, Rows, StepOut, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens

VOCABULARY, WIDTH, MAX_SOURCE, MAX_TARGET = 48, 32, 12, 24
PAD, EOS, BOS = 0, 2, 3
# Options of ours whose values ``generate`` takes as they are, and their names there.
SAME_NAMES = {
    **{
        name: name
        for name in (
            "min_new_tokens",
            "repetition_penalty",
            "encoder_repetition_penalty",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "suppress_tokens",
            "begin_suppress_tokens",
            "exponential_decay_length_penalty",
        )
    },
    "forced_bos_id": "forced_bos_token_id",
    "forced_eos_id": "forced_eos_token_id",
    "renormalize": "renormalize_logits",
    "eos_ids": "eos_token_id",
}
COMMON = {
    "vocab_size": VOCABULARY,
    "d_model": WIDTH,
    "tie_word_embeddings": False,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
}
STACKS = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "max_position_embeddings": 32,
    "bos_token_id": BOS,
    "decoder_start_token_id": BOS,
}


def _marian() -> PreTrainedModel:
    return MarianMTModel(MarianConfig(**COMMON, **STACKS))


def _bart() -> PreTrainedModel:
    return BartForConditionalGeneration(BartConfig(**COMMON, **STACKS))


def _t5() -> PreTrainedModel:
    sizes = {"d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**COMMON, **sizes, decoder_start_token_id=PAD))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {"marian": _marian, "bart": _bart, "t5": _t5}
# The seeds, among the first few, whose targets end at the most different lengths.
SEEDS = {"marian": 2, "bart": 4, "t5": 3}


@cache
def lively_model(family: str, eos_bias: float) -> PreTrainedModel:
    """Return a model whose tokens depend on the source and on earlier tokens; the bias decides how soon targets end.

    It computes in float64: the logits of a batch and of a row alone round to the same float32, so that only the search
    can differ. Its ``generate`` has no options set.
    """
    # transformers draws its initial weights from torch's global generator, which other tests use as well.
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(SEEDS[family])
        model = FAMILIES[family]().double().eval()
        for layer in model.modules():
            if isinstance(layer, nn.Embedding):
                layer.weight.normal_()
            elif isinstance(layer, nn.Linear):
                layer.weight.normal_(0, 1.2 * layer.in_features**-0.5)
        model.lm_head = _head(model.get_input_embeddings().weight, eos_bias)
    ids = {name: getattr(model.config, name) for name in ("pad_token_id", "eos_token_id", "decoder_start_token_id")}
    model.generation_config = GenerationConfig(**ids)
    return model


def _head(embedding: Tensor, eos_bias: float) -> nn.Linear:
    """Return an output layer that prefers neither one token everywhere nor the token just read."""
    head = nn.Linear(WIDTH, VOCABULARY, dtype=torch.float64)
    rows = nn.functional.normalize(torch.randn_like(embedding)) - 0.7 * nn.functional.normalize(embedding)
    head.weight.copy_(1.6 * nn.functional.normalize(rows))
    head.bias.zero_()
    head.bias[EOS] = eos_bias
    return head


@dataclass
class HuggingFaceState:
    """The encoder's output per source, and all tokens so far per row."""

    memory: Tensor  # [B, S, M]
    mask: Tensor  # [B, S]
    tokens: Tensor  # [R, n]
    capacity: Capacity


class HuggingFaceEngine:
    """Runs a model of ``transformers`` over the whole target at each step: slow, but no cache can be wrong."""

    def __init__(self, model: PreTrainedModel, top_k: int = 8) -> None:
        self.model = model
        self.spec = ModelSpec(
            vocab_size=VOCABULARY,
            max_source=MAX_SOURCE,
            max_target=MAX_TARGET,
            pad_id=PAD,
            bos_id=model.config.decoder_start_token_id,
            eos_id=EOS,
            top_k=top_k,
        )
        self.wanted: list[Want] = []

    @torch.inference_mode()
    def encode(self, source: Tokens, mask: Mask, capacity: Capacity) -> HuggingFaceState:
        self.spec.check_source(source, mask)
        ids, real = torch.from_numpy(source), torch.from_numpy(mask).long()
        memory = self.model.get_encoder()(input_ids=ids, attention_mask=real).last_hidden_state
        return HuggingFaceState(memory, real, ids.new_empty((len(ids), 0)), capacity)

    @torch.inference_mode()
    def step(self, tokens: Tokens, state: HuggingFaceState, want: Want) -> StepOut:
        check_want(self.spec, want)
        self.spec.check_tokens(tokens, state.tokens.shape[1], state.capacity.target_positions)
        if len(tokens) != len(state.tokens):
            raise SpecMismatch(f"step refused: {len(tokens)} rows of tokens, the state has {len(state.tokens)}")
        self.wanted.append(want)
        state.tokens = torch.cat([state.tokens, torch.from_numpy(tokens)], 1)
        rows_per_source = len(state.tokens) // len(state.memory)
        output = self.model(
            encoder_outputs=BaseModelOutput(state.memory.repeat_interleave(rows_per_source, 0)),
            attention_mask=state.mask.repeat_interleave(rows_per_source, 0),
            decoder_input_ids=state.tokens,
            use_cache=False,
        )
        logits = output.logits[:, -tokens.shape[1] :].float()
        if want is Want.LOGITS:
            return StepOut(logits=logits.numpy())
        top = logits.log_softmax(-1).topk(self.spec.top_k)
        return StepOut(top_log_probs=top.values.numpy(), top_ids=top.indices.numpy())

    def reorder(self, state: HuggingFaceState, rows: Rows) -> None:
        kept, rows_per_source = sources_of_rows(rows, len(state.tokens) // len(state.memory))
        if rows_per_source > state.capacity.rows_per_source:
            raise SpecMismatch(f"reorder refused: {rows_per_source} rows per source, capacity {state.capacity}")
        state.memory, state.mask, state.tokens = state.memory[kept], state.mask[kept], state.tokens[rows]

    def length_log_probs(self, state: HuggingFaceState) -> Floats:
        raise SpecMismatch("this model has no length head: its targets end with EOS")

    def output_rows(self, ids: Tokens) -> None:
        """The whole vocabulary is always computed."""

    def output_bias(self, ids: Tokens) -> None:
        """The whole vocabulary is always computed."""

    def release(self, state: HuggingFaceState) -> None:
        """Nothing is kept for the next state."""

    def close(self) -> None:
        """There is nothing to close."""


@dataclass(frozen=True)
class Generated:
    """One sequence of ``generate``: its tokens without the start and EOS, and their scores."""

    tokens: tuple[int, ...]
    finish: str
    score: float
    log_probs: tuple[float, ...]  # of the new tokens, EOS left out


def generated(
    model: PreTrainedModel, sources: Sequence[Sequence[int]], options: DecodeOptions
) -> list[list[Generated]]:
    """Return the sequences of ``generate`` for all sources in one batch, the best of each source first."""
    lengths = np.array([len(source) for source in sources])
    mask = torch.from_numpy(np.arange(lengths.max()) < lengths[:, None])
    ids = torch.full(mask.shape, PAD)
    ids[mask] = torch.tensor([token for source in sources for token in source])
    prompt = torch.tensor([[model.config.decoder_start_token_id, *options.prefix_ids]]).repeat(len(sources), 1)
    out = model.generate(
        ids,
        attention_mask=mask.long(),
        decoder_input_ids=prompt,
        logits_processor=[_in_torch(processor) for processor in options.processors],
        return_dict_in_generate=True,
        output_scores=True,
        **_arguments(options),
    )
    paths = out.beam_indices if options.num_beams > 1 else None
    # Scores of beams are log-probabilities already, changed by processors; greedy search returns logits.
    log_probs = model.compute_transition_scores(
        out.sequences, out.scores, paths, normalize_logits=paths is None
    ).numpy()
    sequences, ends = [], options.eos_ids or [EOS]
    for row, new in enumerate(out.sequences[:, prompt.shape[1] :].tolist()):
        first = next((place for place, token in enumerate(new) if token in ends), len(new) - 1)
        length = first + 1 if paths is None else int((paths[row] >= 0).sum())
        ended = new[length - 1] in ends
        kept = length - ended
        score = log_probs[row, :length].sum() if paths is None else out.sequences_scores[row]
        tokens = (*options.prefix_ids, *new[:kept])
        sequences.append(
            Generated(tokens, "eos" if ended else "length", float(score), tuple(log_probs[row, :kept].tolist()))
        )
    per_source = options.num_return_sequences
    return [sequences[start : start + per_source] for start in range(0, len(sequences), per_source)]


def _arguments(options: DecodeOptions) -> dict[str, object]:
    """Return our options under their names in ``generate``, without those that have no effect."""
    arguments: dict[str, object] = {"max_new_tokens": options.max_new_tokens, "do_sample": False}
    if options.num_beams > 1:
        names = ("num_beams", "length_penalty", "early_stopping", "num_return_sequences")
        arguments |= {name: getattr(options, name) for name in names}
    for name, theirs in SAME_NAMES.items():
        value = getattr(options, name)
        if value != getattr(DecodeOptions(), name) and value != []:
            arguments[theirs] = value
    if options.bad_words:
        arguments["bad_words_ids"] = [list(word) for word in options.bad_words]
    if options.sequence_bias:
        arguments["sequence_bias"] = [[list(ids), bias] for ids, bias in options.sequence_bias]
    for _, token in options.forced_tokens:  # transformers forces EOS at the end and anything else at the beginning
        arguments["forced_eos_token_id" if token == EOS else "forced_bos_token_id"] = token
    return arguments


def _in_torch(processor: LogitsProcessor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda ids, scores: torch.from_numpy(processor(ids.numpy(), scores.numpy().copy()))
