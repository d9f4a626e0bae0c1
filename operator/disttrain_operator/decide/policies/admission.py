"""`gangScheduler: Gate`: pods are held until all of them fit, let go together, and taken back if one finds no room.

What was let go stands on the pods themselves: they are the log, so a process that dies between two releases is
continued. What cannot be completed is taken back as a whole: no half gang keeps its room.
"""

from dataclasses import replace
from datetime import datetime, timedelta

from disttrain_api.names import Reason
from disttrain_api.run_policy import FailureAction
from disttrain_api.scheduling import GangScheduler
from disttrain_api.status import FailureClass, Verdict
from disttrain_operator.decide.attempt import bring_up, start_attempt, starting_deadline_at
from disttrain_operator.decide.attempt_history import end_attempt, in_attempt, mark_admitted, ran
from disttrain_operator.decide.clock import after, earliest, timestamp
from disttrain_operator.decide.decision import DeletePod, Event, ReleasePod, State, Transition
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.gang_actions import SURVIVOR_GRACE_SECONDS
from disttrain_operator.decide.observed import Admission, PodFacts
from disttrain_operator.decide.restarts import restart_or_fail
from disttrain_operator.decide.situation import Situation

# How long the scheduler may take for a pod that was let go. Somebody else may have been faster.
SCHEDULING_SECONDS = 30
REFUSED_SECONDS = 600
"""How long a gang that was let go may keep room that the scheduler does not give it. Others may need that."""
_LATER = timedelta(hours=1)

_GATE_OFF = (
    "`gangScheduler` Gate is switched off in this operator: set the chart's value `gangGate.enabled` (the operator must"
    " serve all namespaces), or choose another `gangScheduler` in `runPolicy.schedulingPolicy`"
)


def admission(situation: Situation) -> Transition | None:
    """From the first pod of a gated attempt to the moment when all of them run."""
    gated = situation.run_policy.scheduling_policy.gang_scheduler is GangScheduler.GATE
    if not gated or ran(situation.status):
        return None
    answer = situation.observed.admission
    if answer is None:
        return _gate_off(situation)
    if not in_attempt(situation.status) or situation.gang.all_started:
        return None
    waiting = _Waiting(situation, answer)
    return waiting.too_long() or waiting.incomplete() or waiting.overtaken() or waiting.refused() or waiting.go_on()


def _gate_off(situation: Situation) -> Transition | None:
    """A gang that was let go by another process may still come up."""
    gang = situation.gang
    if in_attempt(situation.status) and not gang.missing and not any(pod.gated for pod in gang.pods):
        return None
    verdict = Verdict(reason=Reason.GATE_OFF, message=_GATE_OFF)
    return finish(situation.status, situation.now, State.FAILED, verdict)


