"""A GPU for tests: memory that is counted, checks as TensorRT makes them, recordings, and plans run by onnxruntime."""

import bisect
import shutil
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime

from fatdeploy.bundle import Bundle, graph_hash, write_manifest
from fatdeploy.errors import BundleError, DeviceFailed, OutOfDeviceMemory
from fatdeploy.manifest import GRAPHS
from fatdeploy.plans import Part, PlanRecord, Profile, SizeRange, inputs_of, outputs_of, plan_file, shapes_of
from fatdeploy.runtimes.engines.contract import graph_tensor
from fatdeploy.runtimes.engines.ort.sessions import opened_session
from fatdeploy.runtimes.engines.row_moves import Strips
from fatdeploy.runtimes.engines.trt.device import ALIGNMENT, Bytes, GpuIdentity, Shape
from fatdeploy.runtimes.engines.trt.engine import TrtEngine
from fatdeploy.spec import ModelSpec
from tests.support.bundles import bundle_of, shared_bundle

HERE = GpuIdentity("test GPU", "tensorrt-rtx", "1.7.1", "8.9")
MAGIC = b"a plan of onnxruntime: "
GAP = 1 << 20  # between allocations: an overrun of one hits no other


def ranges(**most: int) -> Profile:
    """Return a profile whose ranges start at one."""
    return Profile(sizes={axis: SizeRange(least=1, usual=size, most=size) for axis, size in most.items()})


def wide(spec: ModelSpec) -> tuple[Profile, ...]:
    """Return profiles for everything the tests decode: one source, and many."""
    # As in real builds, a long prefix needs several calls.
    step = spec.max_target if spec.decoding == "parallel" else 16
    sizes = {"source": spec.max_source, "step": step}
    return ranges(batch=1, rows=8, **sizes), ranges(batch=32, rows=128, **sizes)


