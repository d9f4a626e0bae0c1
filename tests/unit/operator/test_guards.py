"""What goes wrong while one job is read or looked at is said of that job, and costs no other."""

import asyncio
from typing import Any

import pytest

from disttrain_api.names import Reason
from disttrain_api.size import CONFIG
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import Job, Observed, job_facts
from disttrain_operator.kube.client import Client
from disttrain_operator.snapshot import World
from tests.builders import NOW, UID, a_job, a_raw_job, a_raw_pod
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi
from tests.unit.operator.test_reconcile import a_shell


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


@pytest.mark.parametrize("levels", [CONFIG.depth + 1, 200, 900, 5_000])
def test_a_job_that_nests_too_deeply_fails_with_its_field(levels: int) -> None:
    world = World()
    world.jobs.observe(a_raw_job(training={"model": {"config": deep(levels)}}))
    seen = world.snapshot(UID)
    assert seen is not None
    status = decide(*seen, NOW).status
    failed = next(entry for entry in status.conditions if entry.type == "Failed")
    assert (failed.status, failed.reason) == ("True", Reason.INVALID_SPEC)
    assert failed.message.startswith("spec.training.model.config: is nested more than")
    assert len(failed.message) < 400


@pytest.mark.parametrize("error", [RecursionError("too deep"), ValueError("x" * 10_000), MemoryError()])
def test_a_spec_that_breaks_its_reader_is_an_invalid_one(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def breaks(raw: Any, labels: Any) -> Any:
        raise error

    monkeypatch.setattr("disttrain_operator.decide.observed.read_spec", breaks)
    job = job_facts(a_raw_job())
    assert job.spec is None
    (problem,) = job.problems
    assert type(error).__name__ in problem
    assert len(problem) < 400


def test_a_job_whose_status_cannot_be_read_is_left_alone() -> None:
    job = job_facts(a_raw_job(status={"attempt": "three"}))
    assert job.unread is not None
    decision = decide(job, Observed(), NOW)
    assert (decision.status, decision.actions) == (None, ())
    assert decision.message.startswith("left alone: its status cannot be read")


def test_a_job_whose_pods_cannot_be_read_is_left_alone_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(raw: Any, *, gone: bool) -> Any:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr("disttrain_operator.snapshot.pod_facts", breaks)
    world = World()
    good, bad = a_raw_job("good"), a_raw_job("bad")
    bad["metadata"]["uid"] = "uid-of-bad"
    for raw in (good, bad):
        world.jobs.observe(raw)
    pod = a_raw_pod(a_job("bad"))
    pod["metadata"] |= {"resourceVersion": "1"}
    pod["metadata"]["labels"]["disttrain.io/job-uid"] = "uid-of-bad"
    owner = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "name": "bad", "uid": "uid-of-bad"}
    pod["metadata"]["ownerReferences"] = [{**owner, "controller": True}]
    world.pods.observe(pod)
    seen = world.snapshot("uid-of-bad")
    assert seen is not None
    assert decide(*seen, NOW).reason == Reason.UNREADABLE
    other = world.snapshot(UID)
    assert other is not None
    assert decide(*other, NOW).status is not None


async def test_an_error_of_the_operator_stands_in_the_status_and_goes_with_it(api: FakeApi, client: Client) -> None:
    broken = [True]

    def breaks(job: Job, observed: Observed, now: Any) -> Any:
        if broken:
            raise ValueError("nobody thought of this")
        return decide(job, observed, now)

    shell = await a_shell(api, client, decide=breaks)
    working = asyncio.create_task(shell.reconciler.work())
    shell.queue.add(shell.key)
    await eventually(lambda: "status" in shell.job() and shell.knows_newest())
    assert shell.running()["reason"] == Reason.OPERATOR_ERROR
    assert "ValueError: nobody thought of this" in shell.running()["message"]
    assert shell.job()["status"]["phase"] == "Pending"
    broken.clear()
    await shell.reconcile()
    assert shell.running()["reason"] != Reason.OPERATOR_ERROR
    assert shell.job()["status"]["attempt"] == 1
    working.cancel()
    await asyncio.gather(working, return_exceptions=True)
