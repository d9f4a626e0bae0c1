"""One child of a job: a POST, and what its refusal means.

A name that is taken is looked at: our own object is as good as created (a repeated POST, or a cache that lags); a
foreign one that terminates is waited for; a foreign one that stays is a conflict that somebody has to solve.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from disttrain_api.names import Label, Reason
from disttrain_api.ownership import controller, controlling_job
from disttrain_operator.decide.observed import CreateProblem, Job
from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import (
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    ServerTrouble,
    Throttled,
    Undecodable,
)
from disttrain_operator.plan.desired import NETWORK_POLICY_VERSION
from disttrain_operator.plan.schedulers import COSCHEDULING_GROUP, VOLCANO_GROUP
from disttrain_operator.snapshot import child_collection

_PLURALS = {
    "Pod": "pods",
    "Service": "services",
    "Secret": "secrets",
    "PersistentVolumeClaim": "persistentvolumeclaims",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "PodGroup": "podgroups",
    "NetworkPolicy": "networkpolicies",
}
# What not every cluster needs: its name, and the chart's value with which the operator may use it.
_OPTIONAL = {
    VOLCANO_GROUP: ("Volcano", "scheduling.volcano"),
    COSCHEDULING_GROUP: ("coscheduling (scheduler-plugins)", "scheduling.coscheduling"),
    NETWORK_POLICY_VERSION: ("networking.k8s.io", "networkPolicy.perJob"),
}
# The operator may not read Secrets. Nobody else can know the name before the Secret is there (plan.identity).
_UNREADABLE = frozenset({"Secret"})
# For these a refusal by quota is an answer: pods are watched, and a Secret cannot be looked at.
_NOT_ASKED_FOR_AGAIN = frozenset({"Pod", "Secret"})

_TRIES = 5
_RETRY_SECONDS = 0.05


@dataclass(frozen=True)
class Made:
    """The object, as the API server has it; None where it may not be read, or its namespace is going away."""

    raw: Raw | None


async def create_child(
    client: Client, job: Job, manifest: Raw, trim: Callable[[Raw], Raw] | None = None
) -> Made | CreateProblem:
    """Create the child, or find it. Raises Unavailable if the API server does not answer, Throttled if it is
    overloaded.

    `trim`: what the caller keeps of it; of one that was made and is large it gets no more.
    """
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    collection = child_collection(manifest["apiVersion"], _PLURALS[kind], job.namespace)
    for remaining in reversed(range(_TRIES)):
        try:
            return Made(await client.create(collection, manifest, trim=trim))
        except Conflict as error:
            refusal = error
            if error.already_exists:
                found = await _taken(client, job, manifest, collection, error)
                if found is not None:
                    return found
            # Else it vanished meanwhile, or many pods were counted against one quota at the same time.
            await asyncio.sleep(_RETRY_SECONDS)
        except NotFound as error:
            if error.is_of_kind:
                return _not_installed(manifest, error)
            return Made(None)  # the namespace is gone, and the job with it
        except Forbidden as error:
            if error.is_namespace_terminating:
                return Made(None)
            if error.is_for_lack_of_a_right:
                return _not_allowed(manifest, error)
            if error.is_new_namespace and remaining:
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            if error.is_quota and kind not in _NOT_ASKED_FOR_AGAIN:
                # The quota is counted before the name is looked at: it may be our own object that fills it.
                found = await _taken(client, job, manifest, collection, error)
                if isinstance(found, Made):
                    return found
            return _problem(kind, name, Reason.QUOTA_EXCEEDED if error.is_quota else Reason.FORBIDDEN, error)
        except Invalid as error:
            return _problem(kind, name, Reason.INVALID_POD if kind == "Pod" else Reason.CREATE_FAILED, error)
        except Throttled:
            raise  # the server's trouble, which says nothing of the child
        except (ApiError, ServerTrouble) as error:
            return _problem(kind, name, Reason.CREATE_FAILED, error)
    return _problem(kind, name, Reason.CREATE_FAILED, refusal)


async def refused_by_quota(client: Client, job: Job, manifest: Raw) -> CreateProblem | None:
    """Request the pod as a dry run. Return the refusal, or None if it might be admitted or a dry run cannot tell."""
    collection = child_collection(manifest["apiVersion"], _PLURALS[manifest["kind"]], job.namespace)
    try:
        await client.request("POST", collection, query={"dryRun": "All"}, body=manifest)
    except Forbidden as error:
        if error.is_quota:
            return _problem(manifest["kind"], manifest["metadata"]["name"], Reason.QUOTA_EXCEEDED, error)
    except (ApiError, Undecodable, ServerTrouble):
        pass  # a webhook that takes no such question, for example: what it is will be said to the pod itself
    return None


async def _taken(
    client: Client, job: Job, manifest: Raw, collection: str, error: ApiError
) -> Made | CreateProblem | None:
    """Return what a taken name means; None if it is free again."""
    kind, name = manifest["kind"], manifest["metadata"]["name"]
    if kind in _UNREADABLE:
        return Made(None)
    try:
        found = await client.get(f"{collection}/{name}")
    except NotFound:
        return None
    except Forbidden as refusal:
        return _problem(kind, name, Reason.OPERATOR_FORBIDDEN, refusal)
    except Undecodable as trouble:
        message = f"an object that cannot be read holds the name: {trouble}"
        return CreateProblem(kind, name, error.code, Reason.NAME_CONFLICT, message)
    if is_own(found, manifest, job):
        return Made(found)
    owner = controller(found["metadata"])
    whose = "has no controller" if owner is None else f"is controlled by {owner.get('kind')} {owner.get('name')}"
    if "deletionTimestamp" in found["metadata"]:
        message = f"a terminating object that is not the job's holds the name; it {whose}"
        return CreateProblem(kind, name, error.code, Reason.WAITING_FOR_OLD_PODS, message)
    message = f"an object that is not the job's holds the name; it {whose}"
    return CreateProblem(kind, name, error.code, Reason.NAME_CONFLICT, message)


def is_own(found: Raw, manifest: Raw, job: Job) -> bool:
    """Return whether the object that holds the manifest's name, in the job's namespace, is the job's.

    A claim that outlives its job is made without an owner. It is the job's where nothing controls it and its labels
    hold the job's whole uid: no other job's claim has that, and who may write it there may make claims, so that nothing
    is gained by it that the storage of this namespace does not offer to them anyway.
    """
    metadata = found["metadata"]
    if "ownerReferences" in manifest["metadata"]:
        return controlling_job(metadata) == job.uid
    return controller(metadata) is None and (metadata.get("labels") or {}).get(Label.JOB_UID) == job.uid


def _not_installed(manifest: Raw, error: NotFound) -> CreateProblem:
    version, kind = manifest["apiVersion"], manifest["kind"]
    needed, _ = _OPTIONAL.get(version, (f"what brings the kind {kind}", ""))
    message = f"the cluster knows no {kind} of {version}: {needed} is not installed"
    return CreateProblem(kind, manifest["metadata"]["name"], error.code, Reason.NOT_INSTALLED, message)


def _not_allowed(manifest: Raw, error: Forbidden) -> CreateProblem:
    _, value = _OPTIONAL.get(manifest["apiVersion"], ("", ""))
    message = f"{error.message}; `{value}: true` in the chart's values gives the right" if value else error.message
    return CreateProblem(manifest["kind"], manifest["metadata"]["name"], error.code, Reason.OPERATOR_FORBIDDEN, message)


def _problem(kind: str, name: str, reason: Reason, error: ApiError | ServerTrouble) -> CreateProblem:
    return CreateProblem(kind, name, error.code, reason, error.message)