def with_plans(
    bundle: Bundle, folder: Path, profiles: tuple[Profile, ...] | None = None, here: GpuIdentity = HERE
) -> Bundle:
    """Write a copy of a bundle that has plans for a device."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in bundle.manifest.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.file(name), folder / name)
    parts: tuple[Part, Part] = ("encoder", "decoder")
    records = []
    for part in parts:
        file = plan_file(part, here.flavour, here.version, (here.compute_capability,))
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(MAGIC + part.encode())
        records.append(
            PlanRecord(
                part=part,
                file=file,
                flavour=here.flavour,
                version=here.version,
                compute_capabilities=(here.compute_capability,),
                profiles=profiles or wide(bundle.spec),
                graph_sha256=graph_hash(bundle.manifest, part),
            )
        )
    return write_manifest(folder, replace(bundle.manifest, target=here.flavour, plans=tuple(records)))


def plans_of(preset: str) -> Bundle:
    """Return the exported preset with plans for the test device."""
    return shared_bundle(f"{preset}-plans", lambda folder: with_plans(bundle_of(preset, "standard"), folder))


def trt_engine(preset: str, **options: bool) -> TrtEngine:
    """Return the engine of a preset on a device of its own."""
    bundle = plans_of(preset)
    return TrtEngine(bundle, CpuDevice(bundle), **options)


class CpuDevice:
    """One stream that does work immediately; ``fail_at`` makes the n-th allocation from now fail."""

    def __init__(self, bundle: Bundle, here: GpuIdentity = HERE) -> None:
        self.here = here
        self.bundle = bundle
        self.fail_at: int | None = None
        self.limit: int | None = None  # bytes of the device
        self.fail_execution = False
        self.memory: dict[int, np.ndarray] = {}
        self.n_allocated = self.n_pinned = self.pinned_now = self.n_captured = self.n_launched = self.n_run = 0
        self.open: set[object] = set()  # contexts, graphs, events and plans
        self.uploaded = self.downloaded = 0  # bytes
        self.moved: list[tuple[int, int, Strips]] = []
        self.closed = False
        self.recording: list[Callable[[], None]] | None = None
        self._next = 1 << 40

    @property
    def leaked(self) -> int:
        """How many resources were not freed; pinned memory is freed with its last view."""
        return len(self.memory) + len(self.open)

    def do(self, work: Callable[[], None]) -> None:
        """Do the work now, or keep it while a recording is made."""
        if self.recording is None:
            work()
        else:
            self.recording.append(work)

    def view(self, address: int, n_bytes: int) -> Bytes:
        """Return bytes at an address; raise if any were freed or never allocated."""
        base = bisect.bisect_right(starts := sorted(self.memory), address) - 1
        start = starts[base] if base >= 0 else -1
        if base < 0 or address + n_bytes > start + len(self.memory[start]):
            raise AssertionError(f"{n_bytes} bytes at {address:#x} are not in any allocation")
        return self.memory[start][address - start : address - start + n_bytes]

    def allocate(self, n_bytes: int) -> int:
        self._forbidden_while_recording()
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                raise OutOfDeviceMemory(f"the device has no {n_bytes} bytes left")
        used = sum(map(len, self.memory.values()))
        if self.limit is not None and used + n_bytes > self.limit:
            raise OutOfDeviceMemory(f"the device has no {n_bytes} bytes left")
        address = self._next
        self._next += -(-n_bytes // ALIGNMENT) * ALIGNMENT + GAP
        # Fresh memory is not zero.
        self.memory[address] = np.full(n_bytes, 0xFF, np.uint8)
        self.n_allocated += 1
        return address

    def free(self, address: int) -> None:
        self._forbidden_while_recording()
        del self.memory[address]

    def pinned(self, n_bytes: int) -> Bytes:
        self._forbidden_while_recording()
        self.n_pinned += 1
        self.pinned_now += 1
        host = np.zeros(n_bytes, np.uint8)
        weakref.finalize(host, self._unpinned)
        return host[:]

    def _unpinned(self) -> None:
        self.pinned_now -= 1

    def upload(self, address: int, host: Bytes) -> None:
        def work() -> None:
            self.view(address, host.size)[:] = host
            self.uploaded += host.size

        self.do(work)

    def download(self, host: Bytes, address: int) -> None:
        def work() -> None:
            host[:] = self.view(address, host.size)
            self.downloaded += host.size

        self.do(work)

    def move(self, address: int, source: int, strips: Strips) -> None:
        def work() -> None:
            self.moved.append((address, source, strips))
            for index in range(strips.count):
                offset = index * strips.pitch
                self.view(address + offset, strips.width)[:] = self.view(source + offset, strips.width)

        self.do(work)

    def zero(self, address: int, n_bytes: int) -> None:
        def work() -> None:
            self.view(address, n_bytes)[:] = 0

        self.do(work)

    def event(self) -> "Opened":
        return Opened(self)

    def timed_event(self) -> "Timed":
        return Timed(self)

    def load(self, path: Path, record: PlanRecord) -> "CpuPlan":
        content = path.read_bytes()
        if content != MAGIC + record.part.encode():
            raise BundleError(f"{path} cannot be loaded: it is damaged")
        return CpuPlan(self, record)

    def captured(self, work: Callable[[], None]) -> "CpuGraph":
        self._forbidden_while_recording()
        self.recording = recording = []
        try:
            work()
        finally:
            self.recording = None
        self.n_captured += 1
        return CpuGraph(self, recording)

    def synchronise(self) -> None: ...

    def close(self) -> None:
        self.closed = True

    def _forbidden_while_recording(self) -> None:
        if self.recording is not None:
            raise AssertionError("CUDA does not allow this while a stream is recorded")
        if self.closed:
            raise AssertionError("the device is closed")


class Opened:
    """A resource of the device that must be closed once. It serves as an event: all work before it is done already."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        device.open.add(self)

    def record(self) -> None:
        assert self in self.device.open

    def wait(self) -> None:
        assert self in self.device.open

    def close(self) -> None:
        self.device.open.remove(self)


