"""The loader of a session in a rank with a GPU."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from disttrain_session.loader import Loader
from disttrain_trainer.runtime.mesh import World


def test_processes_that_load_leave_the_gpu_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that a process has met before it was forked refuses the fork."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("get_rng_state", "set_rng_state"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    world = cast(World, SimpleNamespace(rank=0, size=1, device=SimpleNamespace(torch=torch.device("cpu"))))
    samples = [torch.ones(2) for _ in range(8)]
    loader = Loader(samples, 4, world, lambda: False, seed=0, shuffle=True, num_workers=1, collate_fn=None)
    assert next(loader).shape == (4, 2)
