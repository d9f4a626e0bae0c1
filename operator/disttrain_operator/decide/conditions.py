"""A transition -> the whole status: conditions, phase, counts, columns. Derived in one place, never remembered."""

from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import datetime

from disttrain_api.bounds import MAX_MESSAGE_BYTES, MAX_REASON_LENGTH, cut
from disttrain_api.errors import LayoutError
from disttrain_api.names import Reason, Role
from disttrain_api.spec import JobSpec
from disttrain_api.status import Condition, ConditionType, JobStatus, Phase, ReplicaStatus
from disttrain_operator.decide.attempt_history import ended_by, ran
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decision import State, Transition
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.observed import Job, Observed
from disttrain_operator.decide.waiting import USUAL_REASONS
from disttrain_operator.plan.environment import job_mesh

_PHASES = {
    State.STARTING: Phase.STARTING,
    State.RESTARTING: Phase.RESTARTING,
    State.RUNNING: Phase.RUNNING,
    State.SUSPENDING: Phase.SUSPENDING,
    State.SUSPENDED: Phase.SUSPENDED,
    State.COMPLETE: Phase.SUCCEEDED,
    State.FAILED: Phase.FAILED,
}
_RANKS = {
    ConditionType.STRAGGLING: (Reason.RANK_SLOW, Reason.NOT_STRAGGLING, "no rank is known to be slow"),
    ConditionType.HANG_SUSPECTED: (Reason.HANG_SUSPECTED, Reason.NOT_HANGING, "no rank is known to hang"),
}
"""Conditions of a rank: the reason while there is one, and reason and message while there is none."""
_OUR_TYPES, _OUR_ROLES = frozenset(ConditionType), frozenset(Role)
_KEPT_OF_OTHERS = 32


def condition(status: JobStatus, type_: ConditionType) -> Condition | None:
    """The condition of that type."""
    return next((entry for entry in status.conditions if entry.type == type_), None)


def derive(
    job: Job, gang: Gang | None, transition: Transition, now: datetime, named: Mapping[ConditionType, str] | None = None
) -> JobStatus:
    """The whole status that the transition leads to. `gang`: of its status; None where the spec cannot be read.

    named: sentences on a rank that is slow, and one that seems to hang, while the job runs; those of which there are.
    """
    changes: dict[str, object] = {
        "conditions": [*_conditions(job, transition, named or {}, now), *_of_others(job.status)],
        "phase": _phase(transition),
        "observed_generation": job.generation,
    }
    if gang is not None:
        changes |= {"world_size": gang.spec.world_size, "mesh": _mesh(gang.spec)}
        if not _has_reason(job.status, transition):
            changes |= _counts(job.status, gang)
    return transition.status.model_copy(update=changes)


def _phase(transition: Transition) -> Phase:
    waits = transition.state is State.STARTING and transition.reason not in USUAL_REASONS
    return Phase.PENDING if waits else _PHASES[transition.state]


def _has_reason(status: JobStatus, transition: Transition) -> bool:
    """Counts alone are no news: a job of N pods would else cost N writes whenever its pods come or go."""
    running = condition(status, ConditionType.RUNNING)
    new = cut(transition.reason, MAX_REASON_LENGTH), cut(transition.message, MAX_MESSAGE_BYTES)
    return running is not None and (running.reason, running.message) == new


def settle_counts(status: JobStatus) -> JobStatus:
    """The status of a job none of whose pods is alive: none is active, what they came to stays."""
    if not any(count.active for count in status.replica_statuses):
        return status
    counts = [count.model_copy(update={"active": 0, "ready": 0}) for count in status.replica_statuses]
    return status.model_copy(update={"replica_statuses": counts})


