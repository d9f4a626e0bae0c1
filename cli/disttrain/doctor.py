"""`disttrain doctor`: what a cluster must have before a job trains on it, a line for each, with what to do."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from disttrain.client import Client
from disttrain.cluster.api import Api, ApiError, NoAnswer
from disttrain.cluster.paths import path_of
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import CommandError
from disttrain.output import show
from disttrain.terminal import plain
from disttrain_api.bounds import MAX_LISTED
from disttrain_api.crd import CRD_NAME, custom_resource_definition
from disttrain_api.moved import carried_over
from disttrain_api.names import DEFAULT_GPU_RESOURCE, GROUP, PLURAL, Label
from disttrain_api.times import parse_time
from disttrain_api.validate import read_spec

Raw = dict[str, Any]

OLDEST_MINOR = 32
LEASE = "disttrain-operator"
_RIGHTS = (
    (GROUP, PLURAL, "", ("create", "get", "list", "watch", "patch", "delete"), "submit and see jobs"),
    ("", "pods", "", ("get", "list"), "see their pods (describe, why)"),
    ("", "pods", "log", ("get",), "read logs"),
    ("", "events", "", ("list",), "see events"),
)
_NOT_PULLED = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")


@dataclass(frozen=True)
class Finding:
    """One line: how it is, and what to do where it is not well."""

    state: str
    """ok, warn or bad."""
    about: str
    detail: str
    todo: str = ""

    def __str__(self) -> str:
        mark = {"ok": "ok  ", "warn": "look", "bad": "BAD "}[self.state]
        return f"{mark}  {self.about}: {self.detail}" + (f"; {self.todo}" if self.todo else "")


def doctor(client_of: Callable[[], Client]) -> int:
    """Look at everything and show a line for each. Returns 0 where nothing keeps jobs from training, else 1."""
    try:
        client = client_of()
    except CommandError as error:
        show(plain(Finding("bad", "cluster", str(error))))
        return 1
    bad = False
    for finding in _findings(client):
        show(plain(finding))
        bad = bad or finding.state == "bad"
    show("")
    show(
        "Something is wrong: start with the first BAD line."
        if bad
        else "Next: disttrain init, disttrain submit job.yaml"
    )
    return int(bad)


def _findings(client: Client) -> Iterator[Finding]:
    try:
        version = client.api.get("/version", what="version")
    except CommandError as error:
        yield Finding("bad", "cluster", str(error).partition(": ")[2], "check the kubeconfig's context and the network")
        return
    yield of_version(version, client.api.server)
    checks = (_definition, _stored, _rights, _lease, _nodes, _images)
    for check in checks:
        try:
            yield from check(client)
        except NoAnswer as error:
            yield Finding("bad", "cluster", str(error))
            return
        except ApiError as error:
            about = check.__name__.strip("_")
            yield Finding("warn", about, f"may not be looked at ({error})", "ask an administrator for the right to")


def of_version(version: Raw, server: str) -> Finding:
    """Judge what /version says."""
    detail = f"Kubernetes {version.get('gitVersion')} at {server}"
    # Some have a plus after it.
    minor = re.match("[0-9]{1,6}", str(version.get("minor")))
    if minor is not None and (str(version.get("major")), int(minor[0])) < ("1", OLDEST_MINOR):
        return Finding("bad", "cluster", detail, f"disttrain needs 1.{OLDEST_MINOR} or newer")
    return Finding("ok", "cluster", detail)


def _definition(client: Client) -> Iterator[Finding]:
    try:
        served = client.api.get(f"/apis/{GROUP}", what="definition")
    except ApiError as error:
        if error.status != 404:
            raise
        todo = "install the chart (docs/installing.md)"
        yield Finding("bad", "definition", "the cluster does not know DistTrainingJobs", todo)
        return
    versions = ", ".join(str(entry.get("version")) for entry in served.get("versions") or [])
    try:
        found = client.api.get(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}", what="definition")
    except ApiError as error:
        if error.status not in (401, 403):
            raise
        yield Finding("ok", "definition", f"{GROUP} {versions} is served")
        return
    yield of_definition(found, versions)


def of_definition(found: Raw, versions: str) -> Finding:
    """Judge the definition that the cluster has: whether it has the fields that this command knows."""
    known, served = (_fields(definition) for definition in (custom_resource_definition(), found))
    missing, extra = sorted(known - served), sorted(served - known)
    detail = f"{GROUP} {versions} is served"
    if missing:
        todo = "upgrade the chart, or use the command of its version"
        return Finding("warn", "definition", f"{detail}, without {len(missing)} fields such as {missing[0]}", todo)
    if extra:
        return Finding("warn", "definition", f"{detail}, with newer fields such as {extra[0]}", "upgrade this command")
    return Finding("ok", "definition", f"{detail}, with the fields that this command knows")


def _fields(definition: Raw) -> set[str]:
    """Return the paths of the job's own fields, not those within pod templates."""
    try:
        schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        return set(_paths(schema["properties"]["spec"], "spec"))
    except (KeyError, TypeError, IndexError):
        return set()


