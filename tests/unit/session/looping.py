"""A loop of one's own, as a program that its environment makes die or stop.

LOOP_STORAGE: folder argument of the session. LOOP_END: "RANK SIGNAL STEP", what this rank does to itself after a step.
LOOP_EXTRA: registers one object more. At its end each rank writes what it has become to rank-N.pt in LOOP_OUT.
"""

import os
import random
import signal
from pathlib import Path
from typing import Any

import torch
from torch import nn

import disttrain
from tests.unit.trainer.user_layers import Remembering
from tests.waiting import until

STEPS = 8


class Noisy:
    """36 samples with noise: what a data set draws must be the same after a resume."""

    def __len__(self) -> int:
        return 36

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": torch.full((6,), index / 36) + 0.1 * torch.randn(6), "target": torch.tensor([index / 36])}


class Walk:
    """An environment with a state of its own on each rank, of a kind that grows."""

    def __init__(self) -> None:
        self.history: list[float] = []

    def state_dict(self) -> dict[str, list[float]]:
        return {"history": list(self.history)}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        self.history = state["history"]


def end_if_asked(session: Any) -> None:
    asked = os.environ.get("LOOP_END", "").split()
    if asked and (session.rank, session.completed + 1) == (int(asked[0]), int(asked[2])):
        os.kill(os.getpid(), signal.Signals[asked[1]])
        until(lambda: session._ending.stop_requested, "the signal is heard")


def main() -> None:
    with disttrain.session(
        steps=STEPS, checkpoint_interval=3, keep_latest=2, folder=os.environ.get("LOOP_STORAGE")
    ) as session:
        remembering = Remembering("containers")
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), remembering, nn.Dropout(0.3), nn.Linear(8, 1))
        model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
        unused = torch.optim.Adam([torch.nn.Parameter(torch.zeros(()))])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        walk = Walk()
        batches = session.loader(Noisy(), batch_size=5)
        objects = {"model": model, "optimizer": optimizer, "schedule": schedule, "walk": walk, "unused": unused}
        if os.environ.get("LOOP_EXTRA"):
            objects["extra"] = Walk()
        session.restore(**objects)
        for batch in batches:
            loss = (model(batch["inputs"]) - batch["target"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            walk.history.append(random.random())
            end_if_asked(session)
            session.step(loss=loss, drawn=walk.history[-1])
        state = {
            "model": {name: _whole(value.detach()) for name, value in model.named_parameters()},
            "moments": [_whole(values["exp_avg"]) for values in optimizer.state_dict()["state"].values()],
            "rate": schedule.get_last_lr(),
            "walk": walk.history,
            "calls": remembering.calls,
            "next": torch.rand(3),
        }
        torch.save(state, Path(os.environ["LOOP_OUT"]) / f"rank-{session.rank}.pt")


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


if __name__ == "__main__":
    main()
