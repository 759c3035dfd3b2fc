"""Log-probabilities by onnxruntime, whose exp is three times as fast as numpy's."""

from typing import Any

from fatdeploy.runtimes.engines.ort.row_graphs import LOG_PROBS, SCORES, log_softmax_graph
from fatdeploy.runtimes.engines.ort.sessions import opened_session
from fatdeploy.runtimes.engines.protocol import Floats


class LogSoftmax:
    """Normalises rows of scores in the calling thread; any number of threads may call it at once."""

    def __init__(self, ort: Any) -> None:
        self._value = ort.OrtValue.ortvalue_from_numpy
        self._session = opened_session(ort, log_softmax_graph(), threads=1)

    def __call__(self, scores: Floats, out: Floats) -> None:
        """Write the log-probabilities of contiguous scores [R, n] to another array."""
        binding = self._session.io_binding()
        binding.bind_ortvalue_input(SCORES, self._value(scores))
        binding.bind_ortvalue_output(LOG_PROBS, self._value(out))
        self._session.run_with_iobinding(binding)
