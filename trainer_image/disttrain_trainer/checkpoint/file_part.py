"""What tensors of safetensors files are in a model whose parameters have other names, or stand there in parts.

A model that has such files offers `part_in_files(name)`, which returns a FilePart for the name of a tensor, or None for
one that the model computes itself.
"""

from typing import NamedTuple


class FilePart(NamedTuple):
    """What a tensor of a file is in the model."""

    parameter: str
    row: int | None = None
    """Index in the first dimension of a parameter of three; None: it is the whole parameter."""
    column: int = 0
    """Which of the equal parts of the second dimension."""
