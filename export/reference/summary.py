"""The presets as a table: what they consist of, and their parameters, counted on the models themselves."""

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fatdeploy.export.reference.config import ModelConfig
from fatdeploy.export.reference.model import ReferenceModel
from fatdeploy.export.reference.presets import config_from_preset, preset_names


@dataclass(frozen=True)
class Summary:
    """One preset in one size."""

    name: str
    parameters: int
    config: ModelConfig

    HEADINGS: ClassVar[tuple[str, ...]] = (
        "name",
        "parameters",
        "layers",
        "width/heads/ffn",
        "vocabulary",
        "longest",
        "encoder",
        "decoder",
        "cross",
        "also",
    )

    def row(self) -> tuple[str, ...]:
        """Return the values under ``HEADINGS``."""
        config = self.config
        return (
            self.name,
            f"{self.parameters:,}",
            f"{config.encoder_layers}+{config.decoder_layers}",
            f"{config.width}/{config.heads}/{config.ffn_width}",
            f"{config.vocab_size:,}",
            f"{config.max_source}/{config.max_target}",
            str(config.encoder_attention),
            config.decoder_attention,
            config.cross_attention,
            self._remarks(),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return dataclasses.asdict(self)

    def _remarks(self) -> str:
        config = self.config
        remarks = {
            f"{config.norm}-norm": not (config.recurrent_encoder and config.recurrent_decoder),
            "parallel (NAT)": config.parallel,
            "encoder left to right": config.encoder_direction == "left_to_right",
            "starts from the source": config.starts_from_source,
            "relative scores": config.relative != "none",
            "positional MLP": config.positional_mlp > 0,
            "MLP head": config.head == "mlp",
            "hybrid": config.hybrid and config.hybrid_skips == "cross",
            "hybrid, skips layers": config.hybrid_skips == "layer",
        }
        return ", ".join(remark for remark, holds in remarks.items() if holds)


def parameter_count(config: ModelConfig) -> int:
    """Return the number of learned parameters; tied matrices count once. No memory is allocated for weights."""
    with torch.device("meta"):
        model = ReferenceModel(config)
    return sum(parameter.numel() for parameter in model.parameters())


def summaries() -> list[Summary]:
    """Return every preset in every size."""
    configs = {name: config_from_preset(name) for name in preset_names()}
    return [Summary(name, parameter_count(config), config) for name, config in configs.items()]
