"""A graph as TensorRT has understood it, checked against the model's contract before anything is built."""

from pathlib import Path
from typing import Any

from fatdeploy.errors import ExportFailed, SpecMismatch, in_one_line
from fatdeploy.plans import Part, inputs_of, outputs_of
from fatdeploy.spec import ModelSpec, TensorSpec

# Types of the contract by TensorRT's names.
DTYPES = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BF16", "int64": "INT64", "bool": "BOOL"}
DYNAMIC = -1


def parsed(module: Any, builder: Any, logger: Any, path: Path) -> Any:
    """Return the network of a graph; every node that TensorRT does not know is one ExportFailed, by its module."""
    # Version 11 has no other networks and 10 has: in these the types of the graph are the types that run.
    flags = 1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = module.OnnxParser(network, logger)
    if parser.parse_from_file(str(path)):
        return network
    # It looks at all nodes, where parsing may end at the first that it cannot take.
    looked_at = builder.create_network(flags)  # a parser does not keep its network alive
    judge = module.OnnxParser(looked_at, logger)
    judge.supports_model_v2(path.read_bytes(), str(path))
    errors = [one.get_error(index) for one in (judge, parser) for index in range(one.num_errors)]
    reasons = dict.fromkeys(_said(error) for error in errors)
    raise ExportFailed(in_one_line(f"{module.__name__} {module.__version__} does not take {path.name}", reasons))


def _said(error: Any) -> str:
    """Return what a parser's error says, after the module and the node that it speaks of."""
    module, _, value = error.node_name().partition("/")
    said = " ".join(error.desc().split()).removeprefix("Assertion failed: ")
    if not error.node_operator():
        return said
    where = f"{module or 'the graph'}: {error.node_operator()} that makes {value or 'no name'}"
    # Of ops that it does not know at all it says no more than "false".
    return f"{where} is not supported" if said == "false" else f"{where}: {said}"


def check_network(network: Any, spec: ModelSpec, part: Part) -> None:
    """Raise, with every difference, unless names, types and shapes of a network are those of the contract."""
    fixed = spec.fixed_axes(branches=False)
    reasons = []
    for kind, count, get, expected in (
        ("input", network.num_inputs, network.get_input, inputs_of(spec, part)),
        ("output", network.num_outputs, network.get_output, outputs_of(spec, part)),
    ):
        tensors = {tensor.name: tensor for tensor in map(get, range(count))}
        wanted = {one.name: one.fixed(fixed) for one in expected}
        reasons += [f"it has no {kind} {name}" for name in wanted if name not in tensors]
        reasons += [f"{kind} {name} is not in the contract" for name in tensors if name not in wanted]
        for name, one in wanted.items():
            if name in tensors:
                reasons += [f"{kind} {name}: {reason}" for reason in _differences(tensors[name], one, kind)]
    if reasons:
        raise SpecMismatch(
            f"{in_one_line(f'the graph of the {part} is not what the contract says', reasons)}. Nothing "
            "was built: export the model again"
        )


def _differences(tensor: Any, expected: TensorSpec, kind: str) -> list[str]:
    reasons = []
    if tensor.dtype.name != DTYPES[expected.dtype]:
        reasons.append(f"expected {DTYPES[expected.dtype]}, found {tensor.dtype.name}")
    shape = tuple(tensor.shape)
    wanted = tuple(axis if isinstance(axis, int) else DYNAMIC for axis in expected.shape)
    if shape != wanted:
        reasons.append(f"expected the shape {list(expected.shape)}, found {list(shape)}")
    elif kind == "input":
        # Axes of one name have one size in all inputs: TensorRT relies on it.
        names = [tensor.get_dimension_name(place) for place in range(len(shape))]
        said = [None if isinstance(axis, int) else axis for axis in expected.shape]
        if names != said:
            reasons.append(f"expected axes named {said}, found {names}")
    return reasons
