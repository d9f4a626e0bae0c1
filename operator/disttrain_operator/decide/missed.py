"""Which pods the others of their gang miss, though the cluster says that they run: their nodes may be dead, or their
processes be stopped.

Kubernetes says so of a node after most of a minute, and of processes never. Whether anything answers at the pod's
address is known much sooner; that alone is no loss, as the network between the operator and one node may be at fault.
"""

from collections.abc import Iterable

from disttrain_api.names import Role
from disttrain_operator.decide.cause import cause_of
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import PodFacts


def is_up(pod: PodFacts) -> bool:
    """Return whether its program runs, as far as the cluster knows, and nobody has it end."""
    return pod.program_started and pod.program_alive and not pod.deleting and pod.disruption is None


def missed(pods: Iterable[PodFacts], live: Live | None) -> tuple[PodFacts, ...]:
    """Return the workers of the newest attempt that are up and missed: an agent says that the ranks of all others wait
    for them, or all that have failed have lost a peer. Nobody is missed in an attempt in which no agent has answered:
    then the operator may hear none.

    live: the last answer of an agent of the job.
    """
    there = [pod for pod in pods if not pod.gone]
    newest = max((pod.attempt for pod in there), default=0)
    if live is None or live.attempt != newest:
        return ()
    gang = [pod for pod in there if pod.attempt == newest]
    failed = [pod for pod in gang if pod.program_failed]
    lost_a_peer = bool(failed) and all(cause_of(pod).symptom for pod in failed)
    known = live.awaited | live.missing | live.silent
    return tuple(pod for pod in gang if pod.role is Role.WORKER and is_up(pod) and (lost_a_peer or pod.index in known))
