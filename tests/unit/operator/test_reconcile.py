"""One look at one job: status first, then the children; what is refused; what costs nothing."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web

from disttrain_api.names import Env, Label, Role
from disttrain_api.ownership import owner_reference
from disttrain_operator.decide.decision import CreatePod, CreateSupport
from disttrain_operator.decide.observed import Job
from disttrain_operator.execute import Executor
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import KubeError
from disttrain_operator.plan.identity import child_name
from disttrain_operator.plan.node_affinity import REQUIRED
from disttrain_operator.plan.site import Site
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.snapshot import Key, World, children_of
from tests.builders import a_manifest
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, Raw, refusal

JOBS = "/apis/disttrain.io/v1alpha1/namespaces/default/disttrainingjobs"
CHILDREN = "/api/v1/namespaces/default"


SITE = Site(trainer_image="image", token="token")


@dataclass
class Shell:
    """The operator without its watches: the cache learns of the job once, and then of its own writes."""

    api: FakeApi
    world: World
    queue: WorkQueue[Key]
    reconciler: Reconciler
    key: Key

    async def reconcile(self) -> None:
        await self.reconciler.reconcile(self.key)

    def free(self) -> None:
        """A pod of the namespace is gone."""
        self.queue.try_now(self.reconciler.refused.freed("default"))

    def job(self) -> Raw:
        return self.api.objects[f"{JOBS}/digits"]

    def knows_newest(self) -> bool:
        """Whether no answer about the job is still on its way."""
        known = self.world.job(self.key.uid)
        return known is not None and known.resource_version == self.job()["metadata"]["resourceVersion"]

    def running(self) -> Raw:
        return next(entry for entry in self.job()["status"]["conditions"] if entry["type"] == "Running")

    def pods(self) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.api.objects if "/pods/" in path)

    def known_pods(self) -> list[Raw]:
        return self.world.pods.group(children_of(self.key.namespace, self.key.uid))

    def writes(self) -> list[str]:
        """Methods and collections of everything asked, in order."""
        return [f"{method} {path.removeprefix(CHILDREN).removeprefix(JOBS)}" for method, path in self.api.requests]


@pytest.fixture
async def shell(api: FakeApi, client: Client) -> Shell:
    return await a_shell(api, client)


async def a_shell(
    api: FakeApi,
    client: Client,
    *,
    workers: int = 3,
    policy: Raw | None = None,
    managed_by: str | None = None,
    queue: WorkQueue[Key] | None = None,
    storage: Raw | None = None,
    site: Site = SITE,
    **options: Any,
) -> Shell:
    manifest = a_manifest(workers={"replicas": workers}, runPolicy=policy or {}, storage=storage, managedBy=managed_by)
    raw = await api.put(f"{JOBS}/digits", spec=manifest["spec"])
    world, queue = World(), WorkQueue[Key]() if queue is None else queue
    for cache in (world.jobs, world.pods, world.services):
        cache.replace([], api.version - 1)
    world.jobs.observe(raw)
    executor = Executor(client, world, lambda job: site)
    reconciler = Reconciler(client, world, executor, queue, **options)
    return Shell(api, world, queue, reconciler, Key("default", "digits", raw["metadata"]["uid"]))


def refuse(part: str, answer: Callable[[], web.Response]) -> Callable[[str, str, Raw | None], web.Response | None]:
    """Refuses POSTs whose collection or name holds `part`."""

    def decide(method: str, path: str, body: Raw | None) -> web.Response | None:
        if method == "POST" and part in f"{path}/{((body or {}).get('metadata') or {}).get('name')}":
            return answer()
        return None

    return decide


async def test_the_status_is_written_before_anything_is_created(shell: Shell) -> None:
    await shell.reconcile()
    writes = shell.writes()
    assert writes[0] == "PUT /digits/status"
    assert sorted(writes[1:]) == sorted(["POST /services", "POST /secrets", "POST /events", *["POST /pods"] * 3])
    assert shell.job()["status"]["attempt"] == 1
    assert len(shell.pods()) == 3


async def test_the_last_pod_waits_for_what_all_of_them_need(shell: Shell) -> None:
    await shell.reconcile()
    writes = shell.writes()
    last = max(index for index, write in enumerate(writes) if write == "POST /pods")
    assert last > writes.index("POST /services")
    assert last > writes.index("POST /secrets")


async def test_a_replacement_says_which_it_is_and_rules_the_dead_node_out(api: FakeApi, client: Client) -> None:
    shell = await a_shell(api, client)
    job, _ = shell.world.snapshot(shell.key.uid) or pytest.fail("the job is unknown")
    site = Site(trainer_image="image", token="token")
    executor = Executor(client, shell.world, lambda job: site)
    await executor.execute(job, [CreatePod(Role.WORKER, 1, 1, "wanted", replacement=4, dead=("node1",))])
    (pod,) = (pod for path, pod in shell.api.objects.items() if "/pods/" in path)
    assert {"name": Env.REPLACEMENT, "value": "4"} in pod["spec"]["containers"][0]["env"]
    (term,) = pod["spec"]["affinity"]["nodeAffinity"][REQUIRED]["nodeSelectorTerms"]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "NotIn", "values": ["node1"]}]}


async def test_pods_of_a_later_attempt_wait_for_what_they_need_unless_it_was_seen(api: FakeApi, client: Client) -> None:
    shell = await a_shell(api, client)
    job, _ = shell.world.snapshot(shell.key.uid) or pytest.fail("the job is unknown")

    def executor() -> Executor:
        shell.world.supported.clear()
        return Executor(client, shell.world, lambda job: Site(trainer_image="image", token="token"))

    async def pods_made(by: Executor, attempt: int) -> int:
        before = len(shell.pods())
        pods = [CreatePod(Role.WORKER, index, attempt, "wanted") for index in range(3)]
        await by.execute(job, [CreateSupport(attempt, "wanted"), *pods])
        return len(shell.pods()) - before

    first = executor()
    assert await pods_made(first, 1) == 3
    # As a full quota answers, although the Secret is there.
    api.refusals.append(refuse("/secrets", lambda: refusal(403, "Forbidden", "exceeded quota: secrets")))
    assert await pods_made(first, 2) == 3
    assert len(api.asked("POST", "/secrets")) == 2
    assert await pods_made(executor(), 3) == 2


async def test_nothing_more_is_asked_when_nothing_has_changed(shell: Shell) -> None:
    await shell.reconcile()
    shell.api.requests.clear()
    await shell.reconcile()
    await shell.reconcile()
    assert shell.writes() == []


async def test_a_stale_writer_executes_nothing_and_reads_again(shell: Shell) -> None:
    await shell.api.put(f"{JOBS}/digits", labels={"changed": "meanwhile"})
    await shell.reconcile()
    assert shell.writes() == ["PUT /digits/status", "GET /digits"]
    assert shell.pods() == []
    await shell.reconcile()
    assert len(shell.pods()) == 3


async def test_a_job_that_vanished_is_forgotten(shell: Shell) -> None:
    await shell.api.remove(f"{JOBS}/digits")
    await shell.reconcile()
    await shell.reconcile()
    assert shell.writes() == ["PUT /digits/status", "GET /digits"]
    assert shell.world.snapshot(shell.key.uid) is None


async def test_a_namesake_is_another_job(shell: Shell) -> None:
    await shell.api.remove(f"{JOBS}/digits")
    await shell.api.put(f"{JOBS}/digits", spec=a_manifest()["spec"])
    await shell.reconcile()
    await shell.reconcile()
    assert shell.pods() == []
    assert len(shell.world.all_keys()) == 1
    assert shell.world.all_keys()[0].uid != shell.key.uid


async def test_a_standby_asks_nothing(api: FakeApi, client: Client) -> None:
    shell = await a_shell(api, client, active=lambda: False)
    await shell.reconcile()
    assert shell.writes() == []


async def test_a_lost_event_loses_nothing_else(shell: Shell) -> None:
    shell.api.refusals.append(refuse("/events", lambda: refusal(403, "Forbidden")))
    await shell.reconcile()
    assert len(shell.pods()) == 3


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda: refusal(403, "Forbidden", "exceeded quota: q"), "QuotaExceeded"),
        (lambda: refusal(403, "Forbidden", 'violates PodSecurity "restricted:latest"'), "Forbidden"),
        (lambda: refusal(422, "Invalid", "spec.containers[0].image: Required value"), "InvalidPod"),
        (lambda: refusal(400, "BadRequest", "unknown field"), "InvalidPod"),
        (lambda: refusal(500, "InternalError", "failed calling webhook"), "CreateFailed"),
        (lambda: refusal(409, "Conflict", "Operation cannot be fulfilled on resourcequotas"), "CreateFailed"),
    ],
)
async def test_a_refusal_is_a_reason_on_the_job_until_it_is_lifted(shell, answer, reason):
    shell.api.refusals.append(refuse("/pods", answer))
    await shell.reconcile()
    await shell.reconcile()
    assert shell.running()["reason"] == reason
    assert shell.queue.failures(shell.key) > 0
    shell.api.refusals.clear()
    await shell.reconcile()
    await shell.reconcile()
    assert len(shell.pods()) == 3
    assert shell.running()["reason"] == "WaitingForPods"


async def test_a_refused_role_sends_one_pod_ahead(api: FakeApi, client: Client) -> None:
    shell = await a_shell(api, client, workers=200)
    api.refusals.append(refuse("/pods", lambda: refusal(422, "Invalid")))
    await shell.reconcile()
    assert len(api.asked("POST", "/pods")) <= client.max_in_flight
    api.requests.clear()
    await shell.reconcile()
    assert len(api.asked("POST", "/pods")) == 1
    api.refusals.clear()
    await shell.reconcile()
    assert len(shell.pods()) == 200


async def test_a_gang_is_not_complete_before_its_service_is_there(shell: Shell) -> None:
    shell.api.refusals.append(refuse("/services", lambda: refusal(403, "Forbidden", "exceeded quota: services")))
    await shell.reconcile()
    await shell.reconcile()
    assert len(shell.pods()) == 2
    assert shell.running()["reason"] == "QuotaExceeded"
    shell.api.refusals.clear()
    await shell.reconcile()
    assert len(shell.pods()) == 3


@pytest.mark.parametrize(
    ("metadata", "reason"), [({}, "NameConflict"), ({"deletionTimestamp": "2026-01-01T00:00:00Z"}, "WaitingForOldPods")]
)
async def test_a_foreign_pod_of_the_same_name(shell: Shell, metadata: Raw, reason: str) -> None:
    name = f"{child_name('digits', shell.key.uid)}-worker-1-a1"
    foreign = await shell.api.put(f"{CHILDREN}/pods/{name}")
    foreign["metadata"].update(metadata)
    await shell.reconcile()
    await shell.reconcile()
    assert len(shell.pods()) == 3, "the others are made"
    assert shell.running()["reason"] == reason
    await shell.api.remove(f"{CHILDREN}/pods/{name}")
    await shell.reconcile()
    await shell.reconcile()
    assert len(shell.pods()) == 3
    assert shell.running()["reason"] == "WaitingForPods"


async def test_an_own_pod_that_the_cache_does_not_know_is_adopted(shell: Shell) -> None:
    uid = shell.key.uid
    name = f"{child_name('digits', uid)}-worker-1-a1"
    own = await shell.api.put(f"{CHILDREN}/pods/{name}", labels={Label.JOB_UID: uid})
    own["metadata"]["ownerReferences"] = [owner_reference("digits", uid)]
    await shell.reconcile()
    assert shell.world.problems == {}
    assert own["metadata"]["uid"] in {raw["metadata"]["uid"] for raw in shell.known_pods()}


async def test_a_namespace_whose_service_account_is_not_there_yet_costs_no_reason(shell: Shell) -> None:
    message = 'error looking up service account default/default: serviceaccount "default" not found'
    answers = [refusal(403, "Forbidden", message) for _ in range(6)]
    shell.api.refusals.append(lambda method, path, _: answers.pop() if path.endswith("/pods") and answers else None)
    await shell.reconcile()
    assert shell.world.problems == {}
    assert len(shell.pods()) == 3


async def test_a_namespace_that_goes_away_takes_the_job_with_it_in_peace(shell: Shell) -> None:
    shell.api.refusals.append(refuse("/pods", lambda: refusal(404, "NotFound", 'namespaces "default" not found')))
    await shell.reconcile()
    assert shell.world.problems == {}


async def test_an_outage_between_two_pods_is_continued(shell: Shell) -> None:
    answered = 0

    def outage(method: str, path: str, body: Raw | None) -> web.Response | None:
        nonlocal answered
        if method == "POST" and path.endswith("/pods"):
            answered += 1
            if answered > 1:
                raise web.HTTPServiceUnavailable
        return None

    shell.api.refusals.append(outage)
    await shell.reconcile()
    assert len(shell.pods()) == 1
    shell.api.refusals.clear()
    await shell.reconcile()
    assert len(shell.pods()) == 3
    assert shell.job()["status"]["restarts"] == 0


async def test_a_decision_that_fails_backs_off_and_leaves_other_jobs_alone(api, client, caplog):
    decided: list[str] = []

    def fail(job: Job, *_: object) -> Any:
        decided.append(job.uid)
        raise ZeroDivisionError("a defect")

    shell = await a_shell(api, client, decide=fail)
    worker = asyncio.create_task(shell.reconciler.work())
    shell.queue.add(shell.key)
    await eventually(lambda: decided)
    for _ in range(10):
        shell.queue.add(shell.key)
    other = Key("default", "other", "no such uid")
    shell.queue.add(other)
    await eventually(lambda: len(shell.queue) == 0)
    assert len(decided) == 1
    assert "ZeroDivisionError" in caplog.text
    assert not worker.done()
    worker.cancel()


async def test_nobody_answering_is_an_error_of_the_key_alone(shell: Shell) -> None:
    shell.api.refusals.append(lambda *_: refusal(503, "ServiceUnavailable"))
    with pytest.raises(KubeError, match=r"^503: "):
        await shell.reconcile()
    assert shell.pods() == []


async def test_a_server_that_throttles_is_no_problem_of_the_pod(shell: Shell) -> None:
    busy = refuse("/pods", lambda: refusal(429, "TooManyRequests", headers={"Retry-After": "0.01"}))
    shell.api.refusals.append(busy)
    with pytest.raises(KubeError, match=r"^429 TooManyRequests"):
        await shell.reconcile()
    assert shell.world.problems == {}
    shell.api.refusals.remove(busy)
    await shell.reconcile()
    assert len(shell.pods()) == 3
    assert shell.running()["reason"] == "WaitingForPods"


async def test_the_facts_of_a_pod_are_read_once_per_version(shell: Shell) -> None:
    await shell.reconcile()
    before, after = (shell.world.snapshot(shell.key.uid) for _ in range(2))
    assert all(one is other for one, other in zip(before[1].pods, after[1].pods, strict=True))
    path = next(path for path in shell.api.objects if "/pods/" in path)
    shell.world.pods.observe(await shell.api.put(path, status={"phase": "Running"}))
    changed = shell.world.snapshot(shell.key.uid)
    assert sum(one is other for one, other in zip(before[1].pods, changed[1].pods, strict=True)) == 2
