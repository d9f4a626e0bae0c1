"""Fully connected layers."""

from torch import nn

from disttrain_api.builtin import MlpConfig


def build(config: MlpConfig) -> nn.Module:
    """[B, ...] of `input_size` numbers per sample -> [B, output_size]."""
    assert config.input_size is not None
    assert config.output_size is not None
    layers: list[nn.Module] = [nn.Flatten()]
    size = config.input_size
    for hidden in config.hidden_sizes:
        layers += [nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(config.dropout)]
        size = hidden
    return nn.Sequential(*layers, nn.Linear(size, config.output_size))
