"""Fully connected layers."""

from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from disttrain_api.builtin import MlpConfig


class Mlp(nn.Sequential):
    """[B, ...] of `input_size` numbers per sample -> [B, output_size]."""

    def __init__(self, config: MlpConfig) -> None:
        assert config.input_size is not None
        assert config.output_size is not None
        layers: list[nn.Module] = [nn.Flatten()]
        size = config.input_size
        for hidden in config.hidden_sizes:
            layers += [nn.Linear(size, hidden), nn.ReLU(), nn.Dropout(config.dropout)]
            size = hidden
        super().__init__(*layers, nn.Linear(size, config.output_size))

    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        """Linear layers cut by columns and by rows in turn: one sum serves two of them. A last one stays whole."""
        if sequence or vocabulary:
            raise ValueError("an mlp has neither a sequence nor a vocabulary")
        linear = [name for name, layer in self.named_children() if isinstance(layer, nn.Linear)]
        plan: dict[str, ParallelStyle] = {}
        for first, second in zip(linear[::2], linear[1::2], strict=False):
            plan |= {first: ColwiseParallel(), second: RowwiseParallel()}
        return plan


def build(config: MlpConfig) -> nn.Module:
    """An Mlp of this shape, initialised from torch's random state."""
    return Mlp(config)
