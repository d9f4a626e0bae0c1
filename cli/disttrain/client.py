"""A small Python client for jobs on a cluster.

from disttrain.client import Client

client = Client(namespace="team-a")
job = client.submit("job.yaml")                 # or a dict, or a DistTrainingJob
status = client.wait(job.name).status           # returns when the job has finished
client.delete(job.name)
"""

import contextlib
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config
from kubernetes import watch
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from disttrain.errors import CommandError
from disttrain_api import manifest
from disttrain_api.names import GROUP, PLURAL, VERSION
from disttrain_api.spec import DistTrainingJob
from disttrain_api.status import Condition, ConditionType, JobStatus

Raw = dict[str, Any]

# A watch is asked again after this time, and the wait's own limit is looked at.
_WATCH_SECONDS = 30
_RETRY_SECONDS = 2.0


@dataclass(frozen=True)
class RemoteJob:
    """A job as the API server holds it."""

    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.raw["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.raw["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        return str(self.raw["metadata"]["uid"])

    @property
    def status(self) -> JobStatus:
        return JobStatus.model_validate(self.raw.get("status") or {}, extra="ignore")

    def condition(self, type_: ConditionType) -> Condition | None:
        return next((entry for entry in self.status.conditions if entry.type == type_), None)

    def holds(self, type_: ConditionType) -> bool:
        found = self.condition(type_)
        return found is not None and found.status == "True"

    @property
    def finished(self) -> bool:
        return self.holds(ConditionType.FINISHED)


class Client:
    """Jobs of one namespace. All methods raise CommandError with a sentence for people."""

    def __init__(self, *, namespace: str | None = None, context: str | None = None) -> None:
        api_client, own_namespace = _connect(context)
        self.namespace = namespace or own_namespace
        self._given_namespace = namespace
        self._api = kubernetes_client.CustomObjectsApi(api_client)

    def submit(self, job: "str | Path | Raw | DistTrainingJob") -> RemoteJob:
        """Create a job from a file, a dict or a model. A namespace given to the client wins over the manifest's."""
        if isinstance(job, DistTrainingJob):
            body = job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
            body |= {"apiVersion": job.api_version, "kind": job.kind}
        elif isinstance(job, dict):
            body = job
        else:
            body = manifest.load(job).model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
        namespace = self._given_namespace or body["metadata"].get("namespace") or self.namespace
        body = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
        with _explained(f"cannot create {namespace}/{body['metadata'].get('name')}"):
            return _job(self._api.create_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, body))

    def get(self, name: str, *, namespace: str | None = None) -> RemoteJob:
        """The job as it is now."""
        namespace = namespace or self.namespace
        with _explained(f"cannot read {namespace}/{name}"):
            return _job(self._api.get_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name))

    def delete(self, name: str, *, namespace: str | None = None) -> None:
        """Delete the job; its pods go with it."""
        namespace = namespace or self.namespace
        with _explained(f"cannot delete {namespace}/{name}"):
            self._api.delete_namespaced_custom_object(GROUP, VERSION, namespace, PLURAL, name)

    def follow(
        self, name: str, *, namespace: str | None = None, look_again_at: float | None = None
    ) -> Iterator[RemoteJob]:
        """The job now and after every change, until it has finished. A lost connection is made again.

        At `look_again_at`, a time of `time.monotonic`, it is given again even if nothing has changed.
        """
        namespace = namespace or self.namespace
        job = self.get(name, namespace=namespace)
        uid = job.uid
        yield job
        while not job.finished:
            try:
                for event in self._watch(namespace, name, job.raw["metadata"]["resourceVersion"], look_again_at):
                    if event["type"] == "ERROR":
                        break
                    job = RemoteJob(event["object"])
                    if event["type"] == "DELETED" or job.uid != uid:
                        raise CommandError(f"{namespace}/{name} was deleted")
                    yield job
                    if job.finished:
                        return
            except (ApiException, urllib3.exceptions.HTTPError):
                time.sleep(_RETRY_SECONDS)
            job = self.get(name, namespace=namespace)
            if job.uid != uid:
                raise CommandError(f"{namespace}/{name} was deleted and made again")
            yield job

    def wait(
        self,
        name: str,
        *,
        namespace: str | None = None,
        timeout: float | None = None,
        on_change: Callable[[RemoteJob], object] = lambda job: None,
    ) -> RemoteJob:
        """The job once it has finished. Raises TimeoutError when it has not within `timeout` seconds."""
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
        yield from watch.Watch().stream(  # type: ignore[no-untyped-call]
            self._api.list_namespaced_custom_object,
            GROUP,
            VERSION,
            namespace,
            PLURAL,
            field_selector=f"metadata.name={name}",
            resource_version=version,
            timeout_seconds=min(max(left, 1), _WATCH_SECONDS),
        )


def _job(answer: object) -> RemoteJob:
    assert isinstance(answer, dict)
    return RemoteJob(answer)


def _connect(context: str | None) -> tuple[Any, str]:
    """An API client and the namespace that goes with it: from the kubeconfig, else from the pod that this runs in."""
    # Read now: the library would take what KUBECONFIG was when it was imported.
    file = os.environ.get("KUBECONFIG") or "~/.kube/config"
    try:
        api_client = kubernetes_config.new_client_from_config(file, context)  # type: ignore[no-untyped-call]
        contexts, active = kubernetes_config.list_kube_config_contexts(file)  # type: ignore[no-untyped-call]
        chosen = next((entry for entry in contexts if entry["name"] == context), active)
        return api_client, chosen["context"].get("namespace") or "default"
    except (ConfigException, OSError) as error:
        if context is None:
            with contextlib.suppress(ConfigException, OSError):
                kubernetes_config.load_incluster_config()  # type: ignore[no-untyped-call]
                folder = Path("/var/run/secrets/kubernetes.io/serviceaccount")
                return kubernetes_client.ApiClient(), (folder / "namespace").read_text().strip()
        raise CommandError(
            f"no cluster to talk to: {error}; set KUBECONFIG or --context, or use `disttrain run` without a cluster"
        ) from error


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except ApiException as error:
        raise CommandError(f"{what}: {_sentence(error)}") from error
    except urllib3.exceptions.HTTPError as error:
        raise CommandError(f"{what}: the cluster does not answer ({_root(error)})") from error


def _sentence(error: ApiException) -> str:
    """What the API server says, without its wrapping."""
    with contextlib.suppress(ValueError, TypeError, KeyError):
        return str(json.loads(error.body or "")["message"])
    if error.status == 404:
        # A path that the API server does not know is answered in plain text, a missing object in JSON.
        return "the cluster does not know DistTrainingJobs; install the chart first"
    return f"{error.status} {error.reason}"


def _root(error: BaseException) -> str:
    reason = getattr(error, "reason", None)
    return str(reason if reason is not None else error)
