"""The contract of output rows for every engine: the hidden state times them gives the engine's logits."""

from typing import Any

import numpy as np

from fatdeploy.runtimes.engines.protocol import Capacity, Engine, Want

SOURCE = np.array([[5, 6, 7, 8], [9, 4, 0, 0]])


def check_output_rows(engine: Engine[Any]) -> None:
    """Check that hidden states times all output rows are the logits, and that single rows equal those of all."""
    every = engine.output_rows(np.arange(engine.spec.vocab_size))
    assert every is not None
    assert (every.dtype, every.shape) == (np.float32, (engine.spec.vocab_size, engine.spec.width))
    state = engine.encode(SOURCE, SOURCE != 0, Capacity(1, 4))
    out = engine.step(np.array([[1, 7, 30], [1, 8, 20]]), state, Want.LOGITS)
    bound = 1e-5 * max(1.0, float(np.abs(out.logits).max()))
    bias = engine.output_bias(np.arange(engine.spec.vocab_size))
    np.testing.assert_allclose(out.hidden @ every.T + (0 if bias is None else bias), out.logits, rtol=0, atol=bound)
    chosen = np.array([41, 3, 3, engine.spec.vocab_size - 1, 0])
    some = engine.output_rows(chosen)
    np.testing.assert_array_equal(some, every[chosen])
    assert type(some) is np.ndarray
    assert some.flags.c_contiguous
    assert some.flags.writeable
    assert engine.output_rows(chosen[:0]).shape == (0, engine.spec.width)
    if bias is not None:
        assert np.abs(bias).max() > 100 * bound, "a bias within the bound would prove nothing"
        np.testing.assert_array_equal(engine.output_bias(chosen), bias[chosen])
