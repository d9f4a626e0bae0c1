"""Callbacks of a user, as entry points."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from disttrain_trainer.protocols import Moment


class Recorder:
    """Writes down each call, and keeps sums of parameters, counts and a list that grows in its state. The second
    attempt's `on_start` comes before its state, whose counts then replace those of that call."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.sums: dict[str, Tensor] = {}
        self.counts: dict[str, int] = {}
        self.found: list[float] = []

    def on_start(self, moment: Moment) -> None:
        self._note("start", moment)
        self.sums = {name: torch.zeros_like(one.detach()) for name, one in moment.model.named_parameters()}

    def on_step(self, moment: Moment) -> None:
        self._note("step", moment)
        for name, parameter in moment.model.named_parameters():
            self.sums[name] += parameter.detach()

    def on_evaluation(self, moment: Moment) -> None:
        self._note("evaluation", moment)
        self.found.append(moment.metrics["loss"])

    def on_checkpoint(self, moment: Moment) -> None:
        self._note("checkpoint", moment)

    def on_end(self, moment: Moment) -> None:
        self._note("end", moment)
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in self.sums.items()}
        state = {"sums": whole, "counts": self.counts, "found": self.found}
        torch.save(state, self.folder / f"state-{moment.rank}.pt")

    def state_dict(self) -> dict[str, Any]:
        return {"inner": {"sums": self.sums}, "counts": self.counts, "found": self.found}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.sums, self.counts, self.found = state_dict["inner"]["sums"], state_dict["counts"], state_dict["found"]

    def _note(self, name: str, moment: Moment) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1
        self.folder.mkdir(parents=True, exist_ok=True)
        torch.rand(1)
        record = [name, moment.step, moment.total_steps, moment.world_size, sorted(moment.metrics)]
        with (self.folder / f"calls-{moment.rank}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")


class Mistaken:
    """A callback that is wrong in the way that it is asked for."""

    def __init__(self, how: str) -> None:
        self.how = how
        if how == "unknown":
            self.on_epoch = self.on_step
        if how == "half":
            self.state_dict = dict
        if how in ("list", "object", "other"):
            self.state_dict = {"list": list, "object": lambda: {"file": Path()}, "other": dict}[how]
            self.load_state_dict = self._load_state_dict

    def on_step(self, moment: Moment) -> None:
        if self.how == "raises" and moment.step == 2:
            raise ValueError("no such figure")

    def _load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise KeyError("mean")


class Silent:
    """A callback that offers nothing."""


class Parameters:
    """Keeps the parameters of each step, whole, on rank 0."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_start(self, moment: Moment) -> None:
        self.on_step(moment)

    def on_step(self, moment: Moment) -> None:
        named = moment.model.named_parameters(remove_duplicate=False)
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in named}
        if moment.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            torch.save({name: one.detach().clone() for name, one in whole.items()}, self.folder / f"{moment.step}.pt")


class Broken:
    """A callback whose context for evaluations is none, or fails when it is left."""

    def __init__(self, how: str) -> None:
        self.how = how

    def evaluating(self, moment: Moment) -> Any:
        return None if self.how == "none" else self if self.how == "fails" else 1

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        raise RuntimeError("no way back")
