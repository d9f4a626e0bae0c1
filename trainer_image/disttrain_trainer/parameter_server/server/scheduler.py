"""Task assignment: a global batch is split into parts, and each worker gets one part at a time. Pure; times are
arguments.

    ask -> (assigned a part | must wait | told to hold, to stop or that all is done) -> complete -> ask -> …

A part whose worker dies, falls silent or leaves is assigned to another one, and counts once however often it is
completed, so that every sample is used exactly once per epoch (leases: Gray and Cheriton, SOSP 1989). The
synchronization decides which worker may be assigned which part:

    Sync              no part of a step before all parts of the step before are complete (bulk-synchronous)
    Async             the next part, whoever asks
    BoundedStaleness  as Async, but nobody may have completed more than s parts more than the slowest live worker
                      (stale synchronous parallel: Ho et al., "More Effective Distributed ML via a Stale Synchronous
                      Parallel Parameter Server", NIPS 2013)

The worker of rank 0 leads: before the step that it has named nothing is assigned until it has done there what it does
alone, for example a checkpoint. Nothing is under way then, so it sees the parameters of exactly that step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from disttrain_api.parallelism import Synchronization
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.parameter_server.protocol.progress import TaskProgress
from disttrain_trainer.parameter_server.protocol.tasks import LEADER, CompleteStep, Result, Task, Verdict


@dataclass(frozen=True)
class Assignment:
    """An assigned task."""

    task: Task
    cursor: Cursor
    complete: int
    """Tasks completed since the start; every server has taken them in."""
    ahead: int
    """Parts that the worker has completed more than the slowest live one."""


@dataclass
class _Step:
    cursor: Cursor
    waiting: list[int]
    assigned: dict[int, int] = field(default_factory=dict)
    """Worker of each part that is assigned."""
    done: set[int] = field(default_factory=set)
    assignees: set[int] = field(default_factory=set)
    """Workers that have been assigned a part of it."""
    results: dict[int, Result] = field(default_factory=dict)


class TaskScheduler:
    """The tasks of a job. `heartbeat_timeout`: seconds after which a silent worker counts as dead."""

    def __init__(
        self, workers: int, steps: int, synchronization: Synchronization, staleness: int, heartbeat_timeout: float
    ) -> None:
        self.workers, self.steps = workers, steps
        self._synchronization, self._staleness, self._heartbeat_timeout = synchronization, staleness, heartbeat_timeout
        self._sampler: Sampler | None = None
        self._open: dict[int, _Step] = {}
        self._next, self._cursor = 0, Cursor()
        self._begun = 0
        self._acknowledged = 0
        self._hold_at = 0
        self._held = False
        self._complete = 0
        self.floor = 0
        self.cursor = Cursor()
        """Where the data stands after the steps below `floor`."""
        self.skipped = 0
        """Tasks below it of which no update was made, in all attempts."""
        self.stopping = False
        self._everyone_stops = False
        self._leaving: set[int] = set()
        """Workers that were told to stop."""
        self._seen: dict[int, float] = {}
        self._extended: set[int] = set()
        """Workers whose timeout was extended since they were seen last."""
        self._clocks: dict[int, int] = dict.fromkeys(range(workers), 0)
        self._asking: list[int] = []
        self._unacknowledged: dict[int, dict[int, Result]] = {}
        """What is known of each part of the complete steps that the leader has not acknowledged."""

    @property
    def results(self) -> list[CompleteStep]:
        """Complete steps that the leader has not acknowledged."""
        return [
            _sum(step, [parts[part] for part in sorted(parts)]) for step, parts in sorted(self._unacknowledged.items())
        ]

    @property
    def started(self) -> bool:
        return self._sampler is not None

    def start(self, sampler: Sampler, step: int, cursor: Cursor, hold_at: int, now: float, skipped: int = 0) -> None:
        """Begin with this step. Every worker counts as alive until it has been silent for long enough."""
        self._sampler, self.skipped = sampler, skipped
        self._next = self.floor = self._begun = self._acknowledged = step
        self._cursor = self.cursor = cursor
        self._hold_at = hold_at
        self._seen = dict.fromkeys(range(self.workers), now) | self._seen

    def resume(self, sampler: Sampler, known: TaskProgress, workers: Iterable[int], now: float) -> None:
        """Resume from the knowledge of a former manager's workers. `workers`: those that are alive."""
        self.start(sampler, known.floor, known.cursor, known.hold_at, now, known.skipped)
        self._begun, self._acknowledged = known.begun, known.acknowledged
        self._seen = dict.fromkeys(workers, now)
        self._clocks |= known.clocks
        self._complete = (known.floor - known.begun) * self.workers
        for task, result in sorted(known.done.items()):
            self.mark_complete(task, result)
        if self.stopping:
            self._hold_at = min(self._hold_at, self._next)

    def known(self) -> TaskProgress:
        """Return what a restarted manager must know."""
        steps = {**self._unacknowledged, **{number: step.results for number, step in self._open.items()}}
        done = {Task(number, part): result for number, parts in steps.items() for part, result in parts.items()}
        return self._known(done, self._clocks)

    def known_to(self, worker: int) -> TaskProgress:
        """Return the part of `known` for a worker, which remembers its own completed tasks."""
        return self._known({}, {worker: self._clocks[worker]})

    def _known(self, done: dict[Task, Result], clocks: dict[int, int]) -> TaskProgress:
        return TaskProgress(
            self._begun, self.floor, self.cursor, self._hold_at, self._acknowledged, done, dict(clocks), self.skipped
        )

    def mark_complete(self, task: Task, result: Result) -> bool:
        """Mark the task as complete, whichever worker has done it.

        Return False if that was known, or if the work has not begun.
        """
        if not self.started or not self._is_one(task):
            return False
        if self._acknowledged <= task.step < self.floor:
            # That the step is complete a former manager knew, and perhaps nobody yet what came of this part.
            self._unacknowledged.setdefault(task.step, {}).setdefault(task.part, result)
        while task.step >= self._next:
            self._open_step()
        step = self._open.get(task.step)
        if step is None or task.part in step.done:
            return False
        step.assigned.pop(task.part, None)
        step.waiting = [part for part in step.waiting if part != task.part]
        step.done.add(task.part)
        step.results[task.part] = result
        self._complete += 1
        self._close_steps()
        return True

    def assign_again(self, worker: int, task: Task) -> None:
        """The worker has been at the task since before this manager began; or another is since then."""
        if not self._is_one(task):
            return
        while task.step >= self._next:
            self._open_step()
        step = self._open.get(task.step)
        if step is not None and task.part in step.waiting:
            step.waiting.remove(task.part)
            step.assigned[task.part] = worker
            step.assignees.add(worker)

    def merge(self, known: TaskProgress) -> None:
        """Add what a worker knows; it may be new to a manager that has begun without that worker."""
        self.acknowledge(known.acknowledged)
        for task, result in sorted(known.done.items()):
            self.mark_complete(task, result)
        for worker, clock in known.clocks.items():
            self._clocks[worker] = max(self._clocks.get(worker, 0), clock)
        if not self._held and not self.stopping:
            self._hold_at = max(self._hold_at, known.hold_at)

    def acknowledge(self, step: int) -> None:
        """The leader has the results of the steps below."""
        self._acknowledged = max(self._acknowledged, step)
        self._unacknowledged = {
            number: parts for number, parts in self._unacknowledged.items() if number >= self._acknowledged
        }

    def join(self, worker: int, now: float) -> None:
        """A worker begins, perhaps again: the tasks of its former instance become free."""
        self.leave(worker)
        self.saw(worker, now)
        self._leaving.discard(worker)
        if worker == LEADER:
            # Whatever it was held for died with its former instance, or was done before that was stopped.
            self._held, self.stopping = False, self._everyone_stops

    def saw(self, worker: int, now: float) -> None:
        """A sign of life. Who comes back from the dead does not hold up the others: its clock is the slowest one's."""
        if worker not in self._seen:
            self._clocks[worker] = max(self._clocks[worker], min(self.live_clocks.values(), default=0))
        self._seen[worker] = now
        self._extended.discard(worker)

    def leave(self, worker: int) -> None:
        """The worker is gone; its tasks become free."""
        self._seen.pop(worker, None)
        self._asking = [other for other in self._asking if other != worker]
        self._return(worker)
        for step in self._open.values():
            step.assignees.discard(worker)

    def _return(self, worker: int) -> None:
        for step in self._open.values():
            for part in [part for part, holder in step.assigned.items() if holder == worker]:
                del step.assigned[part]
                step.waiting = sorted([*step.waiting, part])

    def extend_timeouts(self, seconds: float, now: float) -> None:
        """No message could arrive for a while: late workers get so many seconds, once until their next message."""
        earliest = now - self._heartbeat_timeout + seconds
        for worker, seen in self._seen.items():
            if seen < earliest and worker not in self._extended:
                self._extended.add(worker)
                self._seen[worker] = earliest

    def expire(self, now: float) -> list[int]:
        """The workers that have been silent for too long; they count as gone from now on."""
        silent = [worker for worker, seen in self._seen.items() if now - seen > self._heartbeat_timeout]
        for worker in silent if self.started else ():
            self.leave(worker)
        return silent if self.started else []

    def ask(self, worker: int, now: float) -> None:
        """The worker wants a task; `answers` gives it, now or later. Who asks holds nothing."""
        self.saw(worker, now)
        self._return(worker)
        if worker == LEADER:
            self._held = False
        if worker not in self._asking:
            self._asking.append(worker)

    def complete(self, worker: int, task: Task, result: Result, clock: int | None = None) -> bool:
        """Every server has what the worker pushed for the task; `result`: its loss, weight and samples.

        `clock`: parts that the worker has completed with it; None: one more. False where it had been completed before.
        """
        fresh = self.mark_complete(task, result)
        self._clocks[worker] = max(self._clocks[worker], self._clocks[worker] + fresh if clock is None else clock)
        return fresh

    def release(self, hold_at: int) -> None:
        """The leader has done its work; the next is before step `hold_at`."""
        self._hold_at, self._held = hold_at, False
        if self.stopping:
            self._hold_at = min(self._hold_at, self._next)

    def stop(self, worker: int | None = None) -> None:
        """The worker must stop; None: the whole job.

        The leader stops at the next step that nobody has begun, and the others wait for its return, unless the job is
        stopped. Another worker leaves when it asks next.
        """
        if worker is not None and worker != LEADER:
            self._leaving.add(worker)
            return
        self.stopping = True
        self._everyone_stops = self._everyone_stops or worker is None
        self._hold_at = min(self._hold_at, self._next)

    @property
    def live_clocks(self) -> dict[int, int]:
        """Parts that each live worker has completed."""
        return {worker: self._clocks[worker] for worker in sorted(self._seen)}

    def answers(self) -> list[tuple[int, Assignment | Verdict]]:
        """Return the answers that are possible now; each request is answered once."""
        found: list[tuple[int, Assignment | Verdict]] = []
        for worker in list(self._asking) if self.started else ():
            answer = self._verdict(worker) or self._assign(worker)
            if answer is not None:
                self._asking.remove(worker)
                found.append((worker, answer))
        return found

    def _verdict(self, worker: int) -> Verdict | None:
        if worker == LEADER and self.floor >= self._hold_at and not self._held:
            self._held = True
            return Verdict.HOLD
        if self.floor >= self.steps:
            return Verdict.DONE
        leaves = worker in self._leaving or (self._everyone_stops and self.floor >= self._hold_at)
        return Verdict.STOP if leaves and worker != LEADER else None

    def _assign(self, worker: int) -> Assignment | None:
        clocks = self.live_clocks
        ahead = clocks[worker] - min(clocks.values())
        if self._synchronization is Synchronization.BOUNDED_STALENESS and ahead > self._staleness:
            return None
        for number in (*sorted(self._open), None):
            step = self._open[number] if number is not None else self._begin_step()
            if step is not None and step.waiting and self._may_have(worker, step):
                number = self._next - 1 if number is None else number
                part = step.waiting.pop(0)
                step.assigned[part] = worker
                step.assignees.add(worker)
                return Assignment(Task(number, part), step.cursor, self._complete, ahead)
        return None

    def _may_have(self, worker: int, step: _Step) -> bool:
        """In Sync a second part of a step is for those alone whose peers cannot take it."""
        if self._synchronization is not Synchronization.SYNC or worker not in step.assignees:
            return True
        return len(step.waiting) > len(self._seen.keys() - step.assignees)

    def _begin_step(self) -> _Step | None:
        if self._next >= min(self._hold_at, self.steps):
            return None
        if self._synchronization is Synchronization.SYNC and self._open:
            return None
        return self._open_step()

    def _is_one(self, task: Task) -> bool:
        return task.step < self.steps and task.part < self.workers

    def _open_step(self) -> _Step:
        assert self._sampler is not None
        step = self._open[self._next] = _Step(self._cursor, list(range(self.workers)))
        self._next += 1
        self._cursor = self._sampler.advance(self._cursor)
        return step

    def _close_steps(self) -> None:
        assert self._sampler is not None
        while self.floor in self._open and len(self._open[self.floor].done) == self.workers:
            step = self._open.pop(self.floor)
            self.skipped += sum(result.in_row > 0 for result in step.results.values())
            if self.floor >= self._acknowledged:
                self._unacknowledged[self.floor] = step.results
            self.floor += 1
            self.cursor = self._sampler.advance(self.cursor)


def _sum(step: int, results: Iterable[Result]) -> CompleteStep:
    parts = list(results)
    loss, weight, samples, *_ = (sum(column) for column in zip(*parts, strict=True))
    worst = max(parts, key=lambda part: part.in_row)
    return CompleteStep(step, loss, weight, samples, sum(part.in_row > 0 for part in parts), worst.worker, worst.in_row)
