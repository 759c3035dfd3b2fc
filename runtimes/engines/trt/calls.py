"""One shape of call of a plan: bound once, run directly the first time, recorded the second time, then replayed."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from fatdeploy.runtimes.engines.trt.device import Bytes, Context, Device, DeviceGraph
from fatdeploy.runtimes.engines.trt.layout import HostArrays
from fatdeploy.spec import TensorSpec


@dataclass
class Results:
    """What a call copies back to the host, and recordings of such calls: one per role of the state."""

    arrays: dict[str, NDArray[Any]]
    copies: list[tuple[Bytes, int]]
    graphs: dict[int, DeviceGraph] = field(default_factory=dict)


class PlanCall:
    """Contexts of one plan for one shape, one per role of the state; the memory that they use stays in place."""

    def __init__(
        self, device: Device, contexts: Sequence[Context], inputs: HostArrays, address: int, *, capture: bool
    ) -> None:
        self._device, self._contexts, self._inputs, self._address = device, contexts, inputs, address
        self._capture = capture
        self._ran = [False] * len(contexts)
        self._results: dict[Hashable, Results] = {}
        self.places: dict[str, int] = {}  # addresses of what only this call writes
        self.n_bytes = 0  # of all of them
        self.closing: list[Any] = []  # what else to close with the call

    @property
    def inputs(self) -> dict[str, NDArray[Any]]:
        """Host arrays that the next run reads; write to them."""
        return self._inputs.arrays

    def results(self, key: Hashable, wanted: Sequence[tuple[TensorSpec, int]], sizes: Mapping[str, int]) -> Results:
        """Return host arrays for tensors at these addresses; they are allocated on first use."""
        if key not in self._results:
            host = HostArrays(self._device, [tensor for tensor, _ in wanted], sizes)
            copies = [(host.bytes_of(tensor.name), address) for tensor, address in wanted]
            self._results[key] = Results(host.arrays, copies)
        return self._results[key]

    def run(self, role: int, results: Results) -> None:
        """Enqueue one run: inputs to the device, the plan, results to the host."""
        graph = results.graphs.get(role)
        if graph is None and self._capture and self._ran[role]:
            # Not on the first run: TensorRT does its shape-dependent setup in a run that is not recorded.
            graph = results.graphs[role] = self._device.captured(lambda: self._work(role, results))
        if graph is not None:
            graph.launch()
            return
        self._work(role, results)
        self._ran[role] = True

    def _work(self, role: int, results: Results) -> None:
        self._device.upload(self._address, self._inputs.buffer)
        self._contexts[role].execute()
        for host, address in results.copies:
            self._device.download(host, address)

    def close(self) -> None:
        """Free recordings, contexts and memory."""
        for results in self._results.values():
            for graph in results.graphs.values():
                graph.close()
        for resource in (*self._contexts, *self.closing):
            resource.close()
        self._results, self._contexts, self.closing = {}, (), []
