"""Parameters on servers: what workers and servers compute together is what one process computes."""

import pytest

from tests.unit.trainer.server_cases import run_server_cases
from tests.unit.trainer.worlds import require_same, run_cases, small, user

TOLERANCE = 1e-10
EVERY_STEP = {"logging": {"interval": 1, "tensorBoard": False}}
ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
SGD = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9, "nesterov": True, "weightDecay": 0.01}
COSINE = {"name": "Cosine", "warmupSteps": 2}
TRAINED = {
    "SGD": small(optimizer=SGD, lrSchedule=COSINE, evaluation={"interval": 2}, **EVERY_STEP),
    "AdamW": small(optimizer=ADAMW, microBatchSize=4, **EVERY_STEP),
    "tokens": small(model=user("double_tagger"), data=user("ragged_tokens"), **EVERY_STEP),
    "a parameter that is not used": small(model=user("partly_used"), **EVERY_STEP),
}
ASYNC = {"synchronization": "Async"}
BOUNDED = {"synchronization": "BoundedStaleness", "staleness": 2}
THREE = {"servers": 3}
STOPPED = ("AdamW", "a parameter that is not used")


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    cases = {name: [{"training": training}] for name, training in TRAINED.items()}
    return run_cases(tmp_path_factory.mktemp("one"), 1, cases)


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    cases = {
        "async": [{"training": TRAINED["SGD"], "settings": ASYNC}],
        "async on three servers": [{"training": TRAINED["AdamW"], "settings": ASYNC, **THREE}],
        "bounded on three servers": [{"training": TRAINED["SGD"], "settings": BOUNDED, **THREE}],
    }
    return run_server_cases(tmp_path_factory.mktemp("worker"), 1, cases)


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory):
    cases = {
        **{
            name: [{"training": training, "servers": 1 + index % 3}]
            for index, (name, training) in enumerate(TRAINED.items())
        },
        **{
            f"{name}, stopped": [{"training": TRAINED[name], "stop_after": 1}, {"training": TRAINED[name], **THREE}]
            for name in STOPPED
        },
    }
    return run_server_cases(tmp_path_factory.mktemp("workers"), 2, cases)


@pytest.mark.parametrize("name", TRAINED)
class TestSyncIsOneProcess:
    def test_parameters(self, one_process, two_workers, name):
        assert two_workers[name]["errors"] == [[None], [None]]
        require_same(two_workers[name]["parameters"], one_process[name]["parameters"])

    @pytest.mark.parametrize("key", ["loss_metrics/global_avg_loss", "grad_norm", "lr", "validation_metrics/accuracy"])
    def test_metrics(self, one_process, two_workers, name, key):
        expected = [line[key] for line in one_process[name]["metrics"] if key in line]
        assert [line[key] for line in two_workers[name]["metrics"] if key in line] == pytest.approx(
            expected, rel=TOLERANCE
        )
        assert expected or key.startswith("validation")


@pytest.mark.parametrize(
    ("case", "training"), [("async", "SGD"), ("async on three servers", "AdamW"), ("bounded on three servers", "SGD")]
)
def test_one_worker_is_one_process(one_process, one_worker, case, training):
    assert one_worker[case]["errors"] == [[None]]
    require_same(one_worker[case]["parameters"], one_process[training]["parameters"])


@pytest.mark.parametrize("name", STOPPED)
def test_a_stopped_job_goes_on_with_another_number_of_servers(one_process, two_workers, name):
    stopped = two_workers[f"{name}, stopped"]
    assert "Stopped" in stopped["errors"][0][0]
    require_same(stopped["parameters"], one_process[name]["parameters"])
