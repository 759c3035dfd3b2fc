"""TensorRT plans of a bundle: the graph, version, GPU and sizes that each was built for. Only numbers and names."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

from fatdeploy.spec import Axis, ModelSpec, TensorSpec
from fatdeploy.targets import Flavour

Part = Literal["encoder", "decoder"]
Shape = tuple[int, ...]

ENGINES = "engines"  # the folder of the plans in a bundle
PORTABLE = "portable"  # in the name of a file for several compute capabilities
# Axes whose size a call chooses; a cache's capacity is a number in graphs that plans are built from.
SIZED = tuple(axis for axis in get_args(Axis) if axis != "capacity")

_CAPABILITY = re.compile(r"[1-9]\d*\.\d")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, kw_only=True)
class SizeRange:
    """The sizes that an axis may have, and the one that an engine is tuned for."""

    least: int
    usual: int
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.usual <= self.most:
            raise ValueError(f"expected 1 <= least <= usual <= most, found {self.least}, {self.usual}, {self.most}")

    def holds(self, size: int) -> bool:
        """Whether an axis may have this size."""
        return self.least <= size <= self.most


@dataclass(frozen=True, kw_only=True)
class Profile:
    """One range per named axis: an axis has the same range in every tensor.

    Both parts of a model have the same profiles in the same order; an encoder does not use some of their axes.
    """

    sizes: dict[str, SizeRange]

    def __post_init__(self) -> None:
        unknown = [name for name in self.sizes if name not in SIZED]
        if unknown:
            raise ValueError(f"a profile has ranges for {', '.join(SIZED)}, found {', '.join(unknown)}")


@dataclass(frozen=True, kw_only=True)
class PlanRecord:
    """What a plan was built from and for.

    ``compute_capabilities`` are such as ``8.6``: several for TensorRT-RTX, the device's own for TensorRT.
    ``graph_sha256`` is the ``graph_hash`` of the graph and its weights.
    """

    part: Part
    file: str
    flavour: Flavour
    version: str
    compute_capabilities: tuple[str, ...]
    profiles: tuple[Profile, ...]
    graph_sha256: str

    def __post_init__(self) -> None:
        reasons = [
            f"compute capability {capability!r}"
            for capability in self.compute_capabilities
            if not _CAPABILITY.fullmatch(capability)
        ]
        if not self.compute_capabilities:
            reasons.append("no compute capability")
        if not self.profiles:
            reasons.append("no profile")
        if not _SHA256.fullmatch(self.graph_sha256):
            reasons.append(f"graph_sha256 {self.graph_sha256[:80]!r}")
        if reasons:
            raise ValueError(f"expected capabilities such as 8.6, profiles and a sha256, found {', '.join(reasons)}")


def plan_file(part: Part, flavour: Flavour, version: str, capabilities: tuple[str, ...]) -> str:
    """Return the name of a plan in a bundle."""
    where = f"sm{capabilities[0].replace('.', '')}" if len(capabilities) == 1 else PORTABLE
    return f"{ENGINES}/{part}-{flavour}-{version}-{where}.plan"


def shapes_of(tensor: TensorSpec, profile: Profile, fixed: dict[str, int]) -> tuple[Shape, Shape, Shape]:
    """Return the least, the usual and the largest shape of a tensor; ``fixed`` are axes with a single size."""
    least, usual, most = (
        {name: getattr(sizes, which) for name, sizes in profile.sizes.items()} | fixed
        for which in ("least", "usual", "most")
    )
    return tensor.sized(least), tensor.sized(usual), tensor.sized(most)


def inputs_of(spec: ModelSpec, part: Part) -> tuple[TensorSpec, ...]:
    """Return the inputs of the graph that a plan is built from."""
    return spec.encoder_inputs() if part == "encoder" else spec.decoder_inputs(branches=False)


def outputs_of(spec: ModelSpec, part: Part) -> tuple[TensorSpec, ...]:
    """Return the outputs of the graph that a plan is built from."""
    return spec.encoder_outputs() if part == "encoder" else spec.decoder_outputs()


def axes_of(tensors: Iterable[TensorSpec]) -> tuple[str, ...]:
    """Return the axes of tensors for which a profile has sizes, each once."""
    axes = {axis for tensor in tensors for axis in tensor.shape}
    return tuple(axis for axis in SIZED if axis in axes)
