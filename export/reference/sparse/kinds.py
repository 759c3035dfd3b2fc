"""Attention to some positions: the masks that a head of the encoder may have, and the decoder's ring.

Imports no torch.
"""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from fatdeploy.export.reference.config import ModelConfig

Mask = Literal["local", "strided", "global_tokens"]
# A head sees what any of its masks shows.
MaskUnion = Literal["local+strided", "local+global_tokens", "strided+global_tokens", "local+strided+global_tokens"]
# What a tuple may name; a full head sees everything.
HeadMask = Literal[Mask, MaskUnion, "scaled_dot"]

MASKS: dict[object, tuple[Mask, ...]] = {
    "local": ("local",),
    "strided": ("strided",),
    "global_tokens": ("global_tokens",),
    "local+strided": ("local", "strided"),
    "local+global_tokens": ("local", "global_tokens"),
    "strided+global_tokens": ("strided", "global_tokens"),
    "local+strided+global_tokens": ("local", "strided", "global_tokens"),
}

# How many tokens a call may read at once where keys and values are in a ring: its length is the window and these, and
# every step compares its query with all of them. A long prefix takes more calls.
TOKENS_PER_CALL = 8


def masks_of(attention: object) -> list[tuple[Mask, ...]]:
    """Return the masks of every head, or of all heads as one entry; a head without masks sees everything."""
    kinds = attention if isinstance(attention, tuple) else (attention,)
    return [MASKS.get(kind, ()) for kind in kinds]


def ring_length(config: "ModelConfig") -> int:
    """Return how many of the last positions a decoder keeps; 0 if it keeps all or none."""
    length = config.window + TOKENS_PER_CALL
    return length if config.decoder_attention == "local" and length < config.max_target else 0


def wrong_masks(config: "ModelConfig") -> list[str]:
    """Return why global tokens cannot be added."""
    if config.global_tokens == "first":
        return []
    reasons = []
    if not any("global_tokens" in masks for masks in masks_of(config.encoder_attention)):
        reasons.append("global_tokens: added needs an encoder_attention with the mask global_tokens")
    if config.encoder_direction != "both":
        reasons.append(
            "global_tokens: added tokens carry what is on the right to the left, "
            f"found encoder_direction = {config.encoder_direction}"
        )
    return reasons
