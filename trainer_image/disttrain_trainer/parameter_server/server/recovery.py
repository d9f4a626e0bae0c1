"""How a manager that was started anew finds out what its former life knew: from what each worker remembers, and from
the last snapshot. Pure.

A task that nobody remembers to be complete is lent again; servers that have it take it in no second time.
"""

from __future__ import annotations

from disttrain_trainer.parameter_server.protocol.progress import TaskProgress
from disttrain_trainer.parameter_server.protocol.tasks import Task


class Recovery:
    """What a manager that was started anew has gathered so far. It lends nothing before it is `over`."""

    def __init__(self, workers: int, silence: float, known: TaskProgress | None) -> None:
        """`silence`: seconds after which a worker that has not reported counts as dead. `known`: from the snapshot."""
        self.known = known
        self.lent: dict[int, Task] = {}
        self.heard: set[int] = set()
        self._workers, self._silence = workers, silence
        self._since: float | None = None

    def hear(self, worker: int, known: TaskProgress | None, lent: Task | None, now: float) -> None:
        """A worker has reported, or begins and knows nothing."""
        self.heard.add(worker)
        self.lent.pop(worker, None)
        if lent is not None:
            self.lent[worker] = lent
        if known is not None:
            self.known = known if self.known is None else self.known.join(known)
        self._since = now if self._since is None else self._since

    def over(self, now: float) -> bool:
        """Whether all have been heard, or all that live: the others have had their time since the first one."""
        if self._since is None:
            return False
        return len(self.heard) == self._workers or now - self._since > self._silence
