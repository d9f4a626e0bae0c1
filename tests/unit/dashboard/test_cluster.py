"""Jobs of a cluster as a source of pages."""

from collections.abc import Callable

import pytest

from disttrain.client import Client
from disttrain.cluster.api import Api, Bounds
from disttrain.cluster.connect import find_access
from disttrain.cluster.remote import RemoteJob
from disttrain.dashboard.cluster import FRESH_SECONDS, LONGEST_SECONDS, SHARE, ClusterJobs, Figures
from disttrain.errors import CommandError
from disttrain_api.names import AGENT_PORT, CONFIG_VOLUME, CONTAINER, Env
from disttrain_dashboard.app import MAX_LINE
from disttrain_dashboard.source import SourceError, UnknownJobError
from disttrain_dashboard.views import listing
from disttrain_dashboard.views.page import page
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, running, waiting
from tests.unit.cli.fake_api import JOBS, TIME, FakeApi, a_condition
from tests.unit.dashboard.jobs import a_status

OWN = ("default",)


def put(api: FakeApi, name: str = "digits", namespace: str = "default", **status: object) -> None:
    raw = a_raw_job(name, status=a_status(conditions=[a_condition("Running")], **status))
    raw["metadata"] |= {"namespace": namespace, "uid": f"{UID}-{name}" if name != "digits" else UID}
    api.put_job(raw)


def test_a_namespace_or_all_of_them(api: FakeApi) -> None:
    put(api)
    put(api, "other", "team-b")
    own, all_ = ClusterJobs(Client(), OWN), ClusterJobs(Client())
    assert [job.key for job in own.jobs().jobs] == ["default/digits"]
    assert sorted(job.key for job in all_.jobs().jobs) == ["default/digits", "team-b/other"]
    assert own.title == f"Jobs of namespace default at {api.url}"
    assert all_.job("team-b/other").job.raw["metadata"]["name"] == "other"
    with pytest.raises(UnknownJobError):
        own.job("team-b/other")


def test_a_job_with_its_pods_events_and_why(api: FakeApi) -> None:
    put(api)
    pods = [running(a_raw_pod(a_job(), index=0)), waiting(a_raw_pod(a_job(), index=1), "ImagePullBackOff", "no image")]
    for pod in pods:
        api.put_pod(pod)
    of_pod = {"uid": pods[1]["metadata"]["uid"], "name": "p", "kind": "Pod"}
    events = "/api/v1/namespaces/default/events"
    for name, about in (("a", {"uid": UID, "name": "digits"}), ("b", of_pod), ("c", {"uid": "stranger", "name": "x"})):
        api.put(events, {"metadata": {"name": name}, "involvedObject": about, "reason": name, "lastTimestamp": TIME})
    seen = ClusterJobs(Client(), OWN).job("default/digits")
    found = page(seen)
    assert found["ranks"]["states"] == "rw"
    assert [event["reason"] for event in found["events"]] == ["a", "b"]
    assert found["why"].startswith("digits runs since")


def test_it_only_reads(api: FakeApi) -> None:
    put(api)
    jobs = ClusterJobs(Client(), OWN)
    jobs.jobs(), jobs.job("default/digits")
    assert {asked.split()[0] for asked in api.asked} == {"GET"}


def test_curves_are_what_was_seen_meanwhile(api: FakeApi) -> None:
    jobs = ClusterJobs(Client(), OWN)
    for step in (10, 20, 30):
        put(api, progress={"step": step, "totalSteps": 100, "loss": 1 / step, "updateTime": TIME})
        jobs.jobs()
    (panel,) = jobs.job("default/digits").panels
    assert [point[0] for point in panel["lines"][0]["points"]] == [10, 20, 30]


def test_curves_are_those_of_the_jobs_that_were_looked_at_last() -> None:
    figures = Figures(2)
    for name in "abac":
        figures.learn([RemoteJob({"metadata": {"uid": name}, "status": a_status()})])
    assert len(figures) == 2
    assert list(figures._by_uid) == ["a", "c"]


