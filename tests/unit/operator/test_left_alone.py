"""A job that cannot be read is left as it is, and what cannot be read beside a job costs that job alone."""

import pytest

from disttrain_operator.kube.client import Client
from disttrain_operator.plan.identity import child_name
from tests.unit.operator.fake_api import DEEP, FakeApi
from tests.unit.operator.test_reconcile import CHILDREN, JOBS, Shell, a_shell


@pytest.fixture
async def shell(api: FakeApi, client: Client) -> Shell:
    return await a_shell(api, client)


async def test_a_job_that_can_no_longer_be_read_is_left_as_it_is(shell: Shell) -> None:
    """Its pods stay, its status stays, nothing is asked again and again; it goes on when it can be read again."""
    await shell.reconcile()
    before = shell.pods(), shell.job()["status"]
    spec = shell.job()["spec"]
    await shell.api.put(f"{JOBS}/digits", annotations=DEEP)
    failed = shell.api.objects[next(path for path in shell.api.objects if "/pods/" in path)]
    shell.world.pods.observe(failed | {"metadata": failed["metadata"] | {"resourceVersion": "100000"}, "status": LOST})
    shell.api.requests.clear()
    for _ in range(3):
        await shell.reconcile()
    assert shell.writes() == ["PUT /digits/status", "GET /digits"], "the second attempt is not begun"
    assert (shell.pods(), shell.job()["status"]) == before
    assert shell.world.jobs.is_unreadable(shell.key.uid)
    assert shell.world.job(shell.key.uid) is None, "neither does the gate act on it"
    assert len(shell.queue) == 0
    raw = await shell.api.put(f"{JOBS}/digits", annotations={}, spec=spec)
    shell.world.jobs.observe(raw)
    await shell.reconcile()
    assert shell.job()["status"] != before[1]


LOST = {
    "phase": "Failed",
    "containerStatuses": [{"name": "trainer", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}],
}


async def test_an_object_under_a_name_of_the_job_that_cannot_be_read_is_a_conflict(shell: Shell) -> None:
    path = f"{CHILDREN}/services/{child_name('digits', shell.key.uid)}"
    await shell.api.put(path, spec=DEEP)
    await shell.reconcile()
    await shell.reconcile()
    assert shell.running()["reason"] == "NameConflict"
    assert "cannot be read" in shell.running()["message"]
