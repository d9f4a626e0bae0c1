"""A job looked at while it runs, by kubectl and by the command; tasks of one's own from the examples."""

import pytest

from disttrain import Client, train
from disttrain_api.names import CHECKPOINT_REQUEST
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import ONE_THREAD, example, long_job, program
from tests.e2e.observe import disttrain, end_soon, first_step, pod, stop_ranks, train_until_a_checkpoint, verdict
from tests.waiting import GENEROUS


def test_a_job_is_seen_while_it_runs(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    kubectl.apply(long_job("live"))
    # The first answer of the agent may come before a step is logged.
    kubectl.wait_for("{.status.progress.loss}", "live")
    status = kubectl.status("live")
    assert status["phase"] == "Running", "its pods have not ended: the agent was asked"
    assert status["progress"]["phase"] in {"Training", "Saving"}
    assert status["progress"]["totalSteps"] == 1_000_000
    assert status["progress"]["loss"] > 0
    assert status["progress"]["remainingSeconds"] > 0
    heading, line = (row.split() for row in kubectl("get", "dtj", "live", "-o", "wide").splitlines())
    shown = dict(zip(heading, line, strict=True))
    assert int(shown["STEP"]) >= 20
    assert float(shown["LOSS"]) > 0
    # The figures of a checkpoint come as well, without any pod's end.
    kubectl.wait_for("{.status.checkpoint.step}", "live")

    assert "live" in disttrain(kubectl, "list")
    assert "dp2" in disttrain(kubectl, "describe", "live")
    assert "live" in disttrain(kubectl, "why", "live")
    assert "1000000" in disttrain(kubectl, "top", "--once").replace(",", "").replace(" ", "")
    last = disttrain(kubectl, "logs", "live", "--rank", "0", "--tail", "1")
    assert "loss" in last
    lines = disttrain(kubectl, "stacks", "live").splitlines()
    assert [line.partition("]")[0] for line in lines[:2]] == ["[rank 0", "[rank 1"]
    assert "Current thread" in disttrain(kubectl, "stacks", "live", "--rank", "1")
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    rows = Client(namespace=kubectl.namespace).metrics("live")
    assert rows
    assert all(row["step"] and row["loss_metrics/global_avg_loss"] for row in rows)
    disttrain(kubectl, "restart", "live")
    kubectl.wait_for("{.status.attempt}=2", "live")
    end_soon(kubectl, "live")


REPORTS = """
import itertools, os, time
import disttrain

for step in itertools.count(1):
    disttrain.report(step=step, total=10**9, loss=1 / step)
    time.sleep(0.1)
"""


def test_a_program_that_reports_is_seen_while_it_runs_without_anything_before_its_command(kubectl: Kubectl) -> None:
    kubectl.apply(program("reports", f"exec python3 -c '{REPORTS}'", TRAINER_IMAGE))
    kubectl.wait_for("{.status.progress.loss}", "reports")
    assert kubectl.status("reports")["phase"] == "Running"
    assert kubectl.status("reports")["progress"]["totalSteps"] == 10**9
    lines = disttrain(kubectl, "stacks", "reports").splitlines()
    assert [line.partition("]")[0] for line in lines[:2]] == ["[rank 0", "[rank 1"]
    end_soon(kubectl, "reports")


@train(workers=2, env={"OMP_NUM_THREADS": "1"})
def summed(rate: float) -> None:
    """Print the sum of what the ranks have."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    value = torch.tensor(rate * (dist.get_rank() + 1))
    dist.all_reduce(value)
    print(f"rank {dist.get_rank()} has $(HOME) {value.item()}", flush=True)
    dist.destroy_process_group()


def test_a_function_runs_on_the_ranks_of_a_cluster(kubectl: Kubectl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(kubectl.kubeconfig))
    client = Client(namespace=kubectl.namespace)
    job = client.submit(summed.job(rate=0.5))
    assert client.wait(job.name, timeout=GENEROUS).phase == "Succeeded"
    assert sorted(client.logs(job.name)) == [f"[rank {rank}] rank {rank} has $(HOME) 1.5" for rank in range(2)]


def test_a_running_job_writes_a_checkpoint_when_it_is_asked(kubectl: Kubectl) -> None:
    kubectl.apply(long_job("asked", training={"checkpoint": {"interval": 1_000_000}}))
    kubectl.wait_for("{.status.progress.loss}", "asked")
    output = disttrain(kubectl, "checkpoint", "asked")
    step = kubectl.status("asked")["checkpoint"]["step"]
    assert f"the checkpoint of step {step} is complete" in output
    # As kubectl alone does it.
    kubectl("annotate", "dtj", "asked", "--overwrite", f"{CHECKPOINT_REQUEST}=again")
    kubectl.until(lambda: kubectl.status("asked")["checkpoint"]["step"] > step, "there is another checkpoint")
    assert (kubectl.status("asked")["attempt"], kubectl.status("asked")["phase"]) == (1, "Running")
    end_soon(kubectl, "asked")


def test_the_attempt_after_a_restart_takes_a_request_along(kubectl: Kubectl) -> None:
    """Suspended, the job has no rank that could take it; the ranks of its next attempt do."""
    kubectl.apply(long_job("late", training={"checkpoint": {"interval": 1_000_000}}))
    kubectl.wait_for("{.status.progress.loss}", "late")
    disttrain(kubectl, "suspend", "late")
    kubectl.wait("Suspended", "late")
    kept = kubectl.status("late")["checkpoint"]["step"]
    kubectl("annotate", "dtj", "late", f"{CHECKPOINT_REQUEST}=while suspended")
    disttrain(kubectl, "resume", "late")
    kubectl.until(
        lambda: kubectl.status("late")["checkpoint"]["step"] > kept, "there is another checkpoint", job="late"
    )
    status = kubectl.status("late")
    taken = status["checkpointRequest"]
    assert (taken["value"], taken["attempt"]) == ("while suspended", status["attempt"])
    end_soon(kubectl, "late")


def test_too_many_skipped_steps_roll_a_job_back_to_its_checkpoint(kubectl: Kubectl) -> None:
    """Steps 5 and 6, of 24 samples each, have samples that are not a number; the next attempt passes over them."""
    training = {
        "data": {"entrypoint": "slow_data:spoilt", "config": {"seconds": None, "first": 96, "end": 144}},
        "skipSteps": {"mostInRow": 1, "onMostInRow": "RollBack"},
        "seed": 0,
        "steps": 7,
        "microBatchSize": None,
        "globalBatchSize": 24,
        "checkpoint": {"interval": 3},
        "logging": {"interval": 1},
    }
    kubectl.apply(long_job("spoilt", training=training))
    kubectl.wait("Finished", "spoilt")
    status = kubectl.status("spoilt")
    assert kubectl.condition("spoilt", "Complete")["status"] == "True", kubectl.describe_job("spoilt")
    first, _ = status["attempts"]
    assert (first["verdict"]["reason"], first["checkpointStep"]) == ("NonFiniteLoss", 3)
    assert (status["restarts"], status["progress"]["step"]) == (1, 7)


@pytest.mark.parametrize("name", ["masked", "contrastive", "distillation"])
def test_a_task_of_ones_own_trains(kubectl: Kubectl, name: str) -> None:
    """The example's code is in the trainer's image; its workers run on two nodes."""
    kubectl.apply(example(f"tasks/{name}", workers={"template": ONE_THREAD}))
    kubectl.wait("Finished", name)
    assert kubectl.condition(name, "Complete")["status"] == "True", kubectl.describe_job(name)
    progress = kubectl.status(name)["progress"]
    assert progress["step"] == progress["totalSteps"]
    assert {figure["name"] for figure in progress["metrics"]} >= {"loss"}


def test_a_gang_that_hangs_is_restarted_from_its_checkpoint(kubectl: Kubectl) -> None:
    """A rank that is stopped holds its peer up; nobody ends, and no program raises anything. It is named at once."""
    kubectl.apply(long_job("hang", runPolicy={"progressDeadlineSeconds": 60, "maxRestarts": 1}))
    kept = train_until_a_checkpoint(kubectl, "hang")
    stopped = pod(kubectl, "hang", "worker", "1")["metadata"]["name"]
    stop_ranks(kubectl, stopped)
    kubectl.wait("HangSuspected", "hang")
    found = verdict(kubectl, "hang")
    assert (found["class"], found["reason"]) == ("Hang", "ProgressDeadlineExceeded"), found
    assert (found["rank"], found["pod"]) == (1, stopped)
    assert "without a step" in found["message"]
    assert "is stopped by a signal, and rank 0 waits in " in found["message"]
    kubectl.wait_for("{.status.attempt}=2", "hang")
    kubectl.wait("Running", "hang")
    kubectl.wait("HangSuspected=false", "hang")
    assert first_step(kubectl, "hang", attempt=2) > kept
    end_soon(kubectl, "hang")