@pytest.mark.parametrize(
    "key",
    ["default/none", "none", "", "default/", "/digits", "default/../x", "default/a?b=c", "../x", "a?b/c", "../x/u"],
)
def test_no_key_leads_elsewhere(api: FakeApi, key: str) -> None:
    put(api)
    jobs = ClusterJobs(Client())
    with pytest.raises((UnknownJobError, SourceError)):
        jobs.job(key)
    history = "GET /api/v1/namespaces/default/configmaps/disttrain-history"
    assert all(asked == history or asked.startswith("GET /apis/disttrain.io/") for asked in api.asked)


def test_namespaces_that_may_not_be_read_are_named_and_the_others_shown(api: FakeApi) -> None:
    put(api, "one", "team-a")
    put(api, "two", "team-c")
    api.answers[JOBS.format("team-b")] = (403, {"message": "ann may not list them"})
    jobs = ClusterJobs(Client(), ("team-a", "team-b", "team-c"))
    found = jobs.jobs()
    assert [job.key for job in found.jobs] == ["team-a/one", "team-c/two"]
    assert found.more == "cannot list jobs of namespace team-b: ann may not list them."
    assert jobs.title == f"Jobs of namespaces team-a, team-b, team-c at {api.url}"
    with pytest.raises(SourceError, match="ann may not") as refused:
        ClusterJobs(Client(), ("team-b",)).jobs()
    assert refused.value.status == 403


@pytest.mark.parametrize(("status", "said"), [(401, 401), (403, 403), (404, 503), (429, 503), (500, 503)])
def test_a_refusal_of_credentials_or_rights_is_told_apart(api: FakeApi, status: int, said: int) -> None:
    api.answers[JOBS.format("default")] = (status, {"message": "no"})
    with pytest.raises(SourceError) as refused:
        ClusterJobs(Client(), OWN).jobs()
    assert refused.value.status == said


def test_curves_are_shared_by_those_who_are_shown_the_job(api: FakeApi) -> None:
    """Red where a job of the same name, or one that a viewer may not see, brings its curves."""
    figures = Figures()
    ann, bob = (ClusterJobs(Client(), figures=figures) for _ in range(2))
    put(api, progress={"step": 10, "totalSteps": 100, "loss": 0.5, "updateTime": TIME})
    ann.jobs()
    put(api, progress={"step": 20, "totalSteps": 100, "loss": 0.4, "updateTime": TIME})
    (panel,) = bob.job("default/digits").panels
    assert [point[0] for point in panel["lines"][0]["points"]] == [10, 20]
    api.answers[f"{JOBS.format('default')}/digits"] = (403, {"message": "no"})
    with pytest.raises(SourceError):
        bob.job("default/digits")
    del api.answers[f"{JOBS.format('default')}/digits"]
    api.put_job({"metadata": {"name": "digits", "namespace": "default", "uid": "another"}})
    (panel,) = bob.job("default/digits").panels
    assert [point[0] for point in panel["lines"][0]["points"]] == [20]


def test_lists_and_lines_of_a_log_have_bounds(api: FakeApi) -> None:
    for number in range(5):
        put(api, f"job{number}")
    access = find_access()
    size = len(Api(access)._ask("GET", JOBS.format("default"), None, what="x"))
    assert len(Client.of(Api(access, Bounds(list=size))).list()) == 5
    with pytest.raises(CommandError, match="the list is larger than"):
        Client.of(Api(access, Bounds(list=size - 1))).list()
    with pytest.raises(CommandError, match="the answer is larger than"):
        Client.of(Api(access, Bounds(answer=size - 1))).list()
    Client.of(Api(access, Bounds(page=7))).list()
    assert "limit=7" in api.asked[-1]
    put(api)
    api.put_pod(running(a_raw_pod(a_job(), index=0)), f"{TIME} [rank 0] {'x' * 10**6}")
    (line,) = ClusterJobs(Client(), OWN).log("default/digits", 0, 2)
    assert len(line) == MAX_LINE


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [(403, {"message": "you may not"}, "you may not"), (404, b"404 page not found", "install the chart first")],
)
def test_a_cluster_that_refuses_is_a_sentence(api: FakeApi, status: int, answer: object, sentence: str) -> None:
    api.answers[JOBS.format("default")] = (status, answer)
    with pytest.raises(SourceError, match=sentence):
        ClusterJobs(Client(), OWN).jobs()


