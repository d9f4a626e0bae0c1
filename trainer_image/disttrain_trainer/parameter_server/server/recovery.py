"""Recovery of a restarted manager: from what each worker remembers, and from the last snapshot. Pure.

A task that nobody remembers as complete is assigned again; servers that have accepted it do not accept it twice.
"""

from __future__ import annotations

from disttrain_trainer.parameter_server.protocol.progress import TaskProgress
from disttrain_trainer.parameter_server.protocol.tasks import LEADER, Task


class Recovery:
    """What a restarted manager has gathered so far. It assigns no task before it is `over`."""

    def __init__(self, workers: int, heartbeat_timeout: float, known: TaskProgress | None) -> None:
        """`heartbeat_timeout`: seconds until a silent worker counts as dead. `known`: of the snapshot."""
        self.known = known
        self.assigned: dict[int, Task] = {}
        self.reported: set[int] = set()
        self._workers, self._heartbeat_timeout = workers, heartbeat_timeout
        self._since: float | None = None

    def add_report(self, worker: int, known: TaskProgress | None, assigned: Task | None, now: float) -> None:
        """A worker has reported, or begins and knows nothing."""
        self.reported.add(worker)
        self.assigned.pop(worker, None)
        if assigned is not None:
            self.assigned[worker] = assigned
        if known is not None:
            self.known = known if self.known is None else self.known.join(known)
        self._since = now if self._since is None else self._since

    def over(self, now: float) -> bool:
        """Return whether all have reported, or all that live: the others have had their time since the first one.

        Until somebody knows what was done, the leader is waited for: it alone knows whether the work has begun.
        """
        if self._since is None or (self.known is None and LEADER not in self.reported):
            return False
        return len(self.reported) == self._workers or now - self._since > self._heartbeat_timeout
