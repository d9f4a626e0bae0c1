"""Made-up samples, each a pure function of (seed, index)."""

import torch
from torch import Tensor
from torch.utils.data import Dataset

from disttrain_api.builtin import Images, SyntheticConfig, Tokens, samples_of
from disttrain_trainer.data.batches import Datasets

_NOISE = 0.5


class SyntheticImages(Dataset[tuple[Tensor, int]]):
    """A fixed pattern per class plus noise: image [C, H, W] float32, class."""

    def __init__(self, samples: Images, seed: int, indices: range) -> None:
        self.samples, self.seed, self.indices = samples, seed, indices
        self.patterns = torch.randn(samples.classes, *samples.shape, generator=_generator(seed, -1))

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = _generator(self.seed, self.indices[index])
        kind = int(torch.randint(self.samples.classes, (), generator=generator))
        return self.patterns[kind] + _NOISE * torch.randn(self.samples.shape, generator=generator), kind


class SyntheticTokens(Dataset[tuple[Tensor, Tensor]]):
    """Random tokens: input [T], each one's successor [T], int64."""

    def __init__(self, samples: Tokens, seed: int, indices: range) -> None:
        self.samples, self.seed, self.indices = samples, seed, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        generator = _generator(self.seed, self.indices[index])
        tokens = torch.randint(self.samples.vocabulary, (self.samples.length + 1,), generator=generator)
        return tokens[:-1], tokens[1:]


def load(config: SyntheticConfig) -> Datasets:
    """The first samples are trained on, the rest is held out; at least one each."""
    samples = samples_of(config)
    kind = SyntheticImages if isinstance(samples, Images) else SyntheticTokens
    training = min(config.size - 1, max(1, round(config.size * (1 - config.held_out_fraction))))
    return Datasets(
        kind(samples, config.data_seed, range(training)),  # type: ignore[arg-type]
        kind(samples, config.data_seed, range(training, config.size)),  # type: ignore[arg-type]
        settings={"heldOutFraction": config.held_out_fraction},
    )


def _generator(seed: int, index: int) -> torch.Generator:
    # Seeds are below 2^31 and indices below 2^30, so each pair has a generator of its own.
    return torch.Generator().manual_seed((seed << 32) + index + 1)
