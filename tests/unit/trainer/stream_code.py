"""Data of a user that are iterated, as entry points."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.unit.trainer import task_code
from tests.unit.trainer.user_code import double_samples


class Rows:
    """The samples of `double_samples` one after the other, for pass after pass; some noise on top."""

    def __init__(self, rows: list[Any], noise: float = 0.0) -> None:
        self.rows, self.noise = rows, noise
        self.position = 0

    def shard(self, index: int, count: int) -> "Rows":
        return type(self)(self.rows[index::count], self.noise)

    def __iter__(self) -> Iterator[Any]:
        while self.position < len(self.rows):
            self.position += 1
            x, kind = self.rows[self.position - 1]
            yield x + self.noise * torch.randn(x.shape, dtype=x.dtype), kind
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Whole(Rows):
    """A data set that cannot be taken apart."""

    shard = None  # type: ignore[assignment]


class Forgetful(Rows):
    """A data set without a position."""

    state_dict = None  # type: ignore[assignment]


class Odd(Rows):
    """A data set whose position is no plain value."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": object()}


class Renamed(Rows):
    """A data set that does not take the positions of its former version."""

    def state_dict(self) -> dict[str, Any]:
        return {"offset": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["offset"]


class OneWay(Rows):
    """A data set that does not take its own positions."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise TypeError("no way back")


KINDS = {"Rows": Rows, "Whole": Whole, "Forgetful": Forgetful, "Odd": Odd, "Renamed": Renamed, "OneWay": OneWay}


def rows(kind: str = "Rows", noise: float = 0.0, size: int = 50) -> tuple[Rows, Any]:
    """What `training.data.entrypoint` names."""
    training, held_out = double_samples()
    return KINDS[kind]([training[index] for index in range(size)], noise), held_out


class Streamed(task_code.Classify):
    """The same in a task, whose samples are dictionaries."""

    def data(self) -> Any:
        training, held_out = super().data()
        return DictionaryRows([training[index] for index in range(50)]), held_out


class DictionaryRows(Rows):
    """Rows that are dictionaries."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.position < len(self.rows):
            self.position += 1
            yield self.rows[self.position - 1]
        self.position = 0
