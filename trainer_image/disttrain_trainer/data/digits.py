"""scikit-learn's handwritten digits: 1,797 images of 8 x 8, part of the package, nothing is downloaded."""

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch.utils.data import TensorDataset

from disttrain_api.builtin import DIGITS_SHAPE, DigitsConfig
from disttrain_trainer.data.batches import Datasets

# Brightness of a pixel in the original data.
_MAXIMUM = 16.0


def load(config: DigitsConfig) -> Datasets:
    """Images [1, 8, 8] in 0..1 as float32, classes as int64; each class is split in the same proportion."""
    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).view(-1, *DIGITS_SHAPE) / _MAXIMUM
    classes = torch.from_numpy(digits.target).to(torch.int64)
    training, held_out = train_test_split(
        torch.arange(len(images)).numpy(),
        test_size=config.held_out_fraction,
        random_state=config.split_seed,
        stratify=digits.target,
    )
    settings = {"heldOutFraction": config.held_out_fraction, "splitSeed": config.split_seed}
    first, second = (TensorDataset(images[indices], classes[indices]) for indices in (training, held_out))
    return Datasets(first, second, settings=settings)