class _Waiting:
    """A gang that does not run yet, and what the gate says of it."""

    def __init__(self, situation: Situation, answer: Admission) -> None:
        self._situation = situation
        self._job, self._gang, self._answer, self._now = situation.job, situation.gang, answer, situation.now
        pods = [pod for pod in self._gang.pods if not pod.deleting]
        self._gated = [pod for pod in pods if pod.gated]
        self._released = [pod for pod in pods if not pod.gated and pod.released_at is not None]

    def too_long(self) -> Transition | None:
        """The job fails where no room was found in time."""
        at, seconds = self._timeout_at, self._timeout_seconds
        if at is None or self._now < at or self._answer.nodes:
            return None
        message = f"no room within timeoutSeconds ({seconds}) of schedulingPolicy: {self._answer.why or 'no reason'}"
        return finish(self._job.status, self._now, State.FAILED, Verdict(reason=Reason.NO_ROOM, message=message))

    def incomplete(self) -> Transition | None:
        """A part was let go and the rest finds no room any more: the whole gang waits again."""
        if not (self._gated and self._released and self._answer.why):
            return None
        verdict = Verdict(reason=Reason.ROOM_LOST, message=f"the gang lost its room: {self._answer.why}")
        status = end_attempt(self._job.status, self._now, verdict)
        event = Event(Reason.ROOM_LOST, f"{verdict.message}; all of its pods wait again", warning=True)
        return start_attempt(self._job, self._gang.observed, status, self._now, event)

    def overtaken(self) -> Transition | None:
        """Pods that were let go and whose room others have taken are made again behind the gate.

        Where the room is still there, the scheduler has reasons that the gate does not know and would meet again at
        once: they stand in the condition, and `refused` judges them.
        """
        late = [pod for pod in self._released if pod.uid in self._answer.lost and self._now >= _patience(pod)]
        if not late:
            return None
        first, others = late[0], f" (and {len(late) - 1} more)" if len(late) > 1 else ""
        why = first.waiting.message if first.waiting is not None else "the scheduler gives no reason"
        message = f"pod {first.name}{others} was released and not scheduled within {SCHEDULING_SECONDS} s: {why[:500]}"
        # Not by force: a pod that was bound a moment ago may run already. One without a node goes at once anyway.
        actions = tuple(DeletePod(pod.name, pod.uid, SURVIVOR_GRACE_SECONDS, message) for pod in late)
        transition = bring_up(self._gang, self._now, self._now + _LATER)
        event = Event(Reason.ROOM_LOST, message, warning=True)
        return replace(
            transition,
            reason=Reason.ROOM_LOST,
            message=message,
            actions=(*transition.actions, *actions),
            events=(event,),
        )

    def refused(self) -> Transition | None:
        """A gang of which the scheduler does not place a pod, whatever its reasons, gives its room back as a whole.

        It waits again behind all that came before now, after a pause that doubles: what the scheduler refuses may be
        so for ever, and the room is everybody's.
        """
        late = [pod for pod in self._released if pod.node is None and self._now >= _refused_at(pod)]
        deadline = self._starting_deadline
        if not late or self._gated or (deadline is not None and self._now >= deadline):
            return None
        first, others = late[0], f" (and {len(late) - 1} more)" if len(late) > 1 else ""
        why = first.waiting.message if first.waiting is not None else "the scheduler gives no reason"
        return restart_or_fail(
            self._situation,
            Verdict(
                reason=Reason.UNSCHEDULABLE,
                message=f"pod {first.name}{others} was released and not scheduled within {REFUSED_SECONDS} s, so the"
                f" gang releases its room: {why[:500]}",
                class_=FailureClass.NOT_STARTED,
                action=FailureAction.RESTART_WITHOUT_COUNTING,
            ),
        )

    def go_on(self) -> Transition | None:
        """Pods are made, wait, go, start. A start that takes too long is judged by the policy of all jobs."""
        deadline = self._starting_deadline
        if deadline is not None and self._now >= deadline:
            return None
        unplaced = [pod for pod in self._released if pod.node is None]
        patience = (at(pod) for at in (_patience, _refused_at) for pod in unplaced)
        times = earliest(deadline, self._timeout_at, *(at for at in patience if at > self._now))
        transition = bring_up(self._gang, self._now, times or self._now + _LATER)
        places = dict(self._answer.nodes)
        why = f"all pods of attempt {self._gang.attempt} fit"
        releases = tuple(
            ReleasePod(pod.name, pod.uid, places[pod.uid], timestamp(self._now), why)
            for pod in self._gated
            if pod.uid in places
        )
        transition = replace(transition, actions=(*transition.actions, *releases))
        return self._explained(transition) if self._gated and not releases and self._answer.why else transition

    def _explained(self, transition: Transition) -> Transition:
        """The reason that counts is the gate's, unless pods are missing."""
        if self._gang.missing or any(pod.pod_alive for pod in self._gang.old):
            return transition
        event = Event(Reason.WAITING_FOR_ROOM, self._answer.why)
        return replace(transition, reason=Reason.WAITING_FOR_ROOM, message=self._answer.why, events=(event,))

    @property
    def _timeout_seconds(self) -> int | None:
        return self._gang.spec.run_policy.scheduling_policy.timeout_seconds

    @property
    def _timeout_at(self) -> datetime | None:
        if self._timeout_seconds is None or not self._gated or self._released:
            return None
        return after(self._job.status.attempts[-1].start_time, self._timeout_seconds)

    @property
    def _starting_deadline(self) -> datetime | None:
        """From the release on; before it only for pods that cannot be created."""
        if self._gang.missing and self._gang.observed.problems:
            return starting_deadline_at(self._job, self._job.status)
        if self._gated or self._gang.missing or not self._released:
            return None
        released = min(pod.released_at for pod in self._released if pod.released_at is not None)
        return starting_deadline_at(self._job, mark_admitted(self._job.status, released))


def _refused_at(pod: PodFacts) -> datetime:
    """When a gang one of whose pods no node has taken gives its room back."""
    assert pod.released_at is not None
    return pod.released_at + timedelta(seconds=REFUSED_SECONDS)


def _patience(pod: PodFacts) -> datetime:
    """When a pod that no node has taken is taken back."""
    assert pod.released_at is not None
    return pod.released_at + timedelta(seconds=SCHEDULING_SECONDS)
