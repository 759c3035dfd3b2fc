"""What layers consist of: residual connections with their norm, self-attention projections, feed-forward networks."""

from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.config import Activation, HeadShape, ModelConfig

Norm = nn.LayerNorm | nn.RMSNorm


def norm_of(config: ModelConfig) -> Norm:
    """Return a norm over the model's width."""
    kind = nn.LayerNorm if config.norm_kind == "layer" else nn.RMSNorm
    return kind(config.width, eps=config.norm_eps)


def activated(x: Tensor, kind: Activation) -> Tensor:
    """Return x through the activation; ``gelu`` is the erf form, ``gelu_tanh`` approximates it, ``swish`` is x·σ(x)."""
    match kind:
        case "relu":
            return x.relu()
        case "gelu":
            return functional.gelu(x)
        case "gelu_tanh":
            return functional.gelu(x, approximate="tanh")
        case "swish":
            return functional.silu(x)


class Residual(nn.Module):
    """One residual connection: x + f(LN(x)) with ``pre``, LN(x + f(x)) with ``post``; the sum may pass a ReLU."""

    def __init__(self, config: ModelConfig, *, relu: bool = False) -> None:
        super().__init__()
        self.relu = relu
        self.norm = norm_of(config)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def enter(self, x: Tensor) -> Tensor:
        """Return what the sub-layer reads."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return x plus the sub-layer's output y; None means that the sub-layer did not run."""
        total = x if y is None else x + self.dropout(y)
        total = total.relu() if self.relu else total
        return total if self.pre else self.norm(total)


class SelfAttention(nn.Module):
    """The projections of a self-attention: packed queries, keys and values, and the output."""

    def __init__(self, config: ModelConfig, heads: HeadShape) -> None:
        super().__init__()
        self.heads = heads.count
        self.qkv = nn.Linear(config.width, 3 * config.attention_width, config.biases)
        self.out = nn.Linear(config.attention_width, config.width, config.biases)


class FeedForward(nn.Module):
    """Linear, activation, Linear, with its residual connection; ``gated`` multiplies with a second projection.

    Both projections are one matrix: first what passes the activation, then what it is multiplied with. With ``skip``
    the last Linear reads the sum of that and of the network's input.
    """

    def __init__(self, config: ModelConfig, inner_width: int) -> None:
        super().__init__()
        self.residual = Residual(config)
        self.gated = config.gated
        self.skip = config.ffn_skip
        self.into = nn.Linear(config.width, (2 if config.gated else 1) * inner_width, config.biases)
        self.out = nn.Linear(inner_width, config.width, config.biases)
        self.dropout = nn.Dropout(config.dropout)
        self.activation: Activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        h = self.residual.enter(x)
        inner = self.into(h)
        if self.gated:
            gate, up = inner.chunk(2, -1)
            inner = activated(gate, self.activation) * up
        else:
            inner = activated(inner, self.activation)
        inner = self.dropout(inner)
        return self.residual.leave(x, self.out(inner + h if self.skip else inner))
