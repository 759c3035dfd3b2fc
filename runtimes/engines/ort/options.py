"""How onnxruntime runs a bundle: threads and providers, checked before anything is opened."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from fatdeploy.errors import ConfigError, in_one_line
from fatdeploy.targets import Provider

PROVIDERS: dict[Provider, str] = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "tensorrt": "TensorrtExecutionProvider",
}
ON_DEVICE: frozenset[Provider] = frozenset({"cuda", "tensorrt"})


@dataclass(frozen=True, kw_only=True)
class OrtOptions:
    """Number of threads (default: one per core), whether they spin while they wait, and which providers run the graphs.

    Without ``optimised`` onnxruntime runs a graph as it is written, which is slow and shows what the graph itself
    computes. In the folder ``profile`` it writes, when the engine is closed, how long every op of each graph took.

    Steps cannot be recorded as CUDA graphs: onnxruntime records no graph with branches (If), which our graphs for it
    have, and it reads positions on the host when it launches a kernel, so that a replay would repeat the first one.
    """

    threads: int | None = None
    spinning: bool = True
    providers: Sequence[Provider] = ("cpu",)
    optimised: bool = True
    profile: Path | None = None

    def __post_init__(self) -> None:
        reasons = [*_wrong_threads(self.threads), *_wrong_spinning(self.spinning), *_wrong_providers(self.providers)]
        if reasons:
            raise ConfigError(in_one_line("engine options refused", reasons))

    @property
    def provider_names(self) -> list[str]:
        """What onnxruntime calls the providers."""
        return [PROVIDERS[provider] for provider in self.providers]

    @property
    def on_device(self) -> bool:
        """Whether the first provider computes on a GPU."""
        return self.providers[0] in ON_DEVICE


def _wrong_threads(threads: object) -> list[str]:
    if threads is None or (isinstance(threads, int) and not isinstance(threads, bool) and threads >= 1):
        return []
    return [f"threads must be a whole number from 1 up, found {threads!r}"]


def _wrong_spinning(spinning: object) -> list[str]:
    return [] if isinstance(spinning, bool) else [f"spinning must be True or False, found {spinning!r}"]


def _wrong_providers(providers: Sequence[object]) -> list[str]:
    names = get_args(Provider)
    if not isinstance(providers, list | tuple) or not providers or any(name not in names for name in providers):
        return [f"providers must be a list of {' or '.join(names)}, found {providers!r}"]
    if len(set(providers)) < len(providers):
        return [f"providers must be different, found {list(providers)}"]
    # onnxruntime assigns each op to the first provider that can run it: after the CPU no other would get one.
    return [] if "cpu" not in providers[:-1] else [f"cpu must be the last provider, found {list(providers)}"]
