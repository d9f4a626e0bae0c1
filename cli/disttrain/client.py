"""The Python client of jobs on a cluster.

>>> from disttrain import Client
>>> client = Client(namespace="team-a")  # doctest: +SKIP
>>> job = client.submit("job.yaml")  # a path, a dict or a DistTrainingJob  # doctest: +SKIP
>>> client.wait(job.name, timeout=3600).phase  # doctest: +SKIP
'Succeeded'
"""

import math
import re
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from disttrain.checkpoint_request import refuse_without_checkpoints
from disttrain.cluster.api import Api, ApiError, NoAnswer, Raw
from disttrain.cluster.connect import access_of, find_access
from disttrain.cluster.paths import path_of
from disttrain.cluster.remote import RemoteJob
from disttrain.errors import USAGE, CommandError
from disttrain_api import manifest
from disttrain_api.history import HISTORY_NAME, HistoryEntry, read_entries
from disttrain_api.names import CHECKPOINT_REQUEST, GROUP, PLURAL, VERSION, Label
from disttrain_api.spec import DistTrainingJob

if TYPE_CHECKING:
    from kubernetes.client import Configuration

    from disttrain.logs.figures import Row
    from disttrain.stacks.of_cluster import Stacks

__all__ = ["Client", "RemoteJob", "body_of"]

# A watch is asked again after this time, and the wait's own limit is looked at.
_WATCH_SECONDS = 30
_RETRY_SECONDS = 2.0
_Jobs: TypeAlias = list[RemoteJob]
_Objects: TypeAlias = list[Raw]
_Entries: TypeAlias = list[HistoryEntry]
_Rows: TypeAlias = "list[Row]"
_HISTORIES = 32
"""ConfigMaps of one answer: of 1 MiB each they stay within its bound."""
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")


