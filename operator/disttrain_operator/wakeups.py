"""Which jobs are looked at again when an object changes."""

from dataclasses import dataclass

from disttrain_operator.kube.cache import Raw
from disttrain_operator.metrics import Metrics
from disttrain_operator.queue import WorkQueue
from disttrain_operator.refused import Refused
from disttrain_operator.snapshot import Key, World


def wake(world: World, queue: WorkQueue[Key], uid: str) -> None:
    """Queue the job of this uid, if it is known."""
    key = world.key_of(uid)
    if key is not None:
        queue.add(key)


@dataclass(frozen=True)
class Wakeups:
    """What the caches of jobs and their children call when an object of theirs changes."""

    world: World
    queue: WorkQueue[Key]
    refused: Refused
    metrics: Metrics

    def job_changed(self, uid: str, raw: Raw) -> None:
        """Queue the job that changed."""
        gone = self.world.jobs.get(uid) is None
        self.metrics.saw_job(uid, raw["phase"], raw["state"], gone=gone)
        self.queue.add(Key(raw["metadata"]["namespace"], raw["metadata"]["name"], uid))

    def child_changed(self, group: str, raw: Raw) -> None:
        """Queue the job that owns the child."""
        owner = self.world.owner(group)
        if owner is not None:
            self.queue.add(owner)

    def pod_changed(self, group: str, raw: Raw) -> None:
        """Queue the pod's job; where the pod is gone, jobs of its namespace that were refused pods may try again."""
        self.child_changed(group, raw)
        if self.world.pods.get(raw["metadata"]["uid"]) is None:
            self.refused.freed(raw["metadata"]["namespace"])
