"""A status that the API server refuses is written again without what may be the reason, and the job goes on."""

import json
from collections.abc import Callable

import pytest
from aiohttp import web

from disttrain_api.bounds import MAX_MESSAGE_BYTES
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import KubeError
from tests.builders import a_report, ended
from tests.unit.operator.fake_api import FakeApi, Raw, refusal
from tests.unit.operator.test_reconcile import JOBS, Shell, a_shell

REFUSALS = {
    "422": lambda: refusal(422, "Invalid", "status.progress.loss: Invalid value " + "x" * 100_000),
    "413": lambda: refusal(413, "RequestEntityTooLarge", "Request entity too large: limit is 3145728"),
}


@pytest.fixture
async def shell(api: FakeApi, client: Client) -> Shell:
    return await a_shell(api, client, workers=2, policy={"restartBackoffSeconds": 0})


def refuses(answer: Callable[[], web.Response], when: Callable[[Raw], bool]) -> Callable[..., web.Response | None]:
    """Refuses statuses of which `when` is true."""

    def decide(method: str, path: str, body: Raw | None) -> web.Response | None:
        return answer() if method == "PUT" and when((body or {})["status"]) else None

    return decide


async def fail_with_a_report(api: FakeApi, shell: Shell) -> None:
    """The first attempt runs and fails; its pods report progress."""
    await shell.reconcile()
    job = shell.world.job(shell.key.uid)
    assert job is not None
    for path in [path for path in api.objects if "/pods/" in path]:
        raw = api.objects[path]
        done = ended({**raw, "status": {}}, 1, report=a_report(50, checkpoint=40))
        shell.world.pods.observe(await api.put(path, spec=done["spec"], status=done["status"]))


@pytest.mark.parametrize("answer", REFUSALS.values(), ids=REFUSALS.keys())
async def test_a_refused_status_is_written_without_the_reports_and_the_job_goes_on(
    api: FakeApi, shell: Shell, answer: Callable[[], web.Response]
) -> None:
    api.refusals.append(refuses(answer, lambda status: "progress" in status))
    await fail_with_a_report(api, shell)
    await shell.reconcile()
    status = shell.job()["status"]
    assert status["attempt"] == 2
    assert status["attempts"][0]["verdict"]["exitCode"] == 1
    assert "progress" not in status
    message = shell.running()["message"]
    assert "the API server refused a part of the status" in message
    assert len(message.encode()) <= MAX_MESSAGE_BYTES
    deleted = api.asked("DELETE", "/pods/")
    assert len(deleted) == 2  # what the decision asked for is done
    await shell.reconcile()
    # Nothing is written over and over.
    version = shell.job()["metadata"]["resourceVersion"]
    for _ in range(3):
        await shell.reconcile()
    assert shell.job()["metadata"]["resourceVersion"] == version
    assert len(shell.pods()) == 2


async def test_once_nothing_is_refused_any_more_the_status_is_whole_again(api: FakeApi, shell: Shell) -> None:
    api.refusals.append(refuses(REFUSALS["422"], lambda status: "progress" in status))
    await fail_with_a_report(api, shell)
    await shell.reconcile()
    api.refusals.clear()
    await shell.reconcile()
    assert shell.job()["status"]["progress"]["step"] == 50
    assert "refused" not in json.dumps(shell.job()["status"]["conditions"])


async def test_where_even_the_minimal_status_is_refused_nothing_is_done(api: FakeApi, shell: Shell) -> None:
    await fail_with_a_report(api, shell)
    before = shell.job()["status"]
    api.refusals.append(refuses(REFUSALS["422"], lambda status: True))
    with pytest.raises(KubeError):
        await shell.reconcile()
    assert shell.job()["status"] == before
    assert api.asked("DELETE") == []
    assert [path for path in api.asked("PUT") if path.startswith(JOBS)]
