"""Knowledge of the tasks, of a manager or of a worker that remembers what it received. Pure.

It only grows, and two who know something join it by taking more of both; so the order of reports does not count, nor
whether one comes twice (a join-semilattice: Shapiro et al., "Conflict-free Replicated Data Types", SSS 2011).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message, two_numbers


@dataclass(frozen=True)
class TaskProgress:
    """Knowledge of the tasks."""

    begun: int
    """The step with which the attempt began."""
    floor: int
    """Steps below it are complete."""
    cursor: Cursor
    """Where the data stands after those."""
    hold_at: int
    """Nothing of this step is assigned before the leader says so."""
    acknowledged: int
    """The leader has the results of the steps below it."""
    done: Mapping[Task, Result] = field(default_factory=dict)
    """Complete tasks of steps from `acknowledged` on."""
    clocks: Mapping[int, int] = field(default_factory=dict)
    """Tasks that a worker has completed."""
    skipped: int = 0
    """Tasks of the job below `floor` of which no update was made, in all attempts."""

    def join(self, other: TaskProgress) -> TaskProgress:
        """Return the joint knowledge of both."""
        ahead = max(self, other, key=lambda one: (one.floor, one.skipped))
        acknowledged = max(self.acknowledged, other.acknowledged)
        done = {
            task: max(one[task] for one in (self.done, other.done) if task in one)
            for task in self.done.keys() | other.done.keys()
            if task.step >= acknowledged
        }
        clocks = {
            worker: max(self.clocks.get(worker, 0), other.clocks.get(worker, 0))
            for worker in self.clocks.keys() | other.clocks.keys()
        }
        hold_at = max(self.hold_at, other.hold_at)
        return TaskProgress(self.begun, ahead.floor, ahead.cursor, hold_at, acknowledged, done, clocks, ahead.skipped)

    def fields(self) -> dict[str, Any]:
        """For a message. `told`, not `acknowledged`: the name in snapshots, which a newer image may have to read."""
        return {
            "begun": self.begun,
            "floor": self.floor,
            "epoch": self.cursor.epoch,
            "position": self.cursor.position,
            "hold_at": self.hold_at,
            "told": self.acknowledged,
            "done": [[*task, *result] for task, result in sorted(self.done.items())],
            "clocks": [list(pair) for pair in sorted(self.clocks.items())],
            "skipped": self.skipped,
        }


def progress_of(fields: object) -> TaskProgress:
    """The opposite of `TaskProgress.fields`. Raises Malformed."""
    if not isinstance(fields, Mapping):
        raise Malformed(f"what is known is {fields!r:.40}, expected an object")
    message = Message("report", fields)
    rows, clocks = fields.get("done"), fields.get("clocks")
    if not isinstance(rows, list) or not isinstance(clocks, list):
        raise Malformed("a report lacks its lists of tasks and clocks")
    done: dict[Task, Result] = {}
    for row in rows:
        if not isinstance(row, list):
            raise Malformed(f"a task of a report is {row!r:.40}, expected a list")
        entry = Message("report", {"task": row[:2], **dict(zip(Result._fields, row[2:], strict=False))})
        task = Task(*two_numbers(entry.numbers("task")))
        done[task] = result_of(entry)
    pairs = [two_numbers(Message("report", {"clock": pair}).numbers("clock")) for pair in clocks]
    at = Cursor(message.number("epoch"), message.number("position"))
    begun, floor, hold_at, acknowledged = (message.number(name) for name in ("begun", "floor", "hold_at", "told"))
    skipped = message.number("skipped") if "skipped" in fields else 0
    return TaskProgress(begun, floor, at, hold_at, acknowledged, done, dict(pairs), skipped)


def result_of(message: Message) -> Result:
    """Return the result of a task that a message holds. Raises Malformed.

    An image of a former version says nothing of skipped tasks.
    """
    loss, weight, samples = (message.real(name) for name in ("loss", "weight", "samples"))
    worker, in_row = (message.number(name) if name in message.fields else 0 for name in ("worker", "in_row"))
    return Result(loss, weight, samples, worker, in_row)
