"""Pure: an old and a new status -> what happened between them, for the metrics."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime

from disttrain_api.goodput import by_state
from disttrain_api.status import Attempt, Goodput, JobStatus
from disttrain_operator.decide.clock import after
from disttrain_operator.decide.progress import roll_backs_between, skipped_between
from disttrain_operator.decide.stragglers import newly_named
from disttrain_operator.decide.suspicion import is_suspected, is_withdrawn

SINGLE_POD, IN_PLACE = "SinglePod", "InPlace"
"""Stand for the class of a cause after which one pod was made again, or all ranks started again in their pods."""
_MOST_AT_ONCE, _MOST_STEPS = 10, 10_000
"""Restarts in place, or roll-backs, and skipped steps between two looks: an agent may say any number."""
_MOST_MOVED = 7 * 86_400
"""Seconds: who may write statuses may write any number there."""


@dataclass(frozen=True)
class Restarted:
    """A restart, of the gang, of one pod or of the ranks in their pods, by the class of its cause."""

    class_: str


@dataclass(frozen=True)
class Ran:
    """All pods of an attempt run. Seconds since it began; since the attempt before it failed, where one did."""

    since_begin: float
    since_failure: float | None


@dataclass(frozen=True)
class Slowed:
    """A rank was named as slow."""


@dataclass(frozen=True)
class Suspected:
    """A rank was named that seems to hang, or the one that was goes on."""

    withdrawn: bool


@dataclass(frozen=True)
class Skipped:
    """Steps were skipped, and the job was rolled back so often."""

    steps: int
    roll_backs: int


@dataclass(frozen=True)
class Moved:
    """Seconds of the job's time that turned out to be another state's: more of it, or fewer. Together they are 0."""

    seconds: Mapping[str, int]


Happening = Restarted | Ran | Slowed | Suspected | Skipped | Moved


def happenings(old: JobStatus, new: JobStatus) -> Iterator[Happening]:
    """Return the events in the change from one status to the next."""
    if newly_named(old, new) is not None:
        yield Slowed()
    if is_suspected(old, new) or is_withdrawn(old, new):
        yield Suspected(withdrawn=is_withdrawn(old, new))
    skipped = Skipped(min(skipped_between(old, new), _MOST_STEPS), min(roll_backs_between(old, new), _MOST_AT_ONCE))
    if skipped.steps or skipped.roll_backs:
        yield skipped
    moved = _moved(old.goodput, new.goodput)
    if moved:
        yield Moved(moved)
    known = {attempt.number: attempt for attempt in old.attempts}
    for number, attempt in enumerate(new.attempts):
        before = known.get(attempt.number)
        if new.restarts > old.restarts and attempt.end_time and not (before and before.end_time):
            verdict = attempt.verdict
            yield Restarted(verdict.class_ if verdict is not None and verdict.class_ is not None else "Unknown")
        replaced = len(attempt.replacements) - (len(before.replacements) if before is not None else 0)
        yield from (Restarted(SINGLE_POD) for _ in range(replaced))
        in_place = (attempt.restarts_in_place or 0) - ((before.restarts_in_place or 0) if before is not None else 0)
        yield from (Restarted(IN_PLACE) for _ in range(min(in_place, _MOST_AT_ONCE)))
        if attempt.running_time and not (before and before.running_time):
            yield _ran(attempt, new.attempts[number - 1] if number else None)


def _moved(old: Goodput | None, new: Goodput | None) -> dict[str, int]:
    """Return the seconds by which states differ from what passed in the state that the job was in."""
    if old is None or new is None or old.state is None:
        return {}
    before, after_ = by_state(old), by_state(new)
    found = {state: after_.get(state, 0) - before.get(state, 0) for state in before.keys() | after_.keys()}
    found[old.state] = found.get(old.state, 0) - sum(found.values())
    moved = {state: seconds for state, seconds in found.items() if seconds}
    return moved if all(abs(seconds) <= _MOST_MOVED for seconds in moved.values()) else {}


def _ran(attempt: Attempt, previous: Attempt | None) -> Ran:
    assert attempt.running_time is not None
    running = after(attempt.running_time, 0)
    failed = previous is not None and previous.verdict is not None and previous.verdict.action is not None
    since = previous.end_time if previous is not None and failed else None
    return Ran(_seconds(attempt.start_time, running), _seconds(since, running) if since else None)


def _seconds(begin: str, end: datetime) -> float:
    return max(0.0, (end - after(begin, 0)).total_seconds())


class PhaseClock:
    """How many seconds all jobs have spent in each phase, or state, while it runs. Exact between looks, whatever their
    rhythm. It does not run at first."""

    def __init__(self) -> None:
        self._now: dict[str, tuple[str, float]] = {}
        self._done: dict[str, float] = {}
        self._runs = False

    def run(self, runs: bool, now: float) -> None:
        """Go on, or stand still."""
        self._done = self.seconds(now)
        self._now = {uid: (phase, now) for uid, (phase, _) in self._now.items()}
        self._runs = runs

    def see(self, uid: str, phase: str | None, now: float) -> None:
        """The job is in this phase; None: it is gone."""
        before = self._now.pop(uid, None)
        if before is not None and self._runs:
            self._done[before[0]] = self._done.get(before[0], 0.0) + max(0.0, now - before[1])
        if phase is not None:
            self._now[uid] = (phase, now)

    def counts(self) -> dict[str, int]:
        """Jobs in each phase."""
        counted: dict[str, int] = {}
        for phase, _ in self._now.values():
            counted[phase] = counted.get(phase, 0) + 1
        return counted

    def seconds(self, now: float) -> dict[str, float]:
        """Seconds in each phase until now."""
        total = dict(self._done)
        for phase, since in self._now.values() if self._runs else ():
            total[phase] = total.get(phase, 0.0) + max(0.0, now - since)
        return total
