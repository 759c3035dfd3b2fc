"""The ``standard`` dialect: ops of the ONNX standard only, for every other ONNX tool."""

from collections.abc import Callable

from torch import Tensor

from fatdeploy.export.reference.seams import Outputs
from fatdeploy.export.tracing.dialect_base import GraphSeams


class StandardSeams(GraphSeams):
    """Ops that every ONNX tool has: no branch, no shape that depends on a value."""

    def unless(self, idle: Tensor, act: Callable[[], Outputs], blank: Callable[[], Outputs]) -> Outputs | None:  # noqa: ARG002
        return act()
