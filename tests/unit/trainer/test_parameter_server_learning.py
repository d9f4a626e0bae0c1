"""With parameters on servers a job learns as much from as many samples: the digits, and Python byte by byte.

One case in every run, all of them in the long one. Replicas that meet less often are tested in
test_local_sgd_learning.py.
"""

import pytest

from tests.soak import SOAK
from tests.unit.trainer.server_jobs import a_job, ended
from tests.unit.trainer.worlds import of_example, run_cases

MODES = {
    "Sync": {"synchronization": "Sync"},
    "Async": {"synchronization": "Async"},
    "BoundedStaleness": {"synchronization": "BoundedStaleness", "staleness": 4},
}
DIGITS = list(MODES) if SOAK else ["Async"]
# Of DDP's held-out loss, above which it may lie; knowing nothing costs twice as much.
WITHIN = 0.03
SECONDS = 900.0


def text():
    """As in test_local_sgd_learning.py, at half the rate on servers, which make two updates of a global batch."""
    model = {"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 32}}
    data = {"name": "text", "config": {"sequenceLength": 32, "heldOutFraction": 0.005}}
    return of_example("gpt-text", model=model, data=data)


def learned(folder, training, name):
    """The last evaluation of two workers and two servers."""
    with a_job(folder, training, servers=2, parameterServer=MODES[name]) as running:
        ends = [ended(world, rank, SECONDS) for rank, world in enumerate(running.workers)]
        assert [code for code, _ in ends] == [0, 0], ends
        print(f"{name}: {ends[0][1].metrics}")
        return ends[0][1].metrics


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", DIGITS)
def test_held_out_digits_are_recognised(tmp_path, name):
    training = of_example("ddp", model={"name": "mlp"}, steps=400)
    assert learned(tmp_path, training, name)["accuracy"] >= 0.97


@pytest.fixture(scope="module")
def loss_of_ddp(tmp_path_factory):
    result = run_cases(tmp_path_factory.mktemp("ddp"), 2, {"case": [{"training": text()}]})["case"]
    assert result["errors"] == [None]
    print(f"DDP: {result['report'].metrics}")
    return result["report"].metrics["loss"]


@pytest.mark.skipif(not SOAK, reason="one of the long variants")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("name", ["Async", "BoundedStaleness"])  # Sync is AllReduce to rounding, and clips nothing.
def test_text_is_learned_nearly_as_well_as_by_ddp(tmp_path, loss_of_ddp, name):
    training = text()
    training["optimizer"]["learningRate"] /= 2
    assert learned(tmp_path, training, name)["loss"] <= (1 + WITHIN) * loss_of_ddp
