"""Jobs whose ends are known beforehand, whatever happens to the operator on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration.audit import created
from tests.integration.kubelet import Fate
from tests.integration.operator_process import JOBS, OperatorProcess, Team, eventually

Raw = dict[str, Any]
WORKERS = 3


def fate_of(pod: Raw) -> Fate:
    """A job's name says how many of its attempts fail, by one pod's end or by all of them."""
    labels = pod["metadata"]["labels"]
    _, failures, _ = labels["disttrain.io/job-name"].split("-")
    if int(labels["disttrain.io/attempt"]) > int(failures):
        return Fate(exit_code=0)
    if labels["disttrain.io/index"] == "1" or failures == "2":
        return Fate(exit_code=1)
    return Fate()


class Fleet:
    """Jobs of a namespace: of three in a row one succeeds, one after a restart, one fails for good."""

    def __init__(self, team: Team) -> None:
        self.team = team
        self._failures: dict[str, int] = {}

    def launch(self, count: int) -> None:
        """So many more jobs."""
        for number in range(len(self._failures), len(self._failures) + count):
            failures = number % 3
            name = f"job-{failures}-{number}"
            self._failures[name] = failures
            self.team.create(
                name, workers={"replicas": WORKERS}, runPolicy={"maxRestarts": 1, "restartBackoffSeconds": 1}
            )

    def statuses(self) -> dict[str, Raw]:
        """By name."""
        return {job["metadata"]["name"]: job.get("status") or {} for job in self._list()}

    def unfinished(self) -> list[str]:
        """Names of the jobs that have not come to an end; all of them where nobody can say."""
        ended = {name for name, status in self.statuses().items() if _ended(status)}
        return [name for name in self._failures if name not in ended]

    def wait(self) -> None:
        """Until all jobs have come to an end."""
        eventually(lambda: not self.unfinished(), self._why, pause=0.2)

    def check(self, operator: OperatorProcess, audit_log: Path) -> None:
        """Every job came to its own end, by its own number of restarts, and no pod was made twice or left behind."""
        statuses = self.statuses()
        wanted = {name: _end(failures) for name, failures in self._failures.items()}
        assert {name: _came_to(statuses[name]) for name in wanted} == wanted
        made = created(audit_log, self.team.namespace, "pods")
        assert {name: times for name, times in made.items() if times > 1} == {}, "made more than once"
        assert set(made) <= set(self._pod_names()), "made, and belongs to no attempt that there was"
        eventually(lambda: not self._orphans(), self._orphans)
        assert len(self.team.children("services")) == len(self.team.children("secrets")) == len(self._failures)
        assert "Traceback" not in operator.log(), operator.log()[-5000:]

    def _orphans(self) -> list[tuple[str, str]]:
        """Pods that live on although their job has ended; what has ended keeps its log."""
        phases = [(pod["metadata"]["name"], pod["status"]["phase"]) for pod in self.team.pods()]
        return [(name, phase) for name, phase in phases if phase not in ("Succeeded", "Failed")]

    def _pod_names(self) -> Iterator[str]:
        for job in self._list():
            name, uid = job["metadata"]["name"], job["metadata"]["uid"]
            for attempt in range(1, _end(self._failures[name])["attempt"] + 1):
                yield from (f"{name}-{uid[:5]}-worker-{index}-a{attempt}" for index in range(WORKERS))

    def _list(self) -> list[Raw]:
        answer = self.team.api.ask("GET", JOBS.format(self.team.namespace))
        items: list[Raw] = answer.json()["items"] if answer.status == 200 else []
        return items

    def _why(self) -> object:
        return {name: status for name, status in self.statuses().items() if not _ended(status)}


def _ended(status: Raw) -> bool:
    return any(entry["type"] == "Finished" and entry["status"] == "True" for entry in status.get("conditions", ()))


def _end(failures: int) -> Raw:
    return {
        "phase": "Failed" if failures == 2 else "Succeeded",
        "restarts": min(failures, 1),
        "attempt": min(failures, 1) + 1,
        "attempts": min(failures, 1) + 1,
    }


def _came_to(status: Raw) -> Raw:
    return {
        "phase": status.get("phase"),
        "restarts": status.get("restarts"),
        "attempt": status.get("attempt"),
        "attempts": len(status.get("attempts", ())),
    }
