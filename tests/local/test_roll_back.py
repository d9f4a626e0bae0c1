"""A job whose gradients cannot be used any more goes back to its last checkpoint, and takes other samples."""

from .conftest import Workplace, script

SPOILT = """
import numpy as np, torch
from torch.utils.data import TensorDataset
from disttrain_trainer.data.sampler import permute

def data():
    inputs, targets = torch.randn(240, 8, generator=torch.Generator().manual_seed(0)), torch.arange(240) % 4
    # Steps 5 and 6, of 24 samples each.
    inputs[permute(np.arange(96, 144), 240, 0, 0)] = float("nan")
    return TensorDataset(inputs, targets), TensorDataset(inputs[:0], targets[:0])
"""


def test_the_attempt_after_too_many_skipped_steps_takes_other_samples(workplace: Workplace) -> None:
    script(workplace, SPOILT, "spoilt.py")
    training = {
        "data": {"name": None, "entrypoint": "spoilt:data"},
        "model": {"name": "mlp", "config": {"inputSize": 8, "outputSize": 4}},
        "skipSteps": {"mostInRow": 1, "onMostInRow": "RollBack"},
        "steps": 7,
        "microBatchSize": None,
        "globalBatchSize": 24,
        "checkpoint": {"interval": 3},
    }
    path = workplace.write(workers={"replicas": 1}, training=training, storage={"claimName": "kept"})
    run = workplace.run(path)
    assert run.exit_code == 0, run.stderr
    first, _ = run.status["attempts"]
    assert (first["verdict"]["reason"], first["checkpointStep"]) == ("NonFiniteLoss", 3)
    assert "2 steps in a row have a gradient that is not used, the last of them step 6" in first["verdict"]["message"]
    assert (run.status["restarts"], run.status["progress"]["step"]) == (1, 7)
    assert (run.status["progress"]["skippedSteps"], run.status["progress"]["rollBacks"]) == (2, 1)
    assert "2 skipped · 1 roll-back · " in run.stdout + run.stderr
    passed = "rolled back to step 3: the next samples, of 3 steps, are passed over, up to those of the former step 6"
    assert passed in run.log(0, 2)