def _conditions(
    job: Job, transition: Transition, named: Mapping[ConditionType, str], now: datetime
) -> Iterator[Condition]:
    state = transition.state
    word, sentence = transition.reason, transition.message
    not_finished = (Reason.NOT_FINISHED, "the job has not finished")
    answers: dict[ConditionType, tuple[bool, str, str]] = {
        ConditionType.RUNNING: (state is State.RUNNING, word, sentence),
        ConditionType.SUSPENDED: (
            state is State.SUSPENDED,
            *(
                (word, sentence)
                if state in (State.SUSPENDED, State.SUSPENDING)
                else (Reason.NOT_SUSPENDED, "the job is not suspended")
            ),
        ),
        ConditionType.RESTARTING: (state is State.RESTARTING, *_restarting(transition)),
        ConditionType.COMPLETE: (
            state is State.COMPLETE,
            *((word, sentence) if state is State.COMPLETE else not_finished),
        ),
        ConditionType.FAILED: (state is State.FAILED, *((word, sentence) if state is State.FAILED else not_finished)),
        ConditionType.FINISHED: (
            state in (State.COMPLETE, State.FAILED),
            *((word, sentence) if state in (State.COMPLETE, State.FAILED) else not_finished),
        ),
    }
    for type_, (there_is, there_is_none, nobody) in _RANKS.items():
        rank = named.get(type_) if state is State.RUNNING else None
        answers[type_] = (False, there_is_none, nobody) if rank is None else (True, there_is, rank)
    known = {entry.type: entry for entry in reversed(job.status.conditions)}
    for type_, (holds, reason, message) in answers.items():
        yield _condition(known.get(type_), job.generation, type_, holds, reason, message, now)


def _of_others(status: JobStatus) -> list[Condition]:
    """Conditions of types that this version does not know."""
    return [entry for entry in status.conditions if entry.type not in _OUR_TYPES][:_KEPT_OF_OTHERS]


def _restarting(transition: Transition) -> tuple[str, str]:
    if transition.state is not State.RESTARTING:
        return Reason.NOT_RESTARTING, "the job is not restarting"
    # A job that waits for one pod restarts, too, within an attempt.
    verdict = None if ran(transition.status) else ended_by(transition.status)
    return (Reason.GANG_RESTARTED, verdict.message) if verdict else (transition.reason, transition.message)


def _condition(
    old: Condition | None, generation: int, type_: str, holds: bool, reason: str, message: str, now: datetime
) -> Condition:
    """The condition, which is the old one itself where that says the same: most do, each time."""
    status = "True" if holds else "False"
    word, sentence = cut(reason, MAX_REASON_LENGTH), cut(message, MAX_MESSAGE_BYTES)
    same = old is not None and old.status == status
    if old is not None and same and (old.reason, old.message, old.observed_generation) == (word, sentence, generation):
        return old
    return Condition(
        type=type_,
        status=status,
        reason=word,
        message=sentence,
        last_transition_time=old.last_transition_time if old is not None and same else timestamp(now),
        observed_generation=generation,
    )


def _mesh(spec: JobSpec) -> str | None:
    try:
        return job_mesh(spec).describe()
    except LayoutError:
        return None


def _counts(status: JobStatus, gang: Gang) -> dict[str, object]:
    wanted = Counter(role for role, _ in gang.members)
    succeeded = Counter(role for role, _ in gang.succeeded)
    counts = [_count(gang.observed, role, gang.attempt, succeeded[role]) for role in wanted]
    worker = counts[0]
    others = [entry for entry in status.replica_statuses if entry.role not in _OUR_ROLES][:_KEPT_OF_OTHERS]
    return {
        "replica_statuses": [*counts, *others],
        "ready": f"{worker.ready}/{wanted[Role.WORKER]}",
    }


def _count(observed: Observed, role: Role, attempt: int, succeeded: int) -> ReplicaStatus:
    pods = [pod for pod in observed.pods if pod.role is role and pod.attempt == attempt and not pod.gone]
    return ReplicaStatus(
        role=role,
        active=sum(pod.program_alive for pod in pods),
        ready=sum(pod.program_alive and pod.program_started and pod.awaits_address is None for pod in pods),
        succeeded=succeeded,
        failed=sum(pod.program_failed for pod in pods),
    )
