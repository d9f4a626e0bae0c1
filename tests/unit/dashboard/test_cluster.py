"""Jobs of a cluster as a source of pages."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from disttrain.client import Client
from disttrain.dashboard.cluster import FRESH_SECONDS, SHARE, ClusterJobs
from disttrain_dashboard.source import SourceError, UnknownJobError
from disttrain_dashboard.views import listing
from disttrain_dashboard.views.page import page
from tests.builders import UID, a_job, a_raw_job, a_raw_pod, running, waiting
from tests.unit.cli.fake_api import JOBS, TIME, FakeApi, a_condition
from tests.unit.dashboard.jobs import a_status


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApi]:
    with FakeApi() as fake:
        fake.kubeconfig(tmp_path / "kubeconfig")
        monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
        yield fake


def put(api: FakeApi, name: str = "digits", namespace: str = "default", **status: object) -> None:
    raw = a_raw_job(name, status=a_status(conditions=[a_condition("Running")], **status))
    raw["metadata"] |= {"namespace": namespace, "uid": f"{UID}-{name}" if name != "digits" else UID}
    api.put_job(raw)


def test_a_namespace_or_all_of_them(api: FakeApi) -> None:
    put(api)
    put(api, "other", "team-b")
    own, all_ = (ClusterJobs(Client(), everywhere=everywhere) for everywhere in (False, True))
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
    seen = ClusterJobs(Client(), everywhere=False).job("default/digits")
    found = page(seen)
    assert found["ranks"]["states"] == "rw"
    assert [event["reason"] for event in found["events"]] == ["a", "b"]
    assert found["why"].startswith("digits runs since")


def test_it_only_reads(api: FakeApi) -> None:
    put(api)
    jobs = ClusterJobs(Client(), everywhere=False)
    jobs.jobs(), jobs.job("default/digits")
    assert {asked.split()[0] for asked in api.asked} == {"GET"}


def test_curves_are_what_was_seen_meanwhile(api: FakeApi) -> None:
    jobs = ClusterJobs(Client(), everywhere=False)
    for step in (10, 20, 30):
        put(api, progress={"step": step, "totalSteps": 100, "loss": 1 / step, "updateTime": TIME})
        jobs.jobs()
    (panel,) = jobs.job("default/digits").panels
    assert [point[0] for point in panel["lines"][0]["points"]] == [10, 20, 30]
    api.remove(f"{JOBS.format('default')}/digits")
    jobs.jobs()
    assert jobs._curves == {}


@pytest.mark.parametrize("key", ["default/none", "none", "", "default/", "/digits", "default/../x", "default/a?b=c"])
def test_no_key_leads_elsewhere(api: FakeApi, key: str) -> None:
    put(api)
    jobs = ClusterJobs(Client(), everywhere=True)
    with pytest.raises((UnknownJobError, SourceError)):
        jobs.job(key)
    assert all(asked.removeprefix("GET ").startswith("/apis/disttrain.io/") for asked in api.asked)


@pytest.mark.parametrize(
    ("status", "answer", "sentence"),
    [(403, {"message": "you may not"}, "you may not"), (404, b"404 page not found", "install the chart first")],
)
def test_a_cluster_that_refuses_is_a_sentence(api: FakeApi, status: int, answer: object, sentence: str) -> None:
    api.answers[JOBS.format("default")] = (status, answer)
    with pytest.raises(SourceError, match=sentence):
        ClusterJobs(Client(), everywhere=False).jobs()


def test_events_that_may_not_be_read_cost_no_page(api: FakeApi) -> None:
    put(api)
    api.answers["/api/v1/namespaces/default/events"] = (403, {"message": "no"})
    assert ClusterJobs(Client(), everywhere=False).job("default/digits").events == []


def test_the_last_lines_of_a_rank(api: FakeApi) -> None:
    put(api)
    lines = [f"{TIME} [rank 0] line {number}" for number in range(9)]
    api.put_pod(running(a_raw_pod(a_job(), index=0)), *lines)
    jobs = ClusterJobs(Client(), everywhere=False)
    assert jobs.log("default/digits", 0, 2) == ["line 7", "line 8"]
    with pytest.raises(SourceError, match="ranks 0 to 1"):
        jobs.log("default/digits", 5, 2)


def test_of_many_jobs_the_first_are_read_and_the_rest_is_said(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.dashboard.cluster.MAX_JOBS", 3)
    for number in range(5):
        put(api, f"job{number}")
    found = ClusterJobs(Client(), everywhere=False).jobs()
    assert (len(found.jobs), found.more) == (3, "The first 3 jobs are shown, and there are more.")
    assert listing.listing(found, "t")["more"] == found.more


@pytest.mark.parametrize("ask", [ClusterJobs.jobs, lambda jobs: jobs.job("default/digits")], ids=["list", "job"])
def test_answers_that_take_long_are_asked_for_seldom(api: FakeApi, ask: Callable[[ClusterJobs], object]) -> None:
    put(api)
    times = iter([0.0, 0.1, 100.0, 103.0])
    jobs = ClusterJobs(Client(), everywhere=False, clock=lambda: next(times))
    ask(jobs)
    assert jobs.seconds == FRESH_SECONDS
    ask(jobs)
    assert jobs.seconds == 3.0 * SHARE
