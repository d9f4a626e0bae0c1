"""A rank that is slow all the time is named while the job runs, and nobody is where all ranks are alike."""

import sys
from typing import Any

import yaml

from .conftest import Run, Workplace, own, script

DATA = """
import os, time
import torch
from pathlib import Path
from torch.utils.data import Dataset
from disttrain_trainer.metrics import stragglers

# Three windows of a minute each are long for a test.
stragglers.WINDOW_SECONDS = 0.5

class Slow(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds[int(os.environ["RANK"])]

    def __len__(self):
        return 96

    def __getitem__(self, index):
        if not Path("enough").exists():
            time.sleep(self.seconds)
        return torch.full((8,), index / 96), torch.tensor(index % 4)

def data(seconds):
    return Slow(seconds), None
"""


def start(workplace: Workplace, steps: int, seconds: list[float]) -> Run:
    """A job of two ranks whose samples take so long."""
    script(workplace, DATA, "slow_data.py")
    training = {
        "data": {"name": None, "entrypoint": "slow_data:data", "config": {"seconds": seconds}},
        "model": {"name": "mlp", "config": {"inputSize": 8, "outputSize": 4}},
        "steps": steps,
        "microBatchSize": 4,
        "logging": {"interval": 5},
    }
    return workplace.start(workplace.write(training=training))


SESSION = """
import sys, time
import torch
from pathlib import Path
import disttrain
from disttrain_session import own_time
from disttrain_trainer.metrics import stragglers

stragglers.WINDOW_SECONDS, own_time.APART_SECONDS = 0.5, 0.05
seconds = [float(word) for word in sys.argv[2:]]

class Working(torch.nn.Linear):
    def forward(self, x):
        if not Path("enough").exists():
            time.sleep(seconds[session.rank])
        return super().forward(x)

with disttrain.session(steps=int(sys.argv[1]), checkpoint_interval=10**6) as session:
    model = Working(8, 4)
    model, optimizer = session.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batches = session.loader([torch.ones(8)] * 64, batch_size=4)
    session.restore(model=model, optimizer=optimizer)
    for inputs in batches:
        loss = model(inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        session.step(loss=loss)
"""


def start_session(workplace: Workplace, steps: int, seconds: list[float]) -> Run:
    """A loop of one's own on two ranks whose forward passes take so long."""
    program = script(workplace, SESSION)
    words = [sys.executable, program, str(steps), *map(str, seconds)]
    return workplace.start(own(workplace, *words, replicas=2))


def straggler(run: Run) -> str | None:
    """What the status of a job that runs says of a slow rank."""
    found: list[dict[str, Any]] = []
    for path in (run.folder / "disttrain-runs").glob("*/status.yaml"):
        found = yaml.safe_load(path.read_text()).get("status", {}).get("conditions", [])
    return next((one["message"] for one in found if (one["type"], one["status"]) == ("Straggling", "True")), None)


def test_a_rank_with_slow_samples_is_named_with_its_pod_and_the_job_goes_on(workplace: Workplace) -> None:
    run = start(workplace, 600, [0.0, 0.05])
    sentence = run.until(lambda: straggler(run), "a slow rank is named")
    assert sentence.startswith("rank 1 (pod digits-")
    assert "-worker-1-a1) is slow: its own work takes " in sentence
    (workplace.folder / "enough").touch()
    assert run.wait() == 0
    assert "rank 1 is slow: its own work takes " in run.log(0, 1)
    assert (run.condition("Straggling")["status"], run.status["attempt"]) == ("False", 1)


def test_ranks_that_are_alike_are_not_named(workplace: Workplace) -> None:
    run = start(workplace, 40, [0.05, 0.05])
    assert run.wait() == 0
    assert "is slow" not in run.log(0, 1)
    assert "step: 40" in run.log(0, 1)


def test_a_slow_rank_of_a_session_is_named_with_its_pod(workplace: Workplace) -> None:
    run = start_session(workplace, 400, [0.0, 0.3])
    sentence = run.until(lambda: straggler(run), "a slow rank is named")
    assert sentence.startswith("rank 1 (pod own-")
    (workplace.folder / "enough").touch()
    assert run.wait() == 0
    assert "rank 1 is slow: its own work takes " in run.log(0, 1)


def test_ranks_of_a_session_that_are_alike_are_not_named(workplace: Workplace) -> None:
    run = start_session(workplace, 60, [0.05, 0.05])
    assert run.wait() == 0
    assert "is slow" not in run.log(0, 1)