class Timed(Opened):
    """An event whose clock ticks once per run of a plan."""

    passed = -1

    def record(self) -> None:
        super().record()
        self.passed = self.device.n_run

    def seconds_since(self, earlier: "Timed") -> float:
        assert min(self.passed, earlier.passed) >= 0
        return float(self.passed - earlier.passed)


class CpuGraph(Opened):
    """Recorded work on the addresses bound at that time, whatever is bound now."""

    def __init__(self, device: CpuDevice, work: list[Callable[[], None]]) -> None:
        super().__init__(device)
        self.work = work

    def launch(self) -> None:
        assert self in self.device.open
        self.device.n_launched += 1
        for work in self.work:
            work()


class CpuPlan(Opened):
    """A graph of the bundle in onnxruntime, with the tensors and profiles that a plan of it would have."""

    def __init__(self, device: CpuDevice, record: PlanRecord) -> None:
        super().__init__(device)
        self.record, self.spec = record, device.bundle.spec
        self.session = opened_session(onnxruntime, device.bundle.file(GRAPHS[record.part]), threads=1)
        self.fixed = self.spec.fixed_axes(branches=False)
        self.inputs = {tensor.name: tensor for tensor in inputs_of(self.spec, record.part)}
        self.outputs = outputs_of(self.spec, record.part)
        self.tensors = tuple(
            graph_tensor(tensor.fixed(self.fixed), "input" if tensor.name in self.inputs else "output")
            for tensor in (*self.inputs.values(), *self.outputs)
        )

    @property
    def n_profiles(self) -> int:
        return len(self.record.profiles)

    def profile_shapes(self, name: str, profile: int) -> tuple[Shape, Shape, Shape]:
        return shapes_of(self.inputs[name], self.record.profiles[profile], self.fixed)

    def aliased(self, name: str) -> str | None:
        pairs = zip(self.spec.state, self.spec.past, self.spec.present, strict=True)
        return next((past.name for state, past, out in pairs if out.name == name and state.kind == "cache"), None)

    def context(self, profile: int) -> "CpuContext":
        return CpuContext(self, profile)


class CpuContext(Opened):
    """A run of a graph on views of the device's memory: a buffer bound twice is read and written."""

    def __init__(self, plan: CpuPlan, profile: int) -> None:
        super().__init__(plan.device)
        self.plan, self.profile = plan, profile
        self.bound: dict[str, tuple[Shape, int]] = {}
        self.n_executed = 0

    def bind(self, name: str, shape: Shape, address: int) -> None:
        if address % ALIGNMENT:
            raise AssertionError(f"{name} is at {address:#x}, not a multiple of {ALIGNMENT}")
        if name in self.plan.inputs:
            least, _, most = self.plan.profile_shapes(name, self.profile)
            if len(shape) != len(least) or any(not a <= b <= c for a, b, c in zip(least, shape, most, strict=True)):
                raise DeviceFailed(f"{name} {list(shape)} is not within {least} and {most} of profile {self.profile}")
        self.bound[name] = shape, address

    def execute(self) -> None:
        assert self in self.device.open
        if self.device.fail_execution:
            raise DeviceFailed("the device could not be asked to run")
        if self.device.recording is not None and not self.n_executed:
            raise AssertionError("TensorRT must run once with its shapes before it is recorded")
        self.n_executed += 1
        bound = dict(self.bound)  # a copy: binding again later changes no recording
        self.device.do(lambda: self._run(bound))

    def _run(self, bound: dict[str, tuple[Shape, int]]) -> None:
        self.device.n_run += 1
        binding = self.plan.session.io_binding()
        for tensor in self.plan.tensors:
            shape, address = bound[tensor.name]
            size = int(np.prod(shape, dtype=np.int64)) * np.dtype(tensor.dtype).itemsize
            value = onnxruntime.OrtValue.ortvalue_from_numpy(
                self.device.view(address, size).view(tensor.dtype).reshape(shape)
            )
            bind = binding.bind_ortvalue_input if tensor.kind == "input" else binding.bind_ortvalue_output
            bind(tensor.name, value)
        self.plan.session.run_with_iobinding(binding)
