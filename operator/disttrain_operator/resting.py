"""Jobs that wait for their turn, and what was decided on them last: until then a look would lead to the same again.

Where thousands wait they are woken all the time: by the writes of their own status, by times that have passed while
they waited for a worker, by times that are far away. None of that costs a decision.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from disttrain_operator.decide.decision import CreatePod, CreateSupport, Decision
from disttrain_operator.decide.observed import Job
from disttrain_operator.refused import Refused
from disttrain_operator.snapshot import Basis, Key, World


@dataclass(frozen=True, slots=True)
class _Rest:
    """A job that waits. Nothing of its spec and status is kept."""

    generation: int
    basis: Basis
    requeue_at: datetime | None


class Resting:
    """What was decided last on jobs that wait."""

    def __init__(self, world: World, refused: Refused, now: Callable[[], datetime]) -> None:
        self._world, self._refused, self._now = world, refused, now
        self._rests: dict[str, _Rest] = {}
        """By uid."""

    def note(self, job: Job, decision: Decision, before: Basis | None, written: str | None) -> None:
        """The job was refused something. `before`: what the decision rests on; `written`: the version of the job that
        has its status, None where that is the one which it was made from."""
        now = self._world.basis(job.uid)
        # A status that comes with creations alone says that the attempt has begun and why it waits.
        waits = all(isinstance(action, CreatePod | CreateSupport) for action in decision.actions)
        versions = {job.resource_version, written if waits else None}
        if before is not None and now is not None and now.problems == before.problems and now.version in versions:
            self._rests[job.uid] = _Rest(job.generation, now, decision.requeue_at)
        else:
            self.forget(job.uid)

    def seconds_left(self, key: Key) -> float:
        """How long the job need not be looked at; 0: it is its turn, or it may be another than it was."""
        rest = self._rests.get(key.uid)
        if rest is None or rest.basis != self._world.basis(key.uid):
            return 0.0
        if rest.requeue_at is None:
            return self._refused.seconds_left(key, rest.generation)
        due = (rest.requeue_at - self._now()).total_seconds()
        return min(due, self._refused.seconds_left(key, rest.generation)) if due > 0 else 0.0

    def forget(self, uid: str) -> None:
        """The job is gone, or has all it wants."""
        self._rests.pop(uid, None)
