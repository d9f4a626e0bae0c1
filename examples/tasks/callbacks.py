"""Callbacks of one's own: code that every rank calls between two steps, with a state that checkpoints hold.

Between them the two have a method for each moment at which the trainer calls.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from disttrain_trainer.protocols import Moment


class TailAverage:
    """The mean of the parameters after each step from `begin` on, with which held-out samples are evaluated (stochastic
    weight averaging, Izmailov et al. 2018). What `training.callbacks[].entrypoint` names; `config` holds the arguments.
    """

    def __init__(self, begin: int) -> None:
        self.begin, self.count = begin, 0
        self.means: dict[str, Tensor] = {}

    def on_start(self, moment: Moment) -> None:
        """The model lies where it is trained by now. Its parameters, and so their means, may be cut over ranks."""
        self.means = {name: parameter.detach().clone() for name, parameter in moment.model.named_parameters()}

    def on_step(self, moment: Moment) -> None:
        if moment.step >= self.begin:
            self.count += 1
            for name, parameter in moment.model.named_parameters():
                self.means[name].lerp_(parameter.detach(), 1 / self.count)

    @contextmanager
    @torch.no_grad()
    def evaluating(self, moment: Moment) -> Iterator[None]:
        parameters = dict(moment.model.named_parameters()) if self.count else {}
        own = {name: parameter.clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(self.means[name])
        yield
        for name, parameter in parameters.items():
            parameter.copy_(own[name])

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "means": self.means}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.count, self.means = state_dict["count"], dict(state_dict["means"])


class Best:
    """Says when an evaluation is the best so far, which checkpoint came before it, and at the end which was best."""

    def __init__(self, figure: str) -> None:
        self.figure = figure
        self.best: tuple[float, int] | None = None
        self.saved: int | None = None

    def on_checkpoint(self, moment: Moment) -> None:
        """Before the checkpoint is taken: it holds this already."""
        self.saved = moment.step

    def on_evaluation(self, moment: Moment) -> None:
        found = (moment.metrics[self.figure], moment.step)
        if self.best is None or found[0] > self.best[0]:
            self.best = found
            self._log(moment, f"best {self.figure} so far: {found[0]:.3f}; latest checkpoint: step {self.saved}")

    def on_end(self, moment: Moment) -> None:
        if self.best is not None:
            self._log(moment, f"best {self.figure}: {self.best[0]:.3f}, after step {self.best[1]}")

    def state_dict(self) -> dict[str, Any]:
        return {"best": None if self.best is None else list(self.best), "saved": self.saved}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        best, self.saved = state_dict["best"], state_dict["saved"]
        self.best = None if best is None else (best[0], best[1])

    @staticmethod
    def _log(moment: Moment, what: str) -> None:
        if moment.rank == 0:
            print(f"step {moment.step}: {what}", flush=True)
