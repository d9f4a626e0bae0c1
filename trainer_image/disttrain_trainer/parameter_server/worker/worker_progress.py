"""What one worker remembers of the tasks, for a manager that was started anew and has forgotten."""

from __future__ import annotations

import threading
from typing import Any

from disttrain_trainer.parameter_server.protocol.progress import TaskProgress, progress_of
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task
from disttrain_trainer.parameter_server.protocol.wire import Message, two_numbers


class WorkerProgress:
    """Progress as one worker knows it, for a manager that loses its own. The heartbeat's thread reads it."""

    def __init__(self, worker: int, instance: str) -> None:
        self._fields = {"worker": worker, "instance": instance}
        self._worker = worker
        self._lock = threading.Lock()
        self._known: TaskProgress | None = None
        self._assigned: Task | None = None
        self.samples: int | None = None
        """Training samples; None before the worker has said so."""

    def completed(self, task: Task, result: Result) -> int:
        """Every server has what was pushed for the task. Returns how many the worker has completed."""
        with self._lock:
            assert self._known is not None
            clock = self._known.clocks.get(self._worker, 0) + 1
            self._assigned, self._known = None, self._joined(done={task: result}, clocks={self._worker: clock})
            return clock

    def answered(self, message: Message) -> None:
        """The manager has answered a question for work. Raises Malformed."""
        found = progress_of(message.fields.get("known"))
        with self._lock:
            self._assigned = Task(*two_numbers(message.numbers("task"))) if message.kind == "task" else None
            self._known = found if self._known is None else self._known.join(found)

    def started(self, known: TaskProgress) -> None:
        """The leader has let the work begin."""
        with self._lock:
            self._known = known

    def acknowledge(self, hold_at: int | None) -> int:
        """The leader asks for work again, and says so; the step below which it has all results."""
        with self._lock:
            if self._known is None:
                return 0
            acknowledged = self._known.floor
            self._known = self._joined(acknowledged=acknowledged, **({} if hold_at is None else {"hold_at": hold_at}))
            return acknowledged

    def report(self) -> Message | None:
        """Return the report for the manager; None before the worker has introduced itself."""
        with self._lock:
            if self.samples is None:
                return None
            known = None if self._known is None else self._known.fields()
            assigned = None if self._assigned is None else list(self._assigned)
            return Message("report", {**self._fields, "samples": self.samples, "known": known, "assigned": assigned})

    def _joined(self, **changes: Any) -> TaskProgress:
        known = self._known
        assert known is not None
        same: dict[str, Any] = {
            "hold_at": known.hold_at, "acknowledged": known.acknowledged, "skipped": known.skipped,
        }  # fmt: skip
        return known.join(TaskProgress(known.begun, known.floor, known.cursor, **(same | changes)))
