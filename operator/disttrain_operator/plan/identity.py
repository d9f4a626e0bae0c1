"""Names of a job's children. Each holds five hex digits of the job's uid; a pod's also the attempt.

So no address ever leads to a dying pod, and a job deleted and made again meets no namesake.
"""

import hashlib
import hmac
import zlib
from collections.abc import Mapping
from typing import Any

from disttrain_api.names import AGENT_PORT, GANG_PORT, HOST_AGENT_PORTS, HOST_PORTS, MASTER_PORT, PS_PORT, Label, Role
from disttrain_api.ownership import owner_reference
from disttrain_operator.plan.site import PlannedJob

Manifest = dict[str, Any]


def child_name(job_name: str, uid: str) -> str:
    """Name of the job's Service, and the stem of all others."""
    return f"{job_name}-{uid.replace('-', '')[:5]}"


def secret_name(job_name: str, uid: str, token: str) -> str:
    """Return the name of the job's Secret, which cannot be predicted without the job's token.

    The operator may make Secrets and not read them, so it cannot see whose Secret holds a name. Under a name that
    could be foreseen somebody else's would give the pods another configuration and token.
    """
    digest = hmac.new(token.encode(), b"name of the Secret", hashlib.sha256).hexdigest()
    return f"{child_name(job_name, uid)}-{digest[:16]}"


def environment_secret_name(job_name: str, uid: str, token: str) -> str:
    """Return the name of the Secret with the variables that a template's `envFrom` may set otherwise."""
    return f"{secret_name(job_name, uid, token)}-env"


def claim_name(job_name: str, uid: str) -> str:
    """Name of the claim that the operator creates."""
    return f"{child_name(job_name, uid)}-checkpoints"


def pod_name(job_name: str, uid: str, role: Role, index: int, attempt: int) -> str:
    """Name and hostname of a pod; at most 63 characters for the longest job name."""
    return f"{child_name(job_name, uid)}-{role}-{index}-a{attempt}"


def group_name(job_name: str, uid: str, attempt: int) -> str:
    """Name of an attempt's gang where its scheduler wants one."""
    return f"{child_name(job_name, uid)}-a{attempt}"


def job_labels(job_name: str, uid: str) -> dict[str, str]:
    """Labels of every child of the job."""
    return {Label.MANAGED_BY: Label.MANAGER, Label.JOB: job_name, Label.JOB_UID: uid}


def port(role: Role, uid: str, template: Mapping[str, Any]) -> int:
    """Return the port on which a pod with this template listens for the other pods of its job.

    Pods on the network of their node share its ports with those of other jobs: each job has two of its own there, and
    the pods say so, so that the scheduler puts no two pods with the same one on a node.
    """
    if not on_host_network(template):
        return PS_PORT if role is Role.PS else MASTER_PORT
    return HOST_PORTS[_pair(uid) * 2 + (role is Role.PS)]


def agent_port(uid: str, template: Mapping[str, Any]) -> int:
    """Return the port on which the agent of a pod with this template answers."""
    return host_agent_port(uid) if on_host_network(template) else AGENT_PORT


def gang_port(uid: str, template: Mapping[str, Any]) -> int:
    """Return the port on which worker 0's agent takes the connections of the other workers' agents.

    On the network of their nodes it is the second one of the job, since no job with servers restarts ranks in place.
    """
    return port(Role.PS, uid, template) if on_host_network(template) else GANG_PORT


def host_agent_port(uid: str) -> int:
    """Return the port on which a job's agents answer on the network of their nodes."""
    return HOST_AGENT_PORTS[_pair(uid)]


def _pair(uid: str) -> int:
    """The number of the job's pair of ports on its nodes' networks."""
    return zlib.crc32(uid.encode()) % (len(HOST_PORTS) // 2)


def on_host_network(template: Mapping[str, Any]) -> bool:
    """Return whether pods with this template are on the network of their node."""
    spec = template.get("spec")
    return isinstance(spec, Mapping) and spec.get("hostNetwork") is True


def pod_labels(job_name: str, uid: str, role: Role, index: int, attempt: int) -> dict[str, str]:
    """Labels of a pod."""
    return job_labels(job_name, uid) | {Label.ROLE: role.value, Label.INDEX: str(index), Label.ATTEMPT: str(attempt)}


def child_metadata(job: PlannedJob, name: str) -> Manifest:
    """Metadata of a child that goes with the job."""
    return {
        "name": name,
        "namespace": job.namespace,
        "labels": job_labels(job.name, job.uid),
        "ownerReferences": [owner_reference(job.name, job.uid)],
    }