def _paths(schema: Any, path: str) -> Iterator[str]:
    inside = schema.get("items", schema) if isinstance(schema, dict) else {}
    for name, field in (inside.get("properties") or {}).items():
        yield f"{path}.{name}"
        if name not in ("template", "volumeClaimTemplate", "env", "envFrom", "resources"):
            yield from _paths(field, f"{path}.{name}")


def _rights(client: Client) -> Iterator[Finding]:
    for group, resource, sub, verbs, purpose in _RIGHTS:
        missing = [verb for verb in verbs if not _may(client, group, resource, sub, verb)]
        about = f"rights in {client.namespace}"
        if missing:
            what = f"{resource}{f'/{sub}' if sub else ''}"
            todo = "ask an administrator; the chart's values have roles for tenants (docs/security.md)"
            yield Finding("bad" if group else "warn", about, f"you may not {', '.join(missing)} {what}", todo)
        else:
            yield Finding("ok", about, f"you may {purpose}")


def _may(client: Client, group: str, resource: str, sub: str, verb: str) -> bool:
    attributes = {"namespace": client.namespace, "group": group, "resource": resource, "subresource": sub, "verb": verb}
    body = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    path = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
    answer = client.api.create(path, body, what="rights")
    return bool((answer.get("status") or {}).get("allowed"))


def _stored(client: Client) -> Iterator[Finding]:
    for everywhere in (True, False):
        try:
            yield of_jobs(client.list(all_namespaces=everywhere))
            return
        except ApiError as error:
            if error.status == 404:
                return
            if error.status != 403 or not everywhere:
                raise


def of_jobs(jobs: list[RemoteJob]) -> Finding:
    """Judge the stored jobs: whether an operator of this version reads them as they were meant."""
    unlike = []
    for job in jobs:
        spec, _ = carried_over(job.raw.get("spec"))
        found = [] if job.finished else read_spec(spec, job.raw["metadata"].get("labels"))[1]
        unlike += [f"{job.namespace}/{job.name} ({violation})" for violation in found[:1]]
    if unlike:
        more = f" and {len(unlike) - MAX_LISTED} more" if len(unlike) > MAX_LISTED else ""
        detail = f"this version refuses stored jobs: {', '.join(unlike[:MAX_LISTED])}{more}"
        return Finding("bad", "jobs", detail, "do this before the operator is upgraded (docs/installing.md)")
    return Finding("ok", "jobs", f"this version reads all {len(jobs)} that are stored")


