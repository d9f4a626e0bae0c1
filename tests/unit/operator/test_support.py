"""What others read of a gang beside its pods: PodGroups and disruption budgets, and clusters that know none."""

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from aiohttp import web

from disttrain_api.names import Label
from disttrain_api.ownership import owner_reference
from disttrain_operator.kube.client import Client
from tests.builders import NOW, a_claim_template
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.test_reconcile import CHILDREN, JOBS, SITE, Shell, refuse
from tests.unit.operator.test_reconcile import a_shell as a_shell_of

GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"
BUDGETS = "/apis/policy/v1/namespaces/default/poddisruptionbudgets"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
VOLCANO = {"schedulingPolicy": {"gangScheduler": "Volcano"}}


JOB = object()
"""Stands for the job's uid in what a test is given."""
CLUSTER = {"apiVersion": "example.com/v1", "kind": "Cluster", "name": "big", "uid": "of-the-cluster"}
CLAIMS: dict[str, tuple[bool, dict[str, Any], bool]] = {
    # retained, as the job asks for it; what the claim says; whether it is the job's
    "retained, with the label": (True, {"label": JOB}, True),
    "retained, with the label of another job": (True, {"label": "another"}, False),
    "retained, without a label": (True, {}, False),
    "retained, with the label, controlled": (True, {"label": JOB, "owner": CLUSTER | {"controller": True}}, False),
    "retained, with the label, owned": (True, {"label": JOB, "owner": CLUSTER}, True),
    "not retained, with the label": (False, {"label": JOB}, False),
    "not retained, controlled by the job": (False, {"label": JOB, "owner": JOB}, True),
}


@pytest.mark.parametrize("case", CLAIMS)
async def test_a_claim_under_the_jobs_name_is_the_jobs_or_a_conflict(api: FakeApi, client: Client, case: str) -> None:
    retain, marks, is_own = CLAIMS[case]
    shell = await a_shell_of(api, client, storage=a_claim_template(retain=retain))
    uid = shell.key.uid
    labels = {Label.JOB_UID: uid if marks["label"] is JOB else marks["label"]} if "label" in marks else None
    name = f"digits-{uid[:5]}-checkpoints"
    claim = await api.put(f"{CHILDREN}/persistentvolumeclaims/{name}", labels=labels)
    if "owner" in marks:
        claim["metadata"]["ownerReferences"] = [
            owner_reference("digits", uid) if marks["owner"] is JOB else marks["owner"]
        ]
    await shell.reconcile()
    await shell.reconcile()
    assert shell.running()["reason"] == ("WaitingForPods" if is_own else "NameConflict")
    assert (len(shell.pods()) == 3) == is_own, "of a gang whose claim is not there one pod is held back"


async def lose_pods(shell: Shell) -> None:
    """All of them are gone, and the operator has seen it."""
    for pod in shell.pods():
        await shell.api.remove(f"{CHILDREN}/pods/{pod}")
    for raw in list(shell.known_pods()):
        shell.world.pods.observe_deleted(raw)


async def begin_another_attempt(shell: Shell) -> None:
    """All pods are gone, and the status says that another attempt has begun."""
    await lose_pods(shell)
    job = shell.job()
    job["status"]["attempt"], job["status"]["attempts"][0]["number"] = 2, 2
    shell.world.jobs.observe(await shell.api.put(f"{JOBS}/digits"))
    await shell.reconcile()


async def test_a_pod_group_is_there_before_the_first_pod(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy=VOLCANO)
    await shell.reconcile()
    posts = api.asked("POST")
    assert posts.index(GROUPS) < posts.index(f"{CHILDREN}/pods")
    (group,) = [raw for path, raw in api.objects.items() if path.startswith(GROUPS)]
    assert group["spec"]["minMember"] == 3
    assert group["metadata"]["ownerReferences"][0]["uid"] == shell.key.uid


async def test_no_pod_is_there_before_the_network_policy_of_its_job(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, site=replace(SITE, network_policies=True))
    message = 'networkpolicies is forbidden: User "x" cannot create resource "networkpolicies" in API group'
    api.refusals.append(refuse("/networkpolicies", lambda: refusal(403, "Forbidden", message)))
    await shell.reconcile()
    await shell.reconcile()
    assert shell.pods() == []
    assert shell.running()["reason"] == "OperatorForbidden"
    assert "`networkPolicy.perJob: true` in the chart's values gives the right" in shell.running()["message"]
    api.refusals.clear()
    await shell.reconcile()
    assert len(shell.pods()) == 3
    (policy,) = [raw for path, raw in api.objects.items() if path.startswith(POLICIES)]
    assert policy["metadata"]["ownerReferences"] == [owner_reference("digits", shell.key.uid)]


async def test_a_network_policy_costs_one_request_and_is_made_by_each_attempt(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, site=replace(SITE, network_policies=True))
    await shell.reconcile()
    assert len(api.asked("POST", "/networkpolicies")) == 1
    posts = api.asked("POST")
    assert posts.index(POLICIES) < posts.index(f"{CHILDREN}/pods")
    (path,) = [path for path in api.objects if path.startswith(POLICIES)]
    await api.remove(path)
    await begin_another_attempt(shell)
    assert path in api.objects


async def test_environment_defaults_are_a_secret_where_a_template_may_set_others(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client)
    spec = shell.job()["spec"]
    workers = spec["workers"] | {"envFrom": [{"secretRef": {"name": "mine"}}]}
    shell.world.jobs.observe(await api.put(f"{JOBS}/digits", spec=spec | {"workers": workers}))
    await shell.reconcile()
    posts = api.asked("POST")
    assert posts.count(f"{CHILDREN}/secrets") == 2
    last = max(index for index, path in enumerate(posts) if path == f"{CHILDREN}/pods")
    assert last > max(index for index, path in enumerate(posts) if path == f"{CHILDREN}/secrets")
    names = {path.rpartition("/")[2] for path in api.objects if "/secrets/" in path}
    pods = [raw for path, raw in api.objects.items() if "/pods/" in path]
    assert {pod["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"] for pod in pods} < names


