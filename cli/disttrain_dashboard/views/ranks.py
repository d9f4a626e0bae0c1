"""The mesh as a grid of ranks: a spec, a world size and what is known of ranks -> JSON. Pure."""

from collections.abc import Iterable, Mapping
from typing import Any

from disttrain_api.errors import LayoutError
from disttrain_api.mesh import AXES, Mesh
from disttrain_api.names import Role
from disttrain_api.parallelism import Parallelism
from disttrain_dashboard.source import Rank
from disttrain_dashboard.views.bounded import name, number, part
from disttrain_operator.decide.observed import PodFacts
from disttrain_operator.decide.reading import pod_facts

Raw = Mapping[str, Any]

MAX_RANKS = 10_000
LETTERS = {"running": "r", "waiting": "w", "done": "d", "failed": "f", "stopped": "s"}
"""State of a rank to its letter; "-" stands for a rank without a pod."""


def grid(spec: Any, world: int | None, ranks: Mapping[int, Rank]) -> dict[str, Any] | None:
    """Return the ranks in the order of the mesh; None where their number is not known.

    degrees: along AXES. states: a letter for each rank. pods: pod and node, each once. pod: for each rank its place in
    pods, -1 for none. steps: of each rank, null where none is known.
    """
    if world is None or world < 1:
        return None
    if world > MAX_RANKS:
        return {"world": number(world), "most": MAX_RANKS}
    pods: dict[tuple[str, str], int] = {}
    places, states, steps = [], [], []
    for at in range(world):
        rank = ranks.get(at)
        states.append(LETTERS.get(rank.state, "w") if rank is not None else "-")
        steps.append(number(rank.step) if rank is not None else None)
        places.append(-1 if rank is None else pods.setdefault((rank.pod, rank.node), len(pods)))
    return {
        "world": world,
        "axes": AXES,
        "degrees": degrees(spec, world),
        "states": "".join(states),
        "pods": [[name(pod), name(node)] for pod, node in pods],
        "pod": places,
        "steps": steps if any(step is not None for step in steps) else None,
    }


def degrees(spec: Any, world: int) -> tuple[int, ...]:
    """Return the degrees along the mesh's axes; of a spec that cannot be read, those of replicas alone."""
    try:
        parallelism = Parallelism.model_validate(part(spec, "parallelism") or {}, by_alias=True, by_name=False)
        return Mesh.of(parallelism, world).degrees
    except (LayoutError, ValueError):
        return Mesh(replicate=world).degrees


def ranks_per_pod(spec: Any) -> int:
    """Return the ranks of each worker pod of a raw spec; 1 where it cannot be read."""
    for field in ("processesPerPod", "gpusPerPod"):
        found = number(part(spec, "workers", field))
        if isinstance(found, int) and 0 < found <= MAX_RANKS:
            return found
    return 1


def ranks_of_pods(pods: Iterable[Raw], spec: Any, attempt: int) -> dict[int, Rank]:
    """Return the ranks of the workers' pods of an attempt. A pod that cannot be read is left out."""
    each = ranks_per_pod(spec)
    found: dict[int, Rank] = {}
    for raw in pods:
        pod = _facts(raw)
        if pod is not None and pod.role is Role.WORKER and pod.attempt == attempt:
            rank, first = Rank(pod.name, pod.node or "", _state(pod)), pod.index * each
            found.update((at, rank) for at in range(first, min(first + each, MAX_RANKS)))
    return found


def _facts(raw: Raw) -> PodFacts | None:
    try:
        return pod_facts(raw)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _state(pod: PodFacts) -> str:
    if pod.program_failed:
        return "failed"
    if pod.program_succeeded:
        return "done"
    if pod.deleting:
        return "stopped"
    return "running" if pod.program_started and pod.awaits_address is None else "waiting"