def _lease(client: Client) -> Iterator[Finding]:
    refused: ApiError | None = None
    for namespace in dict.fromkeys(("kube-system", client.namespace)):
        path = path_of("/apis/coordination.k8s.io/v1", "leases", namespace, LEASE)
        try:
            yield of_lease(client.api.get(path, what="operator"), _server_time(client.api))
            return
        except ApiError as error:
            if error.status == 403:
                refused = error
            elif error.status != 404:
                raise
    if refused is not None:
        yield Finding("warn", "operator", "its Lease may not be read", "a job's status shows whether it acts")
        return
    todo = "install the chart, or ask which namespaces its operator serves (`watchNamespaces`)"
    yield Finding("bad", "operator", f"no Lease {LEASE} in kube-system or {client.namespace}", todo)


def _server_time(api: Api) -> datetime:
    """The API server's clock: this machine's may be another."""
    try:
        return parsedate_to_datetime(api.date)
    except (ValueError, TypeError):
        return datetime.now(UTC)


def of_lease(lease: Raw, now: datetime) -> Finding:
    """Check the Lease of the operator's leader election."""
    spec = lease.get("spec") or {}
    holder, renewed = spec.get("holderIdentity"), parse_time(spec.get("renewTime"))
    todo = "look at the operator's pods: `kubectl get pods -n disttrain`"
    if not holder or renewed is None:
        return Finding("bad", "operator", "no replica leads", todo)
    silent = (now - renewed).total_seconds()
    if silent > 30:
        return Finding("bad", "operator", f"{holder} led, and has not renewed its lease for {silent:.0f} s", todo)
    return Finding("ok", "operator", f"{holder} leads")


def _nodes(client: Client) -> Iterator[Finding]:
    yield of_nodes(client.api.items("/api/v1/nodes", what="nodes"))


def of_nodes(nodes: list[Raw]) -> Finding:
    """Judge the nodes: whether any takes pods, and what GPUs they have."""
    ready = [node for node in nodes if _is_ready(node)]
    gpus = [int(text) for node in ready if re.fullmatch("[1-9][0-9]{0,8}", text := _gpus(node))]
    if not ready:
        return Finding("bad", "nodes", f"none of {len(nodes)} takes pods", "`kubectl get nodes` says why")
    detail = f"{len(ready)} of {len(nodes)} take pods"
    if not gpus:
        todo = "for `gpusPerPod` install the device plugin of the GPUs' vendor"
        return Finding("warn", "nodes", f"{detail}, none has {DEFAULT_GPU_RESOURCE}", todo)
    return Finding(
        "ok", "nodes", f"{detail}, {len(gpus)} with {sum(gpus)} {DEFAULT_GPU_RESOURCE} (largest: {max(gpus)})"
    )


def _gpus(node: Raw) -> str:
    return str(((node.get("status") or {}).get("allocatable") or {}).get(DEFAULT_GPU_RESOURCE) or "0")


def _is_ready(node: Raw) -> bool:
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = any(entry.get("type") == "Ready" and entry.get("status") == "True" for entry in conditions)
    return ready and not (node.get("spec") or {}).get("unschedulable")


def _images(client: Client) -> Iterator[Finding]:
    path, query = (
        path_of("/api/v1", "pods", client.namespace),
        {"labelSelector": f"{Label.MANAGED_BY}={Label.MANAGER}"},
    )
    yield of_images(client.api.items(path, query, what="images"), client.namespace)


def of_images(pods: list[Raw], namespace: str) -> Finding:
    """Judge the images that jobs' pods of the namespace wait for."""
    waiting = {
        str(entry.get("image"))
        for pod in pods
        for entry in (pod.get("status") or {}).get("containerStatuses") or []
        if ((entry.get("state") or {}).get("waiting") or {}).get("reason") in _NOT_PULLED
    }
    if waiting:
        todo = "`disttrain why JOB` says why; docs/installing.md says how nodes get the trainer's image"
        return Finding("bad", "images", f"nodes cannot pull {', '.join(sorted(waiting)[:5])}", todo)
    return Finding("ok", "images", f"no pod of a job in {namespace} waits for one")