async def test_without_the_switch_no_network_policy_is_asked_for(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client)
    await shell.reconcile()
    assert api.asked("POST", "/networkpolicies") == []


async def test_a_scheduler_that_is_not_installed_is_a_reason_and_no_pod_is_made(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy=VOLCANO)
    api.refusals.append(refuse("/podgroups", lambda: web.Response(status=404, text="404 page not found")))
    await shell.reconcile()
    await shell.reconcile()
    assert shell.pods() == []
    running = shell.running()
    assert running["reason"] == "NotInstalled"
    assert "Volcano is not installed; install it, or choose another `gangScheduler`" in running["message"]
    api.refusals.clear()
    await shell.reconcile()
    assert len(shell.pods()) == 3


async def test_a_missing_right_is_a_reason_with_the_value_that_gives_it(api: FakeApi, client: Client) -> None:
    message = 'podgroups.scheduling.volcano.sh is forbidden: User "x" cannot create resource "podgroups" in API group'
    shell = await a_shell_of(api, client, policy=VOLCANO)
    api.refusals.append(refuse("/podgroups", lambda: refusal(403, "Forbidden", message)))
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


async def test_a_disruption_budget_is_made_with_each_attempt(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, policy={"disruptionBudget": {"minAvailable": 2}})
    await shell.reconcile()
    (path,) = [path for path in api.objects if path.startswith(BUDGETS)]
    assert api.objects[path]["spec"]["minAvailable"] == 2
    await api.remove(path)
    await begin_another_attempt(shell)
    assert path in api.objects


async def test_a_job_of_another_controller_costs_no_request(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client, managed_by="kueue.x-k8s.io/multikueue")
    await shell.reconcile()
    assert api.requests == []
    assert "status" not in shell.job()


async def a_gang_with_nodes(api: FakeApi, client: Client, clock: list[datetime]) -> tuple[Shell, set[str]]:
    """A gang whose pods have a node and do not start, and the paths of all that it needs besides them."""
    policy = {**VOLCANO, "disruptionBudget": {"minAvailable": 2}}
    site = replace(SITE, network_policies=True)
    shell = await a_shell_of(api, client, policy=policy, storage=a_claim_template(), site=site, now=lambda: clock[0])
    await shell.reconcile()
    for path in [path for path in api.objects if "/pods/" in path]:
        shell.world.pods.observe(await api.put(path, spec={"nodeName": "node1"}))
    kinds = ("secrets", "persistentvolumeclaims", "poddisruptionbudgets", "podgroups", "networkpolicies")
    needed = {path for path in api.objects if path.split("/")[-2] in kinds}
    assert len(needed) == len(kinds)
    return shell, needed


async def test_what_was_taken_away_is_made_again_while_pods_do_not_start(api: FakeApi, client: Client) -> None:
    clock = [NOW]
    shell, needed = await a_gang_with_nodes(api, client, clock)
    for path in needed:
        await api.remove(path)
    await shell.reconcile()
    assert not needed & set(api.objects), "nothing is asked for before pods have waited for a while"
    clock[0] += timedelta(seconds=31)
    await shell.reconcile()
    assert needed <= set(api.objects)
    asked = len(api.asked("POST"))
    await shell.reconcile()
    assert len(api.asked("POST")) == asked, "once for each try"


async def test_a_full_quota_is_no_reason_where_the_object_itself_fills_it(api: FakeApi, client: Client) -> None:
    clock = [NOW]
    shell, _ = await a_gang_with_nodes(api, client, clock)
    for kind in ("/secrets", "/persistentvolumeclaims"):
        api.refusals.append(refuse(kind, lambda: refusal(403, "Forbidden", "exceeded quota: small")))
    clock[0] += timedelta(seconds=31)
    await shell.reconcile()
    assert shell.world.problems == {}


async def test_a_claim_that_is_gone_and_that_a_quota_refuses_is_a_reason(api: FakeApi, client: Client) -> None:
    clock = [NOW]
    shell, needed = await a_gang_with_nodes(api, client, clock)
    (claim,) = [path for path in needed if "/persistentvolumeclaims/" in path]
    await api.remove(claim)
    api.refusals.append(refuse("/persistentvolumeclaims", lambda: refusal(403, "Forbidden", "exceeded quota: small")))
    clock[0] += timedelta(seconds=31)
    await shell.reconcile()
    await shell.reconcile()
    assert shell.running()["reason"] == "QuotaExceeded"


async def test_a_service_that_is_gone_costs_one_request_also_while_the_gang_runs(api: FakeApi, client: Client) -> None:
    shell = await a_shell_of(api, client)
    await shell.reconcile()
    for path in [path for path in api.objects if "/pods/" in path]:
        state = {"name": "trainer", "state": {"running": {}}}
        status = {"phase": "Running", "containerStatuses": [state]}
        shell.world.pods.observe(await api.put(path, status=status))
    await shell.reconcile()
    assert shell.running()["reason"] == "AllPodsRunning"
    (path,) = [path for path in api.objects if path.startswith(f"{CHILDREN}/services/")]
    service = api.objects[path]
    await api.remove(path)
    shell.world.services.observe_deleted(service)
    before = len(api.requests)
    await shell.reconcile()
    assert path in api.objects
    assert api.requests[before:] == [("POST", f"{CHILDREN}/services")]
