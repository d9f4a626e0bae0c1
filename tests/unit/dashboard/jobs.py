"""Jobs of the dashboard's tests, and a source of them."""

from collections.abc import Sequence
from typing import Any

from disttrain_dashboard.source import Job, Listing, Rank, Seen, SourceError, UnknownJobError
from tests.builders import a_raw_job

TIME = "2026-01-01T12:00:00Z"
EVIL = "<img src=x onerror=alert(1)>\x1b[2J\u202e\x00\ud800</script>"


def a_status(**changes: Any) -> dict[str, Any]:
    """The status of a job that runs."""
    return {
        "phase": "Running",
        "attempt": 1,
        "worldSize": 2,
        "mesh": "dp2",
        "ready": "2/2",
        "progress": {"step": 30, "totalSteps": 100, "loss": 0.5, "samplesPerSecond": 7.0, "updateTime": TIME},
        "goodput": {
            "since": TIME, "updateTime": TIME, "state": "Training", "percent": 80,
            "spent": [{"state": "Starting", "seconds": 20}, {"state": "Training", "seconds": 80}],
        },
        "attempts": [{"number": 1, "startTime": TIME, "runningTime": TIME}],
        **changes,
    }  # fmt: skip


def a_dashboard_job(name: str = "digits", key: str | None = None, **status: Any) -> Job:
    """A job that runs; `status` is laid over its status."""
    raw = a_raw_job(name, status=a_status(**status))
    raw["metadata"]["creationTimestamp"] = TIME
    return Job(key or f"default/{name}", raw)


class Jobs:
    """A source that answers with what it was given, and counts how often it was asked."""

    title = "Jobs of a test"

    def __init__(self, *jobs: Job, seconds: float = 0.0) -> None:
        self.known = {job.key: job for job in jobs}
        self.lines = [f"line {number}" for number in range(1000)]
        self.ranks = {0: Rank("digits-worker-0", "node-a", "running", 30), 1: Rank("digits-worker-1", "", "waiting")}
        self.calls = 'Current thread 0x1\n  File "step.py", line 9 in step'
        self.panels: Sequence[dict[str, Any]] = ()
        self.asked: list[tuple[Any, ...]] = []
        self.seconds = seconds
        self.problem = ""

    def jobs(self) -> Listing:
        self._count("jobs")
        return Listing(list(self.known.values()))

    def job(self, key: str) -> Seen:
        self._count("job", key)
        return Seen(self._find(key), "it runs", ["Wait"], self.ranks, panels=self.panels)

    def log(self, key: str, rank: int, tail: int) -> Sequence[str]:
        self._count("log", key, rank, tail)
        self._find(key)
        return self.lines

    def stacks(self, key: str, rank: int) -> str:
        self._count("stacks", key, rank)
        self._find(key)
        return self.calls

    def _find(self, key: str) -> Job:
        if key not in self.known:
            raise UnknownJobError
        return self.known[key]

    def _count(self, *what: Any) -> None:
        self.asked.append(what)
        if self.problem:
            raise SourceError(self.problem)
