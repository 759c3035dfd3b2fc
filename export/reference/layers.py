"""What layers consist of: residual connections with their norm, self-attention projections, feed-forward networks."""

from torch import Tensor, nn
from torch.nn import functional

from fatdeploy.export.reference.config import Activation, ModelConfig


def layer_norm(config: ModelConfig) -> nn.LayerNorm:
    """Return a LayerNorm over the model's width."""
    return nn.LayerNorm(config.width, eps=1e-5)


def activated(x: Tensor, kind: Activation) -> Tensor:
    """Return x through the activation; ``gelu`` is the erf form, ``swish`` is x·σ(x)."""
    match kind:
        case "relu":
            return x.relu()
        case "gelu":
            return functional.gelu(x)
        case "swish":
            return functional.silu(x)


class Residual(nn.Module):
    """One residual connection: x + f(LN(x)) with ``pre``, LN(x + f(x)) with ``post``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = layer_norm(config)
        self.dropout = nn.Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def enter(self, x: Tensor) -> Tensor:
        """Return what the sub-layer reads."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, y: Tensor | None) -> Tensor:
        """Return x plus the sub-layer's output y; None means that the sub-layer did not run."""
        total = x if y is None else x + self.dropout(y)
        return total if self.pre else self.norm(total)


class SelfAttention(nn.Module):
    """The projections of a self-attention: packed queries, keys and values, and the output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)


class FeedForward(nn.Module):
    """Linear, activation, Linear, with its residual connection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.residual = Residual(config)
        self.into = nn.Linear(config.width, config.ffn_width)
        self.out = nn.Linear(config.ffn_width, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.activation: Activation = config.activation

    def forward(self, x: Tensor) -> Tensor:
        inner = self.dropout(activated(self.into(self.residual.enter(x)), self.activation))
        return self.residual.leave(x, self.out(inner))