def test_events_that_may_not_be_read_cost_no_page(api: FakeApi) -> None:
    put(api)
    api.answers["/api/v1/namespaces/default/events"] = (403, {"message": "no"})
    assert ClusterJobs(Client(), OWN).job("default/digits").events == []


def test_the_last_lines_of_a_rank(api: FakeApi) -> None:
    put(api)
    lines = [f"{TIME} [rank 0] line {number}" for number in range(9)]
    api.put_pod(running(a_raw_pod(a_job(), index=0)), *lines)
    jobs = ClusterJobs(Client(), OWN)
    assert jobs.log("default/digits", 0, 2) == ["line 7", "line 8"]
    with pytest.raises(SourceError, match="ranks 0 to 1"):
        jobs.log("default/digits", 5, 2)


def test_of_many_jobs_the_first_are_read_and_the_rest_is_said(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.dashboard.cluster.MAX_JOBS", 3)
    for number in range(5):
        put(api, f"job{number}")
    found = ClusterJobs(Client(), OWN).jobs()
    assert (len(found.jobs), found.more) == (3, "The first 3 jobs are shown, and there are more.")
    assert listing.listing(found, "t")["more"] == found.more


@pytest.mark.parametrize("ask", [ClusterJobs.jobs, lambda jobs: jobs.job("default/digits")], ids=["list", "job"])
def test_answers_that_take_long_are_asked_for_seldom(api: FakeApi, ask: Callable[[ClusterJobs], object]) -> None:
    put(api)
    times = iter([0.0, 0.1, 100.0, 103.0, 200.0, 230.0])
    jobs = ClusterJobs(Client(), OWN, clock=lambda: next(times))
    ask(jobs)
    assert jobs.seconds == FRESH_SECONDS
    ask(jobs)
    assert jobs.seconds == 3.0 * SHARE
    ask(jobs)
    assert jobs.seconds == LONGEST_SECONDS


def test_stacks_take_more_rights_than_the_page(api: FakeApi) -> None:
    put(api)
    pod = running(a_raw_pod(a_job(), index=0))
    env = [{"name": Env.AGENT_PORT, "value": str(AGENT_PORT)}]
    volumes = [{"name": CONFIG_VOLUME, "secret": {"secretName": "s"}}]
    api.put_pod(pod | {"spec": {"containers": [{"name": CONTAINER, "env": env}], "volumes": volumes}})
    secret = "/api/v1/namespaces/default/secrets/s"
    api.answers[secret] = (403, {"message": "ann cannot get secrets"})
    jobs = ClusterJobs(Client(), OWN)
    with pytest.raises(SourceError, match="ann cannot get secrets") as refused:
        jobs.stacks("default/digits", 0)
    assert refused.value.status == 403
    api.answers[secret] = (200, {"data": {"token": "dA=="}})
    place = f"/api/v1/namespaces/default/pods/{pod['metadata']['name']}%3A{AGENT_PORT}/proxy/v1/stacks"
    api.answers[place] = (401, {"error": "no token"})
    with pytest.raises(SourceError, match="no token") as refused:
        jobs.stacks("default/digits", 0)
    assert refused.value.status == 503, "a page would ask its reader for another token"
    api.answers[place] = (200, {"stacks": {"0": "in step"}})
    assert jobs.stacks("default/digits", 0) == "in step"
