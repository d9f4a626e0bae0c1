"""An operator that is behind another one: its pods are older than the job that it reads after a write was refused."""

from collections.abc import Callable

import pytest

from disttrain_operator.execute import Executor
from disttrain_operator.kept_pod import keep_pod, keep_service
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import KubeError
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.snapshot import Key, World
from tests.builders import ended, running
from tests.unit.operator.fake_api import FakeApi, Raw, refusal
from tests.unit.operator.test_reconcile import CHILDREN, JOBS, SITE, Shell, a_shell


def sees_all(shell: Shell) -> None:
    """Its watches have told it everything."""
    objects, version = shell.api.objects, shell.api.version
    shell.world.jobs.observe(shell.job())
    shell.world.pods.replace([keep_pod(raw) for path, raw in objects.items() if "/pods/" in path], version)
    shell.world.services.replace([keep_service(raw) for path, raw in objects.items() if "/services/" in path], version)


async def acts(shell: Shell, times: int = 4) -> None:
    for _ in range(times):
        sees_all(shell)
        await shell.reconcile()


async def pod_is(shell: Shell, name: str, change: Callable[[Raw], Raw]) -> None:
    """The kubelet says this of a pod."""
    pod = change({"status": {}, **shell.api.objects[f"{CHILDREN}/pods/{name}"]})
    await shell.api.put(f"{CHILDREN}/pods/{name}", status=pod["status"], spec={**pod["spec"], "nodeName": "node"})


async def all_pods_run(shell: Shell) -> None:
    for name in shell.pods():
        await pod_is(shell, name, running)


def another(shell: Shell, client: Client) -> Shell:
    """Another operator for the same job."""
    world, queue = World(), WorkQueue[Key]()
    reconciler = Reconciler(client, world, Executor(client, world, lambda job: SITE), queue)
    return Shell(shell.api, world, queue, reconciler, shell.key)


async def test_pods_that_another_operator_has_made_are_not_lost(api: FakeApi, client: Client) -> None:
    late = await a_shell(api, client, policy={"restartBackoffSeconds": 0})
    await acts(late)
    await all_pods_run(late)
    await acts(late)
    first = late.pods()[0]
    await pod_is(late, first, lambda pod: ended(pod, 137))
    sees_all(late)
    leader = another(late, client)
    await acts(leader)
    await all_pods_run(leader)
    await acts(leader)
    before, pods = leader.job()["status"], leader.pods()
    assert (before["attempt"], before["ready"]) == (2, "3/3")
    api.requests.clear()
    for _ in range(3):
        await late.reconcile()
    assert late.writes()[:3] == ["PUT /digits/status", "GET /digits", "GET /pods"]
    assert (late.job()["status"]["attempt"], late.pods()) == (2, pods)
    assert api.asked("PUT") == [f"{JOBS}/digits/status"], "it has nothing to say of the job"


async def test_nothing_is_decided_before_the_pods_of_another_operator_are_seen(api: FakeApi, client: Client) -> None:
    late = await a_shell(api, client)
    leader = another(late, client)
    await acts(leader)
    await late.reconcile()
    api.refusals.append(lambda method, path, body: refusal(500, "InternalError") if path.endswith("/pods") else None)
    for _ in range(2):
        with pytest.raises(KubeError):
            await late.reconcile()
    assert late.known_pods() == []
    api.refusals.clear()
    await late.reconcile()
    assert {pod["metadata"]["name"] for pod in late.known_pods()} == set(late.pods())


async def test_pods_are_not_listed_for_an_edit_of_the_job(api: FakeApi, client: Client) -> None:
    shell = await a_shell(api, client)
    await api.put(f"{JOBS}/digits", labels={"changed": "meanwhile"})
    for _ in range(3):
        await shell.reconcile()
    assert shell.writes()[:2] == ["PUT /digits/status", "GET /digits"]
    assert "GET /pods" not in shell.writes()
