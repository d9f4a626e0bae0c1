"""Jobs that were deleted, as the history of their namespaces has them."""

import json
from typing import Any

import pytest

from disttrain.client import Client
from disttrain.dashboard.cluster import ClusterJobs, Figures
from disttrain.dashboard.past import MAX_PAST, READ_SECONDS
from disttrain_dashboard.source import SourceError, UnknownJobError
from disttrain_dashboard.views.listing import listing
from disttrain_dashboard.views.page import page
from tests.builders import UID
from tests.unit.cli.fake_api import JOBS, TIME, FakeApi
from tests.unit.dashboard.test_cluster import put

HISTORY = "/api/v1/namespaces/{}/configmaps"


def an_entry(name: str, uid: str, day: int = 1, **more: Any) -> dict[str, str]:
    """An entry of a finished job, by its key."""
    progress = {"step": 100, "totalSteps": 100, "loss": 0.25, "updateTime": TIME}
    entry = {
        "name": name, "namespace": "forged", "uid": uid, "phase": "Succeeded", "creationTime": TIME, "attempts": 3,
        "completionTime": f"2026-01-{day:02}T12:00:00Z", "progress": progress, "worldSize": 8, "mesh": "dp8",
    }  # fmt: skip
    return {f"202601{day:02}T120000Z.{uid}": json.dumps(entry | more)}


def put_history(api: FakeApi, namespace: str, *entries: dict[str, str]) -> None:
    data = {key: text for entry in entries for key, text in entry.items()}
    metadata = {"name": "disttrain-history", "namespace": namespace}
    api.put(HISTORY.format(namespace), {"metadata": metadata, "data": data})


def test_they_are_listed_after_those_that_are_there(api: FakeApi) -> None:
    put(api)
    put_history(api, "default", an_entry("digits", UID), an_entry("old", "u1", 2), an_entry("older", "u2", 1))
    put_history(api, "other", an_entry("third", "u3", 3))
    own, all_ = ClusterJobs(Client(), ("default",)), ClusterJobs(Client())
    rows = listing(own.jobs(), "t")["jobs"]
    assert [(row["key"], row["deleted"]) for row in rows] == [
        ("default/digits", False), ("default/old/u1", True), ("default/older/u2", True),
    ]  # fmt: skip
    assert (rows[1]["phase"], rows[1]["step"], rows[1]["loss"], rows[1]["finished"]) == (
        "Succeeded", 100, 0.25, "2026-01-02T12:00:00Z",
    )  # fmt: skip
    assert [job.key for job in all_.jobs().jobs][1:] == ["other/third/u3", "default/old/u1", "default/older/u2"]


def test_the_page_says_what_became_of_one(api: FakeApi) -> None:
    put_history(api, "default", an_entry("old", "u1", 1, message="all steps are done"), an_entry("old", "u2", 2))
    jobs = ClusterJobs(Client(), ("default",))
    found = page(jobs.job("default/old/u1"))
    assert "all steps are done. It was deleted since then." in found["why"]
    assert (found["job"]["deleted"], found["ranks"], found["panels"]) == (True, None, [])
    # Who looks at a job while it is deleted goes on to the last one of its name.
    assert jobs.job("default/old").job.key == "default/old/u2"
    for key in ("default/old/u3", "default/none", "default/none/u1", "other/old/u1"):
        with pytest.raises(UnknownJobError):
            jobs.job(key)
    with pytest.raises(SourceError, match="deleted, and its pods with it"):
        jobs.log("default/old/u1", 0, 10)


def test_a_forged_entry_brings_no_curves_of_another_job(api: FakeApi) -> None:
    """Red where curves are found by the uid of an entry: whoever may change ConfigMaps can write any."""
    put(api, "secret", "team-b", progress={"step": 10, "totalSteps": 100, "loss": 0.5, "updateTime": TIME})
    figures = Figures()
    ClusterJobs(Client(), figures=figures).jobs()
    put_history(api, "default", an_entry("mine", f"{UID}-secret"))
    found = ClusterJobs(Client(), ("default",), figures=figures)
    assert found.job(f"default/mine/{UID}-secret").panels == ()


@pytest.mark.parametrize("status", [401, 403, 404, 500])
def test_a_history_that_cannot_be_read_costs_no_list(api: FakeApi, status: int) -> None:
    put(api)
    for path in ("/api/v1/configmaps", f"{HISTORY.format('default')}/disttrain-history"):
        api.answers[path] = (status, {"message": "no"})
    for namespaces in ((), ("default",)):
        jobs = ClusterJobs(Client(), namespaces)
        assert [job.key for job in jobs.jobs().jobs] == ["default/digits"]
        with pytest.raises(UnknownJobError):
            jobs.job("default/none")


def test_it_is_read_seldom_and_the_last_are_listed(api: FakeApi, monkeypatch: pytest.MonkeyPatch) -> None:
    put_history(api, "default", *(an_entry(f"job-{number}", f"u{number:03}", 1) for number in range(MAX_PAST + 5)))
    now = 0.0
    jobs = ClusterJobs(Client(), ("default",), clock=lambda: now)
    assert len(jobs.jobs().jobs) == MAX_PAST
    put_history(api, "default", an_entry("new", "new", 9))
    assert jobs.jobs().jobs[0].key != "default/new/new"
    now = READ_SECONDS
    assert jobs.jobs().jobs[0].key == "default/new/new"
    monkeypatch.setattr("disttrain.dashboard.cluster.MAX_JOBS", 2)
    put(api)
    assert [job.key for job in jobs.jobs().jobs] == ["default/digits", "default/new/new"]
    assert len([asked for asked in api.asked if "configmaps" in asked]) == 2
    assert JOBS.format("default") in api.asked[-1]
