"""What others read of a gang beside its pods: PodGroups and disruption budgets, and clusters that know none."""

from aiohttp import web

from disttrain_operator.kube.client import Client
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.test_reconcile import CHILDREN, Shell, refuse
from tests.unit.operator.test_reconcile import a_shell as a_shell_of

GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
VOLCANO = {"schedulingPolicy": {"gang": "Volcano"}}


async def lose_pods(shell: Shell) -> None:
    """All of them are gone, and the operator has seen it."""
    for pod in shell.pods():
        await shell.api.remove(f"{CHILDREN}/pods/{pod}")
    for raw in list(shell.world.pods.group(shell.key.uid)):
        shell.world.pods.observe_deleted(raw)


async def test_a_pod_group_is_there_before_the_first_pod(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy=VOLCANO)
    await shell.reconcile()
    posts = api.asked("POST")
    assert posts.index(GROUPS) < posts.index(f"{CHILDREN}/pods")
    (group,) = [raw for path, raw in api.objects.items() if path.startswith(GROUPS)]
    assert group["spec"]["minMember"] == 3
    assert group["metadata"]["ownerReferences"][0]["uid"] == shell.key.uid


async def test_a_scheduler_that_is_not_installed_is_a_reason_and_no_pod_is_made(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy=VOLCANO)
    api.refusals.append(refuse("/podgroups", lambda: web.Response(status=404, text="404 page not found")))
    await shell.reconcile()
    await shell.reconcile()
    assert shell.pods() == []
    running = shell.running()
    assert running["reason"] == "NotInstalled"
    assert "Volcano is not installed; install it, or choose another `gang`" in running["message"]
    api.refusals.clear()
    await shell.reconcile()
    assert len(shell.pods()) == 3


async def test_a_right_that_the_operator_lacks_is_a_reason_with_the_value_that_gives_it(
    api: FakeApi, client: Client
) -> None:
    words = 'podgroups.scheduling.volcano.sh is forbidden: User "x" cannot create resource "podgroups" in API group'
    shell = await a_shell_of(api, client, policy=VOLCANO)
    api.refusals.append(refuse("/podgroups", lambda: refusal(403, "Forbidden", words)))
    await shell.reconcile()
    await shell.reconcile()
    running = shell.running()
    assert running["reason"] == "OperatorForbidden"
    assert "`scheduling.volcano: true` in the chart's values gives the right" in running["message"]


async def test_a_pod_group_that_is_there_already_is_as_good_as_made(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy=VOLCANO)
    await shell.reconcile()
    shell.reconciler._executor.forget(shell.key.uid)  # as in a process that has just started
    await lose_pods(shell)
    await shell.reconcile()
    assert shell.world.problems == {}
    assert len(shell.pods()) == 3


async def test_a_disruption_budget_is_made_with_the_job_and_again_with_a_later_attempt(
    api: FakeApi, client: Client
) -> None:
    shell = await a_shell_of(api, client, policy={"disruptionBudget": {"minAvailable": 2}})
    await shell.reconcile()
    (path,) = [path for path in api.objects if path.startswith(BUDGETS)]
    assert api.objects[path]["spec"]["minAvailable"] == 2
    await api.remove(path)
    await lose_pods(shell)
    job = shell.job()
    job["status"]["attempt"], job["status"]["attempts"][0]["number"] = 2, 2
    shell.world.jobs.observe(await api.put("/apis/disttrain.io/v1alpha1/namespaces/default/disttrainingjobs/digits"))
    await shell.reconcile()
    assert path in api.objects


async def test_a_job_of_another_controller_costs_no_request(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy={"managedBy": "kueue.x-k8s.io/multikueue"})
    await shell.reconcile()
    assert api.requests == []
    assert "status" not in shell.job()
