"""Teacher forcing, in one place: what a decoder reads so that each step follows known tokens, and what it answers."""

import numpy as np

from fatdeploy.errors import ParityFailed
from fatdeploy.runtimes.engines.protocol import Capacity, Floats, State, Stepper, Want
from fatdeploy.spec import Mask, ModelSpec, Tokens


def call_count(spec: ModelSpec, steps: int) -> int:
    """Return how many calls a decode of so many steps takes: a parallel model computes all of them in one."""
    return 1 if spec.decoding == "parallel" else steps


def first_tokens(spec: ModelSpec, rows: int, steps: int) -> Tokens:
    """Return what the first call of a decode reads: BOS, at every position for a parallel model."""
    return np.full((rows, steps if spec.decoding == "parallel" else 1), spec.bos_id)


def decoder_inputs(spec: ModelSpec, targets: Tokens) -> Tokens:
    """Return what the decoder reads to answer targets [B, T]: BOS and all but the last, or BOS at every position."""
    inputs = np.full_like(targets, spec.bos_id)
    if spec.decoding == "autoregressive":
        inputs[:, 1:] = targets[:, :-1]
    return inputs


def forced_logits(
    engine: Stepper[State], source: Tokens, mask: Mask, inputs: Tokens, *, step_by_step: bool = False
) -> Floats:
    """Return the logits [B, T, V] of a decoder that reads ``inputs`` in one call, or one token per call."""
    width = 1 if step_by_step and engine.spec.decoding == "autoregressive" else inputs.shape[1]
    state = engine.encode(source, mask, Capacity(1, inputs.shape[1]))
    try:
        # Copied: an engine's arrays are valid until its next step.
        logits = [
            step_logits(engine, np.ascontiguousarray(inputs[:, start : start + width]), state).copy()
            for start in range(0, inputs.shape[1], width)
        ]
        return np.concatenate(logits, 1)
    finally:
        engine.release(state)


def step_logits(engine: Stepper[State], tokens: Tokens, state: State) -> Floats:
    """Return the logits [R, t, V] of a step; tokens that are never chosen have the least."""
    logits = engine.step(tokens, state, Want.LOGITS).logits
    if logits is None:
        raise ParityFailed("the engine returned no logits although they were wanted")
    if not engine.spec.silent_ids:
        return logits
    # Not -inf: the noise of logits is bounded relative to the largest of those that mean something.
    audible = np.delete(logits, engine.spec.silent_ids, -1)
    logits = logits.copy()
    logits[..., engine.spec.silent_ids] = audible.min(-1, keepdims=True)
    return logits
