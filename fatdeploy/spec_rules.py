"""What values of a contract cannot go together."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fatdeploy.spec import ModelSpec, StateSpec


def wrong_contract(spec: "ModelSpec") -> list[str]:
    """Return every reason why a contract is refused."""
    return _wrong_sizes(spec) or [*_wrong_special_ids(spec), *_wrong_state(spec.state), *_wrong_rings(spec)]


def _wrong_sizes(spec: "ModelSpec") -> list[str]:
    names = ("vocab_size", "source_vocab_size", "width", "max_source", "max_target", "top_k", "tokens_per_call")
    sizes = {name: getattr(spec, name) for name in names}
    return [f"{name} must be 1 or more, found {size}" for name, size in sizes.items() if size is not None and size < 1]


def _wrong_special_ids(spec: "ModelSpec") -> list[str]:
    # Padding is also read by the encoder, which may have fewer ids.
    limits = {
        "pad_id": min(spec.vocab_size, spec.n_source_ids),
        "bos_id": spec.vocab_size,
        "eos_id": spec.vocab_size,
    }
    ids = [(name, getattr(spec, name), limit) for name, limit in limits.items()]
    ids += [("silent_ids", token, spec.vocab_size) for token in spec.silent_ids]
    reasons = [
        f"{name} must lie in 0…{limit - 1}, found {token}" for name, token, limit in ids if not 0 <= token < limit
    ]
    if len(set(spec.silent_ids)) >= spec.vocab_size > 0:
        reasons.append("silent_ids must leave a token that can be chosen")
    return reasons


def _wrong_state(state: "Sequence[StateSpec]") -> list[str]:
    started = [tensor for tensor in state if tensor.start == "source"]
    reasons = [
        f"state {tensor.name} starts from the source, so it must be recurrent, found a {tensor.kind}"
        for tensor in started
        if tensor.kind != "recurrent"
    ]
    return reasons + [
        f"state {tensor.name} starts from the source, so its axes must be rows and numbers, found {list(tensor.shape)}"
        for tensor in started
        if tensor.shape[:1] != ("rows",) or not all(isinstance(axis, int) for axis in tensor.shape[1:])
    ]


def _wrong_rings(spec: "ModelSpec") -> list[str]:
    rings = [tensor for tensor in spec.state if tensor.kind == "ring"]
    reasons = [
        f"state {tensor.name} is a ring, so its axes must be rows and numbers, found {list(tensor.shape)}"
        for tensor in rings
        if tensor.shape[:1] != ("rows",) or not all(isinstance(axis, int) for axis in tensor.shape[1:])
    ]
    if rings and spec.tokens_per_call is None:
        # More would overwrite positions that the first of them still read.
        reasons.append(f"state {rings[0].name} is a ring, so tokens_per_call must say how many tokens a call may have")
    return reasons
