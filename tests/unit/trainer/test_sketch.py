"""What tells data apart that have the same size, and what must not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from disttrain_trainer.data.alike import agree_on_data
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.choices import ChoiceTask, Question
from disttrain_trainer.data.sketch import alike, first_unlike, places_of, sketch_of, sketches_of
from disttrain_trainer.runtime.errors import DataUnlike

GENERATOR = torch.Generator().manual_seed(3)
IMAGE, OTHER = torch.rand(2, 3, 33, 21, generator=GENERATOR)


@dataclass
class Row:
    """A sample as some data sets have it."""

    numbers: Any
    text: str


SAMPLES = {
    "tensors": (IMAGE, 3),
    "another image": (OTHER, 3),
    "another class": (IMAGE, 4),
    "another shape": (IMAGE.reshape(3, 21, 33), 3),
    "mapping": {"tokens": torch.arange(9), "mask": torch.ones(9, dtype=torch.bool)},
    "another key": {"tokens": torch.arange(9), "cover": torch.ones(9, dtype=torch.bool)},
    "another order": {"tokens": torch.arange(9).flip(0), "mask": torch.ones(9, dtype=torch.bool)},
    "arrays": [np.arange(6.0), np.arange(3)],
    "other numbers": [np.arange(6.0)[::-1], np.arange(3)],
    "dataclass": Row([1.5, 2.5], "a"),
    "another text": Row([1.5, 2.5], "b"),
    "another number": Row([1.5, 2.6], "a"),
    "half": torch.full((3,), 0.5, dtype=torch.bfloat16),
    "complex": torch.tensor([1 + 2j, 3j]).conj(),
    "another phase": torch.tensor([1 - 2j, 3]),
    "nothing": None,
    "sparse": torch.eye(3).to_sparse(),
    "empty": torch.empty(0, 4),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_alike_itself_and_no_other(name: str) -> None:
    found = {other for other, sample in SAMPLES.items() if alike(sketch_of(SAMPLES[name]), sketch_of(sample))}
    assert found == {name}


def test_what_another_processor_rounds_otherwise_is_the_same() -> None:
    near = IMAGE * (1 + 1e-6 * torch.randn(IMAGE.shape, generator=GENERATOR))
    assert not torch.equal(near, IMAGE)
    assert alike(sketch_of((near, 3)), sketch_of((IMAGE, 3)))


@pytest.mark.parametrize(
    "value", [torch.tensor([torch.nan, torch.inf]), float("nan"), torch.full((3,), 1e300, dtype=torch.float64)]
)
def test_numbers_that_say_nothing_are_none(value: Any) -> None:
    _, numbers = sketch_of(value)
    assert all(np.isfinite(number) for pair in numbers for number in pair)


def test_an_object_that_nobody_knows_counts_by_its_type() -> None:
    assert alike(sketch_of(object()), sketch_of(object()))
    assert not alike(sketch_of(object()), sketch_of(SimpleNamespace()))


@pytest.mark.parametrize(("size", "places"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (100, [0, 33, 66, 99])])
def test_the_first_the_last_and_some_between_are_looked_at(size: int, places: list[int]) -> None:
    assert places_of(size) == places


def test_a_sample_that_cannot_be_read_is_not_known() -> None:
    class Broken(list[int]):
        def __getitem__(self, index: Any) -> Any:
            raise OSError("no such file")

    sketches = sketches_of(Broken([1]))
    assert sketches == [None]
    assert first_unlike(sketches, [sketch_of(1)]) is None


class Ranks:
    """A world in which other ranks find other data: what this one gathers comes from all of them."""

    def __init__(self, *others: Datasets) -> None:
        self.others, self._calls = others, 0

    def gather(self, own: Any, kind: Any) -> list[Any]:
        self._calls += 1
        if self._calls == 1:
            return [own] * (1 + len(self.others))
        if self._calls == 2:
            return [own, *(sketches_of(one.training) for one in self.others)]  # type: ignore[arg-type]
        return [own] * (1 + len(self.others))


class Asked(Ranks):
    """A world whose rank 1 has the questions of `there`."""

    def gather(self, own: Any, kind: Any) -> list[Any]:
        found = super().gather(own, kind)
        if self._calls == 1:
            found[1] = (*own[:2], ["", *(task.fingerprint for task in self.others[1].choices)])
        return found


def samples(order: list[int]) -> Datasets:
    numbers = torch.arange(60.0).reshape(20, 3)[order]
    return Datasets(TensorDataset(numbers, torch.tensor(order)), None)


class Flipped(TensorDataset):
    """Augments by a generator of its own, which no seed reaches."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.own = np.random.default_rng()

    def __getitem__(self, index: Any) -> Any:
        inputs, target = super().__getitem__(index)
        return inputs.flip(0) if self.own.random() < 0.5 else inputs, target


def test_ranks_with_the_same_data_go_on_and_know_what_they_are() -> None:
    data = samples(list(range(20)))
    agreed = agree_on_data(data, Ranks(data, data))  # type: ignore[arg-type]
    assert agreed == replace(data, sketches=sketches_of(data.training))  # type: ignore[arg-type]
    assert len(agreed.sketches) == 4


def test_a_rank_with_another_order_is_named_with_the_sample() -> None:
    here, there = samples(list(range(20))), samples([*range(19, 12, -1), *range(13)])
    with pytest.raises(
        DataUnlike, match=r"^sample 0 of the 20 training samples is another one on rank 2 than on rank 0: "
    ):
        agree_on_data(here, Ranks(here, there))  # type: ignore[arg-type]


def test_a_rank_with_other_questions_is_named() -> None:
    row = np.array([1, 2], np.int32)
    here, there = (
        replace(
            samples(list(range(20))),
            choices=[ChoiceTask("one", [Question("a", ["b", "c"], answer, "")], [row, row], [1, 1])],
        )
        for answer in (0, 1)
    )
    agree_on_data(there, Asked(here, there))  # type: ignore[arg-type]
    with pytest.raises(DataUnlike, match=r"^rank 1 finds other data than rank 0"):
        agree_on_data(here, Asked(here, there))  # type: ignore[arg-type]


def test_samples_that_are_drawn_anew_each_time_are_not_compared() -> None:
    numbers = torch.arange(60.0).reshape(20, 3)
    here, there = (Datasets(Flipped(numbers, torch.arange(20)), None) for _ in range(2))
    world = Ranks(*[there] * 30)
    assert agree_on_data(here, world).sketches == ()  # type: ignore[arg-type]
