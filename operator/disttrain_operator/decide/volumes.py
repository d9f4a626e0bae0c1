"""The scheduler's words on a pod's volumes -> what is waited for, or wrong. A claim that is new is no want of room."""

import re

from disttrain_api.names import Role
from disttrain_api.spec import JobSpec
from disttrain_operator.decide.observed import PodFacts

_ON_ITS_WAY = (
    "unbound immediate persistentvolumeclaims",
    "waiting for first consumer",
    "waiting for a volume to be created",
    "binding volumes: context deadline exceeded",
)
_NOT_HERE = (
    "didn't find available persistent volumes to bind",
    "did not have enough free storage",
    "volume node affinity conflict",
    "unavailable due to one or more pvc(s) bound to non-existent pv(s)",
    "bound to non-existent persistentvolume",
)
_OF_ONE_POD = "readwriteoncepod access mode"
_ROOM = ("insufficient ", "too many pods")
_ABSENT = re.compile(r'persistentvolumeclaim "([^"]{1,253})" not found')
_LEAVING = re.compile(r'persistentvolumeclaim "([^"]{1,253})" is being deleted')

_IF_LONG = "if that takes long, `kubectl describe pvc` says why"
_WAIT = f"its PersistentVolumeClaim has no volume yet: its storage class creates it; {_IF_LONG}"
_SHARE = "use a claim with ReadWriteMany, or wait until that pod has ended where it is not of this job"
_MAKE = "make it, or name another one in the job"
_MAKE_AGAIN = "wait until it is gone and make it again"
_LOOK = "`kubectl describe pvc` and `kubectl get pv` say more"
EVERY_ADVICE = (_IF_LONG, _SHARE, _MAKE, _MAKE_AGAIN, _LOOK)


def of_volume(pod: PodFacts, spec: JobSpec, message: str) -> str | None:
    """Return what keeps the pod from its volume, and what to do, if the scheduler's message is about that; else
    None."""
    # What follows says whether preemption would help: never with volumes.
    text = message.split(" preemption:")[0].strip().rstrip(".")
    lower = text.lower()
    if _OF_ONE_POD in lower:
        claims = _claims(pod, spec)
        return f"{claims} has access mode ReadWriteOncePod and is another pod's, which it serves alone; {_SHARE}"
    if any(pattern in lower for pattern in _ROOM):
        return None
    absent, leaving = _ABSENT.search(text), _LEAVING.search(text)
    if absent is not None and not _is_made_for(pod, absent[1]):
        return f'its PersistentVolumeClaim "{absent[1]}" does not exist; {_MAKE}'
    if leaving is not None:
        return f'its PersistentVolumeClaim "{leaving[1]}" is being deleted; {_MAKE_AGAIN}'
    if absent is not None or any(pattern in lower for pattern in _ON_ITS_WAY):
        return _WAIT
    if any(pattern in lower for pattern in _NOT_HERE):
        return f"its volume is not available on any node: {text[:500]}; {_LOOK}"
    return None


def _claims(pod: PodFacts, spec: JobSpec) -> str:
    """The claims that the pod mounts, of which the scheduler names none."""
    role = spec.parameter_servers if pod.role is Role.PS and spec.parameter_servers else spec.workers
    given = role.pod_template.get("spec")
    volumes = given.get("volumes") if isinstance(given, dict) else None
    named = [(volume.get("persistentVolumeClaim") or {}).get("claimName") for volume in volumes or ()]
    claims = dict.fromkeys(filter(None, [spec.storage and spec.storage.claim_name, *named]))
    names = ", ".join(f'"{name}"' for name in claims)
    if len(claims) > 1:
        return f"one of its PersistentVolumeClaims {names}"
    return f"its PersistentVolumeClaim {names}".strip()


def _is_made_for(pod: PodFacts, claim: str) -> bool:
    """Whether the operator makes that claim with the pod: it is there in a moment."""
    return claim.startswith(pod.name.removesuffix(f"-{pod.role}-{pod.index}-a{pod.attempt}") + "-")
