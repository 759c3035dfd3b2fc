"""A graph as TensorRT has parsed it, checked against the model's contract before anything is built."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fatdeploy.errors import ExportFailed, SpecMismatch, in_one_line
from fatdeploy.plans import Part, inputs_of, outputs_of
from fatdeploy.runtimes.engines.contract import GraphTensor, TensorKind, contract_differences
from fatdeploy.runtimes.engines.element_types import dtype_from_tensorrt
from fatdeploy.spec import ModelSpec, TensorSpec


def parsed(module: Any, builder: Any, logger: Any, path: Path) -> Any:
    """Return the network of a graph; raise one ExportFailed that names every unsupported node by its module."""
    # Strongly typed: the types of the graph are the types that run. Version 11 has no other networks, 10 has.
    flags = 1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(flags)
    parser = module.OnnxParser(network, logger)
    if parser.parse_from_file(str(path)):
        return network
    # This looks at all nodes, where parsing may end at the first unsupported one.
    checked_network = builder.create_network(flags)  # a parser does not keep its network alive
    checker = module.OnnxParser(checked_network, logger)
    checker.supports_model_v2(path.read_bytes(), str(path))
    errors = [reader.get_error(index) for reader in (checker, parser) for index in range(reader.num_errors)]
    reasons = dict.fromkeys(_error_text(error) for error in errors)
    raise ExportFailed(in_one_line(f"{module.__name__} {module.__version__} does not take {path.name}", reasons))


def _error_text(error: Any) -> str:
    """Return a parser's error, after the module and the node that it is about."""
    module, _, value = error.node_name().partition("/")
    text = " ".join(error.desc().split()).removeprefix("Assertion failed: ")
    if not error.node_operator():
        return text
    where = f"{module or 'the graph'}: {error.node_operator()} that makes {value or 'no name'}"
    # For ops that it does not know at all the text is just "false".
    return f"{where} is not supported" if text == "false" else f"{where}: {text}"


def check_network(network: Any, spec: ModelSpec, part: Part) -> None:
    """Raise, with every difference, unless names, types and shapes of a network are those of the contract."""
    fixed = spec.fixed_axes(branches=False)
    inputs = [tensor.fixed(fixed) for tensor in inputs_of(spec, part)]
    outputs = [tensor.fixed(fixed) for tensor in outputs_of(spec, part)]
    network_inputs = [network.get_input(index) for index in range(network.num_inputs)]
    network_outputs = [network.get_output(index) for index in range(network.num_outputs)]
    tensors = [*_tensors("input", network_inputs), *_tensors("output", network_outputs)]
    reasons = contract_differences(tensors, inputs, outputs) + _wrong_axes(network_inputs, inputs)
    if reasons:
        raise SpecMismatch(
            f"{in_one_line(f'the graph of the {part} does not fit the contract', reasons)}. Nothing was built: export "
            "the model again"
        )


def _tensors(kind: TensorKind, tensors: Sequence[Any]) -> list[GraphTensor]:
    return [
        GraphTensor(tensor.name, kind, dtype_from_tensorrt(tensor.dtype.name), tuple(tensor.shape))
        for tensor in tensors
    ]


def _wrong_axes(tensors: Sequence[Any], expected: Sequence[TensorSpec]) -> list[str]:
    """Return inputs whose axes have other names: TensorRT relies on axes of one name having one size in all inputs."""
    reasons = []
    contract = {spec.name: [None if isinstance(axis, int) else axis for axis in spec.shape] for spec in expected}
    for tensor in tensors:
        names = [tensor.get_dimension_name(place) for place in range(len(tensor.shape))]
        if names != contract.get(tensor.name, names):
            reasons.append(f"axes of input {tensor.name} must be named {contract[tensor.name]}, found {names}")
    return reasons
