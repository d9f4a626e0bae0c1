"""A life of a pod's ranks, from their start to the end of the last one, and the times that it may take."""

import signal
from dataclasses import dataclass, field

from disttrain_agent.gang.messages import PodFailure
from disttrain_agent.memory_kills import memory_kills
from disttrain_agent.reports import LOOK_SECONDS
from disttrain_agent.resolve import OWN_NAME_SECONDS
from disttrain_agent.restart import Kept
from disttrain_agent.verdict import RankEnd, first_cause
from disttrain_api.names import PERMANENT, REPLACEMENT_SECONDS, Reason
from disttrain_api.report import RankFailure


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    collect: float = 1.0
    """After the first failure: time in which the other ranks may fail by themselves, so that the cause is known."""
    peer_grace: float = 5.0
    """Then, between SIGTERM and SIGKILL: they are stuck in a collective and have nothing to save."""
    peer_cut: float = 0.5
    """And between SIGTERM and another one where a rank of another pod has failed: they no longer wait for it. Whoever
    has lost a peer ends by itself; a node that dies, or a rank that is stopped, leaves connections open."""
    kill_margin: float = 2.0
    """SIGKILL comes this long before the pod's grace period ends: after the trainer has given up by itself, and early
    enough for the agent to report."""
    own_name: float = OWN_NAME_SECONDS
    """The master's own name must have an address by then."""
    tear_down: float = 30.0
    """A rank that has reported its work done is killed when its process has not ended by then."""
    report: float = LOOK_SECONDS
    """Between two looks at the ranks' reports."""
    orphans: float = 0.02
    """Between two looks for what ranks have left behind."""
    gang: float = 60.0
    """After the first failure of a gang: until then all pods must have ended their ranks, or none starts again."""
    replacement: float = 1.5 * REPLACEMENT_SECONDS
    """After the first failure of a gang: until then lost pods must have replacements, or no rank starts again. The
    operator gives up before, unless it is away."""
    imports: float = 60.0
    """The zygote of a replacement has imported by then, or its ranks start as programs."""
    unmoved: float = 240.0
    """After the loss of worker 0's agent: until then its name must lead elsewhere than before, or the pod ends. A node
    that dies is noticed before, and the pod on it is gone."""

    def kill_after(self, grace: float) -> float:
        """Return when ranks that were asked to end are killed, counted from the begin of the pod's grace period."""
        return max(grace - self.kill_margin, grace / 2)


@dataclass
class Life:
    """What has become of the ranks since they were started."""

    memory_kills: int | None = None
    """How many processes of the pod the kernel had killed for memory before these ranks were started."""
    ends: list[RankEnd] = field(default_factory=list)
    failed_at: float | None = None
    stopping: bool = False
    """They were sent SIGTERM."""
    cut_at: float | None = None
    """When to send it again."""
    kill_at: float | None = None
    done_since: float | None = None
    hung: bool = False
    """The order to kill ranks of this gang, which hangs, has been followed."""
    stopped_by_gang: bool = False
    """They were sent SIGTERM because ranks of another pod had failed."""

    @property
    def failed(self) -> list[RankEnd]:
        return [end for end in self.ends if not end.succeeded]

    @property
    def ended_for_gang(self) -> bool:
        """Whether ranks were stopped for another pod's, and none had failed by itself."""
        cause = first_cause(self.ends)
        return self.stopped_by_gang and cause is not None and cause.signaled and cause.code not in PERMANENT

    def pod_failure(self, kept: Kept) -> PodFailure | None:
        """How they have failed, for the gang; None: they have not. kept: what they have reported.

        A rank that was stopped is the cause only where none has failed by itself.
        """
        cause = first_cause(self.ends)
        if cause is None:
            return None
        if cause.signaled and cause.code not in PERMANENT:
            cause = first_cause([end for end in self.ends if not end.signaled]) or cause
        return PodFailure(
            cause=self.failure_of(cause).model_copy(update={"log_tail": None}),
            signaled=cause.signaled,
            checkpoint=kept.checkpoint,
            began=kept.began,
        )

    def failure_of(self, end: RankEnd) -> RankFailure:
        """Return how a rank has failed, with what the kernel tells of the pod's memory."""
        killed, now, failure = self.memory_kills, memory_kills(), end.as_failure()
        if killed is None or now is None:
            return failure
        changes: dict[str, bool | str] = {"out_of_memory": now > killed}
        if now > killed and failure.signal == signal.SIGKILL and not end.signaled:
            changes["reason"] = Reason.OOM_KILLED
        return failure.model_copy(update=changes)
