"""What finished jobs came to is written once, together, beyond the jobs themselves, and costs nobody else."""

import json
from typing import Any

import pytest
from aiohttp import web

from disttrain_operator.history import MOST, MOST_GONE, History
from disttrain_operator.kube.client import Client
from disttrain_operator.snapshot import World
from tests.builders import a_raw_job
from tests.unit.operator.fake_api import FakeApi, Raw, refusal

PATH = "/api/v1/namespaces/{}/configmaps/disttrain-history"
KEPT = 3


class Jobs:
    """Jobs that come, finish and go, and what is kept of them."""

    def __init__(self, api: FakeApi, client: Client) -> None:
        self.api, self.history = api, History(client, KEPT)
        self.world = World()
        self.world.listener = self
        self.world.jobs.replace([], 1)
        self._version = 10
        self.life = 1

    def job_changed(self, key: Any, raw: Raw, *, gone: bool, quietly: bool = False) -> None:
        self.history.job_changed(key, raw, gone=gone)

    def enqueue(self, key: Any) -> None:
        pass

    def pod_gone(self, namespace: str) -> None:
        pass

    def put(self, name: str, namespace: str = "team", phase: str = "Succeeded", minute: int = 0, **more: Any) -> None:
        status = {"phase": phase, "completionTime": f"2026-01-01T12:{minute:02}:00Z"} | more
        self.world.jobs.observe(self._raw(name, namespace, status))

    def remove(self, name: str, namespace: str = "team") -> None:
        self.world.jobs.observe_deleted(self._raw(name, namespace, {}))

    def _raw(self, name: str, namespace: str, status: Raw) -> Raw:
        self._version += 1
        raw = a_raw_job(name, status=status)
        uid = f"{namespace}-{name}-{self.life}"
        raw["metadata"] |= {"namespace": namespace, "uid": uid, "resourceVersion": str(self._version)}
        return raw

    def entries(self, namespace: str = "team") -> list[Raw]:
        data = self.api.objects.get(PATH.format(namespace), {}).get("data", {})
        return [json.loads(data[key]) for key in sorted(data)]

    def kept(self, namespace: str = "team") -> list[str]:
        return [entry["name"] for entry in self.entries(namespace)]

    def writes(self) -> int:
        return len(self.api.asked("POST", "configmaps") + self.api.asked("PATCH", "configmaps"))


@pytest.fixture
def jobs(api: FakeApi, client: Client) -> Jobs:
    made = Jobs(api, client)
    made.history.begin(made.world)
    return made


async def test_jobs_that_finish_are_written_together_and_once(jobs: Jobs) -> None:
    jobs.put("a", minute=1)
    jobs.put("b", phase="Failed", minute=2)
    jobs.put("c", phase="Running")
    # What comes before the write is in it.
    jobs.put("b", phase="Failed", minute=2, restarts=7)
    await jobs.history.round()
    assert (jobs.kept(), jobs.writes()) == (["a", "b"], 1)
    assert jobs.entries()[-1]["restarts"] == 7
    jobs.put("a", minute=1, ready="0/2")
    await jobs.history.round()
    assert jobs.writes() == 1
    jobs.put("c", minute=3)
    jobs.put("d", minute=4)
    await jobs.history.round()
    assert (jobs.kept(), jobs.writes()) == (["b", "c", "d"], 2)
    assert jobs.api.validated[-1] == ("PATCH", "Strict")


async def test_a_job_that_is_deleted_at_once_is_kept(jobs: Jobs) -> None:
    jobs.put("a", minute=1)
    jobs.remove("a")
    jobs.put("b", phase="Running")
    jobs.remove("b")
    await jobs.history.round()
    assert jobs.kept() == ["a"]
    # One of the same name is another job.
    jobs.life = 2
    jobs.put("a", minute=2)
    await jobs.history.round()
    assert jobs.kept() == ["a", "a"]


async def test_a_replica_that_begins_to_act_writes_what_is_missing_and_a_standby_writes_nothing(
    api: FakeApi, client: Client
) -> None:
    jobs = Jobs(api, client)
    jobs.put("a", minute=1)
    jobs.put("b", minute=2)
    await jobs.history.round()
    assert jobs.writes() == 0
    jobs.history.begin(jobs.world)
    await jobs.history.round()
    jobs.history.begin(jobs.world)
    await jobs.history.round()
    assert (jobs.kept(), jobs.writes()) == (["a", "b"], 1)


async def test_who_acts_no_more_drops_what_it_has(jobs: Jobs, client: Client) -> None:
    client.may_write = lambda: False
    jobs.put("a")
    await jobs.history.round()
    jobs.put("b")
    client.may_write = lambda: True
    await jobs.history.round()
    assert jobs.kept() == []


@pytest.mark.parametrize(
    ("method", "answer", "later"),
    [
        ("GET", lambda: web.Response(status=503), True),
        ("POST", lambda: refusal(409, "AlreadyExists"), True),
        ("POST", lambda: refusal(403, "Forbidden", "exceeded quota"), False),
        ("POST", lambda: refusal(404, "NotFound", "the namespace is gone"), False),
        ("GET", lambda: web.Response(body=b'{"data": ' + b"[" * 5000 + b"]" * 5000 + b"}"), False),
    ],
)
async def test_what_is_refused_is_tried_again_where_that_may_help(
    jobs: Jobs, method: str, answer: Any, later: bool
) -> None:
    def refuse(asked: str, path: str, _: Raw | None) -> web.Response | None:
        return answer() if asked == method and "configmaps" in path and "team" in path else None

    jobs.api.refusals.append(refuse)
    jobs.put("a", minute=1)
    jobs.put("z", namespace="other")
    await jobs.history.round()
    assert (jobs.kept(), jobs.kept("other")) == ([], ["z"])
    jobs.remove("a")
    jobs.api.refusals.clear()
    await jobs.history.round()
    assert jobs.kept() == (["a"] if later else [])


async def test_a_write_that_meets_another_is_repeated(jobs: Jobs) -> None:
    jobs.put("a", minute=1)
    await jobs.history.round()
    others = ["999"]

    def change(method: str, path: str, _: Raw | None) -> None:
        if method == "PATCH" and others:
            jobs.api.objects[path]["metadata"]["resourceVersion"] = others.pop()

    jobs.api.refusals.append(change)
    jobs.put("b", minute=2)
    await jobs.history.round()
    assert jobs.kept() == ["a"]
    await jobs.history.round()
    assert jobs.kept() == ["a", "b"]


async def test_namespaces_take_turns(jobs: Jobs) -> None:
    for number in range(MOST + 1):
        jobs.put("a", namespace=f"n{number}")
    await jobs.history.round()
    jobs.put("b", namespace="n0")
    assert jobs.writes() == MOST
    await jobs.history.round()
    assert (jobs.kept(f"n{MOST}"), jobs.kept("n0")) == (["a"], ["a", "b"])


async def test_jobs_that_come_and_go_are_bounded(jobs: Jobs) -> None:
    for number in range(MOST_GONE + 5):
        jobs.put(f"j{number}", namespace=f"n{number % 7}", minute=number % 60)
        jobs.remove(f"j{number}", namespace=f"n{number % 7}")
    assert sum(len(each.gone) for each in jobs.history._turns.values()) == MOST_GONE
    assert not any(each.jobs for each in jobs.history._turns.values())
    assert not jobs.history._noted
    jobs.api.refusals.append(lambda *_: refusal(409, "AlreadyExists"))
    await jobs.history.round()
    assert jobs.history._gone == MOST_GONE
    jobs.api.refusals.clear()
    await jobs.history.round()
    assert jobs.history._gone == 0
