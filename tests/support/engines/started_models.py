"""A model of one's own whose decoder state starts from the source, and knows the source in no other way."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from fatdeploy.export.models.exportable import Memory, State
from fatdeploy.spec import ModelSpec, StateSpec, TensorSpec

WIDTH = 16
SPEC = ModelSpec(
    vocab_size=64,
    max_source=32,
    max_target=48,
    pad_id=0,
    bos_id=1,
    eos_id=2,
    memory=(TensorSpec("lengths", "float32", ("batch", 1)),),
    state=(
        StateSpec("count", "float32", ("rows", 1), "recurrent"),
        StateSpec("sum", "float32", ("rows", WIDTH), "recurrent", "source"),
    ),
)


class StartedSum(nn.Module):
    """Sums what it reads, beginning with the mean of the source."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        super().__init__()
        self.spec = spec
        self.embedding, self.turn = nn.Embedding(64, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64)

    def encode(self, source: Tensor, source_mask: Tensor) -> tuple[Tensor, ...]:
        return (source_mask.sum(1, keepdim=True).to(self.output.weight.dtype) + 0 * source[:, :1],)

    def start(self, memory: Memory) -> tuple[Tensor, ...]:
        weights = memory.mask[..., None].to(torch.float32)
        total = (self.embedding(memory.source) * weights).sum(1)
        return torch.zeros_like(memory.tensors[0]), 4 * (total / memory.tensors[0])

    def step(self, tokens: Tensor, state: State, memory: Memory) -> tuple[Tensor, tuple[Tensor, ...]]:
        x = self.embedding(tokens)
        count, before = state.tensors
        counts = count[:, None] + torch.arange(1, tokens.shape[1] + 1)[:, None]
        sums = before[:, None] + (x * 2).cumsum(1)
        length = memory.by_row(memory.by_source(torch.zeros_like(x)) + memory.tensors[0][:, None, None], x)
        h = self.norm(self.turn(sums).sin() + 0.1 * (counts - length).sin())
        return self.output(h) * 4, (count + tokens.shape[1], sums[:, -1])

    def forward(self, source: Tensor, source_mask: Tensor, target_in: Tensor) -> Tensor:
        memory = Memory(source, source_mask, self.encode(source, source_mask))
        return self.step(target_in, State(torch.tensor(0), self.start(memory)), memory)[0]


class LearnedStart(StartedSum):
    """Sums what it reads, beginning with numbers of its own, which are the same for all sources."""

    def __init__(self, spec: ModelSpec = SPEC) -> None:
        super().__init__(spec)
        self.first = nn.Parameter(torch.randn(WIDTH))

    def start(self, memory: Memory) -> tuple[Tensor, ...]:
        return torch.zeros_like(memory.tensors[0]), self.first.expand(memory.source.shape[0], WIDTH)


def learned_start() -> LearnedStart:
    """Return the model, seeded."""
    torch.manual_seed(3)
    return LearnedStart()


def started_sum(start: str = "source") -> StartedSum:
    """Return the model, seeded; its contract says how the sum starts."""
    torch.manual_seed(3)
    count, total = SPEC.state
    return StartedSum(replace(SPEC, state=(count, replace(total, start=start))))  # type: ignore[arg-type]
