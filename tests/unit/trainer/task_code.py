"""Tasks of a user, as entry points."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from disttrain_trainer.protocols import Loss, Mean
from tests.unit.trainer import user_code


class Samples:
    """Dictionaries of the samples of `double_samples`: a name, an input, a class within a list, and odd types."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        x, kind = self.dataset[index]
        return {"name": f"sample {index}", "x": x, "extra": [kind, {"half": x.half(), "byte": kind.byte()}]}


class Classify:
    """`double_mlp` on `double_samples`, with batches that are dictionaries."""

    def __init__(self, plan: bool = False) -> None:
        self.plan = plan

    def model(self) -> nn.Module:
        return user_code.planned_mlp("whole") if self.plan else user_code.double_mlp()

    def data(self) -> tuple[Samples, Samples]:
        training, held_out = user_code.double_samples()
        return Samples(training), Samples(held_out)

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Loss:
        outputs, classes = model(batch["x"]), batch["extra"][0]
        return Loss(functional.cross_entropy(outputs, classes, reduction="sum"), {"right": right(outputs, classes)})

    def evaluate(self, model: nn.Module, batch: dict[str, Any]) -> dict[str, Mean]:
        assert len(batch["name"]) == len(batch["x"])
        assert batch["extra"][1]["half"].dtype is torch.float16
        outputs, classes = model(batch["x"]), batch["extra"][0]
        loss = functional.cross_entropy(outputs, classes, reduction="sum")
        return {"loss": Mean(loss, len(classes)), "accuracy": right(outputs, classes)}


class JudgedByItsOwn(Classify):
    """Its figures on held-out data are those of training."""

    evaluate = None  # type: ignore[assignment]


def right(outputs: Tensor, classes: Tensor) -> Mean:
    return Mean((outputs.argmax(-1) == classes).sum(), len(classes))


class Twins(Classify):
    """Two forward passes before one backward pass; a loss weighed by what is in the batch; a frozen teacher."""

    def __init__(self, plan: bool = False) -> None:
        super().__init__(plan)
        self.teacher = user_code.double_mlp(hidden=4)

    def collate(self, samples: Sequence[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Inputs, and how much each counts: 1, 2 or 3."""
        x = torch.stack([sample["x"] for sample in samples])
        return x, torch.stack([sample["extra"][0] % 3 + 1 for sample in samples])

    def weight(self, batch: tuple[Tensor, Tensor]) -> float:
        return float(batch[1].sum())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        x, counts = batch
        assert not self.teacher.training
        distance = (model(x) + model(-x) - self.teacher(x)).square().mean(-1)
        total = (distance * counts).sum()
        return Loss(total, {"distance": Mean(distance.sum(), len(x))})

    evaluate = None  # type: ignore[assignment]


class Optimized(Classify):
    """An optimizer of its own: SGD in which the last layer stands still."""

    def __init__(self, forgets: str = "") -> None:
        super().__init__()
        self.forgets = forgets

    def optimizer(self, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        own = {name: parameter for name, parameter in parameters.items() if name != self.forgets}
        groups = [
            {"params": [parameter for name, parameter in own.items() if not name.startswith("4.")]},
            {"params": [parameter for name, parameter in own.items() if name.startswith("4.")], "lr": 0.0},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def momentum(params: list[dict[str, Any]], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """SGD, with an argument that no manifest has."""
    return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay, momentum=0.9)


def forgetful(params: list[dict[str, Any]], lr: float, weight_decay: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[0]["params"][1:], lr=lr)


def no_optimizer(params: list[dict[str, Any]], **settings: float) -> object:
    return settings


def halving(step: int, steps: int) -> float:
    """A schedule that halves every 20 steps."""
    return 0.5 ** (step // 20)


def slow(step: int, steps: int) -> Any:
    """Schedules that are none."""
    return (-1.0, float("nan"), float("inf"), True, "slow", None)[step]


class Wrong(Classify):
    """A task that is wrong in the way that it is asked for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "incomplete":
            self.data = None  # type: ignore[assignment]

    def loss(self, model: nn.Module, batch: dict[str, Any]) -> Any:
        loss, figures = super().loss(model, batch)
        answers: dict[str, Any] = {
            "tensor": loss,
            "mean for each": Loss(model(batch["x"])),
            "detached": Loss(loss.detach()),
            "figure": Loss(loss, {"right": 1.0}),  # type: ignore[dict-item]
            "name": Loss(loss, {"right\n": figures["right"]}),
        }
        return answers.get(self.how, Loss(loss))

    def weight(self, batch: Any) -> Any:
        return "many" if self.how == "weight" else 1.0

    def data(self) -> Any:
        if self.how == "shapes":
            return [{"x": torch.zeros(3 + index % 2)} for index in range(30)], None
        return ([{"x": object()}] * 30, None) if self.how == "types" else super().data()
