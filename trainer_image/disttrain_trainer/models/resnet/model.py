"""A small residual network (He et al. 2016).

Its normalisation is that of groups (Wu and He 2018) or of batches (Ioffe and Szegedy 2015).

Group normalisation looks at one sample at a time, so every way of cutting a batch computes the same.
Shapes: B batch, C channels, H height, W width.
"""

from torch import Tensor, nn

from disttrain_api.builtin import NormName, ResnetConfig

_GROUP = 8


class Block(nn.Module):
    """Two 3 x 3 convolutions and a shortcut: [B, C, H, W] -> [B, C', H / stride, W / stride]."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, norm: NormName) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm1 = _norm(norm, channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, channels_out)
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Conv2d(channels_in, channels_out, 1, stride, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        return self.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def build(config: ResnetConfig) -> nn.Module:
    """[B, input_channels, H, W] -> [B, output_size]."""
    assert config.input_channels is not None
    assert config.output_size is not None
    layers: list[nn.Module] = [
        nn.Conv2d(config.input_channels, config.width, 3, padding=1, bias=False),
        _norm(config.norm, config.width),
        nn.ReLU(),
    ]
    channels = config.width
    for stage, blocks in enumerate(config.blocks):
        width = config.width * 2**stage
        for index in range(blocks):
            stride = 2 if stage > 0 and index == 0 else 1
            layers.append(Block(channels, width, stride, config.norm))
            channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, config.output_size))


def _norm(name: NormName, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if name is NormName.BATCH else nn.GroupNorm(channels // _GROUP, channels)
