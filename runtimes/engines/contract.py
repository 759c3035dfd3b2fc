"""Whether the tensors of a graph, network or plan are those of the model's contract."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from fatdeploy.spec import TensorSpec

TensorKind = Literal["input", "output"]

DYNAMIC = -1


@dataclass(frozen=True)
class GraphTensor:
    """An input or output as a graph, network or plan describes it; DYNAMIC is an axis whose size a call chooses."""

    name: str
    kind: TensorKind
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"an {self.kind}, {self.dtype} {list(self.shape)}"


def graph_tensor(tensor: TensorSpec, kind: TensorKind) -> GraphTensor:
    """Return a tensor of the contract as a graph should describe it."""
    shape = tuple(axis if isinstance(axis, int) else DYNAMIC for axis in tensor.shape)
    return GraphTensor(tensor.name, kind, tensor.dtype, shape)


def contract_differences(
    tensors: Iterable[GraphTensor], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> list[str]:
    """Return every reason why tensors are not the inputs and outputs of a contract, whose fixed axes are numbers."""
    actual = {(tensor.kind, tensor.name): tensor for tensor in tensors}
    contract = [*(graph_tensor(spec, "input") for spec in inputs), *(graph_tensor(spec, "output") for spec in outputs)]
    expected = {(tensor.kind, tensor.name): tensor for tensor in contract}
    return [
        *(f"{kind} {name} is missing" for kind, name in expected if (kind, name) not in actual),
        *(f"{kind} {name} is not in the contract" for kind, name in actual if (kind, name) not in expected),
        *(
            f"{name} must be {tensor}, found {actual[kind, name]}"
            for (kind, name), tensor in expected.items()
            if (kind, name) in actual and actual[kind, name] != tensor
        ),
    ]
