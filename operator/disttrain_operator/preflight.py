"""Preconditions of the operator on the cluster, each with one clear line if it does not hold."""

import asyncio
import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import TypeAlias

from disttrain_api.history import HISTORY_NAME
from disttrain_api.names import GROUP, PLURAL
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import ApiError, KubeError, NotFound
from disttrain_operator.kube.lists import list_pages
from disttrain_operator.snapshot import job_collection

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
REMINDER_POLLS = 60

Rights: TypeAlias = tuple[tuple[str, str, tuple[str, ...]], ...]
"""Group, resource, verbs; a subresource follows a slash."""
RIGHTS: Rights = (
    (GROUP, PLURAL, ("get", "list", "watch", "delete")),
    (GROUP, f"{PLURAL}/status", ("update",)),
    ("", "pods", ("get", "list", "watch", "create", "delete")),
    ("", "services", ("get", "list", "watch", "create")),
    ("", "secrets", ("create",)),
    ("", "persistentvolumeclaims", ("get", "create")),
    ("", "events", ("list", "create")),
    ("policy", "poddisruptionbudgets", ("get", "create")),
)
# Only jobs that ask for the scheduler need them; by the chart's value under `scheduling`.
OPTIONAL_RIGHTS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "volcano": ("scheduling.volcano.sh", "podgroups", ("get", "create")),
    "coscheduling": ("scheduling.x-k8s.io", "podgroups", ("get", "create")),
}

# The chart makes the one Lease to which they apply.
LEASE_RIGHTS: Rights = (("coordination.k8s.io", "leases", ("get", "update")),)
# Only with --gang-gate.
GATE_RIGHTS: Rights = (
    ("", "nodes", ("get", "list", "watch")),
    ("", "pods", ("patch",)),
)
# Unless --history-jobs is 0. They apply to one ConfigMap, but a right to create cannot be narrowed to a name.
HISTORY_RIGHTS: Rights = (("", "configmaps", ("create",)), ("", "configmaps", ("get", "patch")))
# Only with --network-policies.
NETWORK_POLICY_RIGHTS = (("networking.k8s.io", "networkpolicies", ("get", "create")),)
# Only where agents are asked through the API server; the chart's operator asks at the pods' addresses.
PROXY_RIGHTS: Rights = (("", "pods/proxy", ("get", "create")),)


async def wait_for_jobs(client: Client, namespace: str | None) -> None:
    """Returns once DistTrainingJobs can be listed there: the server answers and the CRD is installed."""
    logged = ""
    for poll in itertools.count():
        try:
            # A job that cannot be decoded says nothing of the server: lists step over it.
            await anext(list_pages(client, job_collection(namespace), {}, 1))
            return
        except NotFound:
            sentence = f"the CustomResourceDefinition {PLURAL}.{GROUP} is not installed: apply it, I am waiting"
        except KubeError as error:
            sentence = f"the API server at {client.access.server} does not serve the operator yet: {error}"
        if sentence != logged or poll % REMINDER_POLLS == 0:
            logger.warning(sentence)
            logged = sentence
        await asyncio.sleep(POLL_SECONDS)


async def missing_rights(
    client: Client,
    namespaces: Sequence[str | None],
    leases: Sequence[tuple[str, str]] = (),
    *,
    gate: bool = False,
    network_policies: bool = False,
    history: bool = False,
) -> list[str]:
    """The rights that this operator needs and lacks, as "verb resource".

    `namespaces`: those that it serves, None for all; `leases`: their namespaces and names.
    """
    rights = RIGHTS + (GATE_RIGHTS if gate else ()) + (NETWORK_POLICY_RIGHTS if network_policies else ())
    wanted: list[tuple[str | None, str, Rights]] = [(namespace, "", rights) for namespace in namespaces]
    wanted += [(namespace, name, LEASE_RIGHTS) for namespace, name in leases]
    wanted += [(namespace, HISTORY_NAME, HISTORY_RIGHTS) for namespace in namespaces if history]
    return await _missing(client, namespaces, wanted)


async def missing_proxy_rights(client: Client, namespaces: Sequence[str | None]) -> list[str]:
    """The rights that this operator lacks to ask agents through the API server, as `missing_rights` has them."""
    return await _missing(client, namespaces, [(namespace, "", PROXY_RIGHTS) for namespace in namespaces])


async def _missing(
    client: Client, namespaces: Sequence[str | None], wanted: Iterable[tuple[str | None, str, Rights]]
) -> list[str]:
    asked = [
        (namespace, group, resource, verb, name)
        for namespace, name, listed in wanted
        for group, resource, verbs in listed
        for verb in verbs
    ]
    answers = await asyncio.gather(*(_allowed(client, *question) for question in asked))
    pairs = zip(asked, answers, strict=True)
    return [
        f"{verb} {resource}" + (f" in {namespace}" if namespace and len(namespaces) > 1 else "")
        for (namespace, _, resource, verb, _), allowed in pairs
        if not allowed
    ]


async def _allowed(client: Client, namespace: str | None, group: str, resource: str, verb: str, name: str) -> bool:
    plural, _, subresource = resource.partition("/")
    attributes = {"group": group, "resource": plural, "subresource": subresource, "verb": verb, "name": name}
    if namespace is not None:
        attributes["namespace"] = namespace
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    try:
        answer = await client.create("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", review)
    except ApiError:
        return True  # who may not ask may still act
    return bool((answer.get("status") or {}).get("allowed"))


def log_missing(rights: Iterable[str]) -> None:
    """One line for all of them."""
    listed = ", ".join(rights)
    if listed:
        logger.error("my service account may not: %s; jobs that need it will not run (see the chart's RBAC)", listed)


def log_missing_proxy_rights(rights: Iterable[str]) -> None:
    """One line for all of them."""
    if listed := ", ".join(rights):
        logger.warning(
            "I ask agents through the API server, and may not: %s; jobs show no progress until I may", listed
        )
