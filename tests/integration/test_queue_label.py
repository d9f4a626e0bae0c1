"""Kueue's label on a job of an installed chart: it changes as on Kueue's own kinds."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from disttrain_api.names import QUEUE_NAME_LABEL
from tests.integration.operator_process import JOBS, Team, eventually
from tests.integration.release import Release
from tools.cluster.control_plane import ControlPlane


@pytest.fixture(scope="module")
def team(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
    with ControlPlane() as cluster:
        release = Release(cluster, Path(tmp_path_factory.mktemp("release")), "one", "ops", ("crds.enabled=true",))
        assert (done := release.install()).returncode == 0, done.stderr
        eventually(lambda: cluster.api.ask("GET", "/apis/disttrain.io/v1alpha1/disttrainingjobs").status == 200)
        made = Team(cluster.api, "queues")
        made.create("probe")
        begin(made, "probe")
        # The API server reads policies a moment after they are stored.
        eventually(lambda: label(made, "probe", "other")[0] == 422)
        yield made


def begin(team: Team, name: str) -> None:
    """As the operator does with the first attempt."""
    path = f"{JOBS.format(team.namespace)}/{name}"
    team.ask("PATCH", f"{path}/status", {"status": {"attempt": 1}})


def label(team: Team, name: str, queue: str | None, **spec: bool) -> tuple[int, str]:
    """Code and words of the answer to a change of the label, and of the spec with it."""
    patch = {"metadata": {"labels": {QUEUE_NAME_LABEL: queue}}, "spec": spec}
    answer = team.api.ask("PATCH", f"{JOBS.format(team.namespace)}/{name}", patch)
    return answer.status, answer.body.decode()


@pytest.mark.parametrize("queue", ["other", None, ""], ids=["changed", "removed", "emptied"])
def test_it_stays_from_the_first_attempt_on_but_while_the_job_is_suspended(team: Team, queue: str | None) -> None:
    name = f"job-{queue}".lower().rstrip("-")
    team.create(name)
    assert label(team, name, "research")[0] == 200, "before the first attempt"
    begin(team, name)
    code, message = label(team, name, queue)
    assert code == 422
    assert (
        f"label `{QUEUE_NAME_LABEL}` stays 'research' from the first attempt on, but while the job is suspended"
        in message
    )
    assert label(team, name, "research", suspend=True)[0] == 200
    assert label(team, name, queue)[0] == 200
    assert label(team, name, queue, suspend=False)[0] == 200, "as it is now, it may stay"
    team.ask("PATCH", f"{JOBS.format(team.namespace)}/{name}", {"metadata": {"labels": {"team": "a"}}})


def test_one_that_is_added_to_a_job_that_runs_is_refused(team: Team) -> None:
    team.create("plain")
    begin(team, "plain")
    code, message = label(team, "plain", "research")
    assert (code, "stays '' from the first attempt on" in message) == (422, True)