class Client:
    """Jobs of one namespace. All methods raise CommandError with a sentence for people.

    namespace: absent, that of the kubeconfig's context. context: absent, the kubeconfig's current one. Without a
    kubeconfig the service account of the pod is used that this runs in. configuration: in place of both, one of the
    package `kubernetes` that the program has set up; its namespace is `default`.
    """

    def __init__(
        self, *, namespace: str | None = None, context: str | None = None, configuration: "Configuration | None" = None
    ) -> None:
        if configuration is not None and context is not None:
            raise CommandError("configuration and context both name a cluster: give one of them", USAGE)
        access = find_access(context) if configuration is None else access_of(configuration)
        self.namespace = namespace or access.namespace
        self._given_namespace = namespace
        self.api = Api(access)

    @classmethod
    def of(cls, api: Api, namespace: str = "default") -> "Client":
        """Return a client of an API server that is connected to already."""
        client = cls.__new__(cls)
        client.api, client.namespace, client._given_namespace = api, namespace, None
        return client

    def submit(self, job: "str | Path | Raw | DistTrainingJob") -> RemoteJob:
        """Create a job from a file, a dict or a model. A namespace given to the client wins over the manifest's.

        Raises ManifestError, before anything is sent, for one that cannot run, or has fields that are unknown or have
        moved; the API server refuses what is left of these.
        """
        body = body_of(job)
        namespace = self._given_namespace or body["metadata"].get("namespace") or self.namespace
        body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        name = body["metadata"].get("name") or body["metadata"].get("generateName")
        what = f"cannot create {namespace}/{name}"
        return RemoteJob(self.api.create(_jobs(namespace), body, what=what))

    def get(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Return the job as it is now."""
        namespace = namespace or self.namespace
        return RemoteJob(self.api.get(_job(namespace, name), what=f"cannot read {namespace}/{name}"))

    def list(self, *, all_namespaces: bool = False, selector: str | None = None, most: int | None = None) -> _Jobs:
        """Return the jobs of the namespace, or of all. selector: a label selector such as `team=vision`. most: no more
        than so many, the first by name."""
        namespace = None if all_namespaces else self.namespace
        where = "all namespaces" if namespace is None else f"namespace {namespace}"
        query = {"labelSelector": selector} if selector else {}
        found = self.api.items(_jobs(namespace), query, most=most, what=f"cannot list jobs of {where}")
        return [RemoteJob(raw) for raw in found]

    def delete(self, name: str, *, namespace: str | None = None) -> None:
        """Delete the job; its pods go with it."""
        namespace = namespace or self.namespace
        self.api.delete(_job(namespace, name), what=f"cannot delete {namespace}/{name}")

    def suspend(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Ask the job's pods to write a checkpoint and stop; return the job as it is then stored."""
        return self._set_suspend(name, True, namespace)

    def resume(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Resume a suspended job from its last checkpoint; return the job as it is then stored."""
        return self._set_suspend(name, False, namespace)

    def checkpoint(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """Ask the job's ranks for a checkpoint; return the job as it is then stored. It runs on meanwhile.

        Raises CommandError that says why where the job does not run, or its ranks would write none.
        """
        namespace = namespace or self.namespace
        refuse_without_checkpoints(self.get(name, namespace=namespace))
        body = {"metadata": {"annotations": {CHECKPOINT_REQUEST: uuid.uuid4().hex}}}
        what = f"cannot ask {namespace}/{name} for a checkpoint"
        return RemoteJob(self.api.patch(_job(namespace, name), body, what=what))

    def _set_suspend(self, name: str, value: bool, namespace: str | None) -> RemoteJob:
        namespace = namespace or self.namespace
        what = f"cannot {'suspend' if value else 'resume'} {namespace}/{name}"
        # What a job of an earlier version was suspended by goes, too.
        former: Raw = {} if value else {"runPolicy": {"suspend": None}}
        return RemoteJob(self.api.patch(_job(namespace, name), {"spec": {"suspend": value, **former}}, what=what))

    def pods(self, job: RemoteJob, *, most: int | None = None) -> _Objects:
        """Return the job's pods, of all attempts, as the API server holds them. most: no more than so many."""
        query = {"labelSelector": f"{Label.JOB_UID}={job.uid}"}
        what = f"cannot list the pods of {job.namespace}/{job.name}"
        return self.api.items(path_of("/api/v1", "pods", job.namespace), query, most=most, what=what)

    def events(self, job: RemoteJob) -> _Objects:
        """Return the Events on the job, oldest first."""
        return self.events_of(job.namespace, job.uid)

    def events_of(self, namespace: str, uid: str) -> _Objects:
        """Return the Events on an object, for example one of the job's pods, oldest first."""
        query = {"fieldSelector": f"involvedObject.uid={uid}"}
        what = f"cannot list events of namespace {namespace}"
        found = self.api.items(path_of("/api/v1", "events", namespace), query, what=what)
        return sorted(found, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or ""))

    def history(self, *, all_namespaces: bool = False) -> _Entries:
        """Return what finished jobs of the namespace, or of all, came to, the last finished first.

        Also of those that are deleted by now; the operator keeps the last hundred of a namespace.
        """
        if all_namespaces:
            query = {"fieldSelector": f"metadata.name={HISTORY_NAME}", "limit": _HISTORIES}
            return read_entries(self.api.items("/api/v1/configmaps", query, what="cannot read the history"))
        path = path_of("/api/v1", "configmaps", self.namespace, HISTORY_NAME)
        try:
            return read_entries([self.api.get(path, what=f"cannot read the history of namespace {self.namespace}")])
        except ApiError as error:
            if error.status == 404:
                return []
            raise

    def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        ranks: "set[int] | None" = None,
        attempt: int | None = None,
        tail: int | None = None,
        follow: bool = False,
    ) -> Iterator[str]:
        """Yield the log lines of the job's ranks in the order of time, each with its rank before it.

        ranks: absent, all. attempt: absent, the current one. tail: the last lines of each pod alone. follow: go on,
        through pods that are pending and restarts, until the job has finished.
        """
        from disttrain.logs.follow import follow_lines, lines_now
        from disttrain.logs.pick import Pick

        pick = Pick(ranks=None if ranks is None else frozenset(ranks), attempt=attempt)
        job = self.get(name, namespace=namespace)
        lines = follow_lines(self, job, pick, tail=tail) if follow else lines_now(self, job, pick, tail=tail)
        return (line.text for line in lines)

    def metrics(self, name: str, *, namespace: str | None = None) -> "_Rows":
        """Return the figures of the current attempt's logged steps and evaluations, by the names of metrics.jsonl.

        They are read from the log of rank 0, with its digits, as long as its pod is there. `pandas.DataFrame` takes
        them as they are. Raises CommandError for a program of one's own: its last figures are in `status.progress`.
        """
        from disttrain.logs.figures import rows_of
        from disttrain.logs.follow import lines_now
        from disttrain.logs.pick import Pick

        job = self.get(name, namespace=namespace)
        if not (job.raw.get("spec") or {}).get("training"):
            raise CommandError(f"{name} has a command of its own: its last figures are in `status.progress`")
        return rows_of(line.content for line in lines_now(self, job, Pick(ranks=frozenset({0})), tail=None))

    def stacks(self, name: str, *, namespace: str | None = None, ranks: "set[int] | None" = None) -> "Stacks":
        """Return where the job's ranks are at the moment: the stacks of all of their threads.

        ranks: absent, all. This takes the right to read Secrets of the namespace and to `get` `pods/proxy`.
        """
        from disttrain.stacks.of_cluster import stacks_of

        job = self.get(name, namespace=namespace)
        return stacks_of(self.api, job, self.pods(job), None if ranks is None else frozenset(ranks))

    def follow(
        self, name: str, *, namespace: str | None = None, look_again_at: float | None = None
    ) -> Iterator[RemoteJob]:
        """Yield the job now and after every change, until it has finished. A lost connection is made again.

        At `look_again_at`, a time of `time.monotonic`, it is given again even if nothing has changed.
        """
        namespace = namespace or self.namespace
        job = self.get(name, namespace=namespace)
        uid = job.uid
        yield job
        while not job.finished:
            try:
                for event in self._watch(namespace, name, job.raw["metadata"]["resourceVersion"], look_again_at):
                    job = RemoteJob(event["object"])
                    if event["type"] == "DELETED" or job.uid != uid:
                        raise CommandError(f"{namespace}/{name} was deleted")
                    yield job
                    if job.finished:
                        return
            except NoAnswer:
                time.sleep(_RETRY_SECONDS)
            except ApiError as error:
                if error.status in (401, 403):
                    raise
                time.sleep(_RETRY_SECONDS)
            job = self._again(name, namespace, look_again_at)
            if job.uid != uid:
                raise CommandError(f"{namespace}/{name} was deleted and recreated")
            yield job

    def _again(self, name: str, namespace: str, until: float | None) -> RemoteJob:
        """Return the job, however long the API server is away; not beyond `until`."""
        while True:
            try:
                return self.get(name, namespace=namespace)
            except (NoAnswer, ApiError) as error:
                status = error.status if isinstance(error, ApiError) else 503
                if status == 404:
                    raise CommandError(f"{namespace}/{name} was deleted") from error
                if (status < 500 and status != 429) or (until is not None and time.monotonic() >= until):
                    raise
                time.sleep(_RETRY_SECONDS)

    def wait(
        self,
        name: str,
        *,
        namespace: str | None = None,
        timeout: float | None = None,
        on_change: Callable[[RemoteJob], object] = lambda job: None,
    ) -> RemoteJob:
        """Return the job once it has finished. Raises TimeoutError when it has not within `timeout` seconds."""
        began = time.monotonic()
        job: RemoteJob | None = None
        limit = began + timeout if timeout is not None else None
        for job in self.follow(name, namespace=namespace, look_again_at=limit):
            on_change(job)
            if not job.finished and timeout is not None and time.monotonic() - began >= timeout:
                raise TimeoutError(f"{name} has not finished within {timeout:g} s: it is {job.status.phase}")
        assert job is not None
        return job

    def _watch(self, namespace: str, name: str, version: str, until: float | None) -> Iterator[Raw]:
        left = _WATCH_SECONDS if until is None else math.ceil(until - time.monotonic())
        query = {"fieldSelector": f"metadata.name={name}", "resourceVersion": version}
        seconds = min(max(left, 1), _WATCH_SECONDS)
        return self.api.watch(_jobs(namespace), query, seconds=seconds, what=f"cannot watch {namespace}/{name}")


def body_of(job: "str | Path | Raw | DistTrainingJob") -> Raw:
    """Return the object that is sent for a file, a dict or a model. Raises ManifestError for one that cannot run."""
    if isinstance(job, dict):
        manifest.of_object(job)
        return job
    if not isinstance(job, DistTrainingJob):
        return _body(manifest.load(job))
    body = _body(job)
    manifest.of_object(body)
    return body


def _body(model: DistTrainingJob) -> Raw:
    body: Raw = model.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
    if model.metadata.generate_name is not None:
        del body["metadata"]["name"]
    return {**body, "apiVersion": model.api_version, "kind": model.kind}


def _jobs(namespace: str | None) -> str:
    return path_of(f"/apis/{GROUP}/{VERSION}", PLURAL, namespace)


def _job(namespace: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise CommandError(f"'{name}' is no name of a job: expected lower case letters, digits and dashes", USAGE)
    return f"{_jobs(namespace)}/{name}"
