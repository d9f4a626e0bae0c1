"""Which jobs are looked at again when an object changes."""

from dataclasses import dataclass

from disttrain_operator.history import History
from disttrain_operator.kube.cache import Raw
from disttrain_operator.metrics import Metrics
from disttrain_operator.queue import WorkQueue
from disttrain_operator.refused import Refused
from disttrain_operator.snapshot import Key, Listener


@dataclass(frozen=True)
class Wakeups(Listener):
    """Puts jobs into the queue when what is known of them changes."""

    queue: WorkQueue[Key]
    refused: Refused
    metrics: Metrics
    history: History | None = None

    def job_changed(self, key: Key, raw: Raw, *, gone: bool, quietly: bool = False) -> None:
        """Queue the job that changed, unless nothing has to be done for it."""
        self.metrics.saw_job(key.uid, raw["phase"], raw["state"], hangs=raw["hangs"] and not raw["rests"], gone=gone)
        if self.history is not None:
            self.history.job_changed(key, raw, gone=gone)
        if not quietly:
            self.queue.add(key)

    def enqueue(self, key: Key, *, urgent: bool = False) -> None:
        """Queue the job."""
        self.queue.add(key, urgent=urgent)

    def pod_gone(self, namespace: str) -> None:
        """Jobs of this namespace that were refused pods may try again."""
        self.queue.try_now(self.refused.freed(namespace))
