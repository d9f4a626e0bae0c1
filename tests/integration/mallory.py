"""A tenant who stores everything that poison_corpus.py holds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial

import yaml

from tests.integration import heavy_objects, poison_corpus
from tests.integration.heavy_objects import Fields, Heavy
from tests.integration.operator_process import CRD, JOBS, Raw, Team, eventually
from tests.integration.poison_corpus import Poison
from tools.cluster.api import Answer, ApiClient

MUCH = 100_000
"""Bytes that an API server takes of whatever it does not bound."""
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


def put_definition(api: ApiClient, definition: Raw) -> None:
    """Create or replace the definition, and wait until it is served."""
    name = definition["metadata"]["name"]
    found = api.ask("GET", f"{DEFINITIONS}/{name}")
    if found.status == 200:
        version = found.json()["metadata"]["resourceVersion"]
        changed = definition | {"metadata": definition["metadata"] | {"resourceVersion": version}}
        assert api.ask("PUT", f"{DEFINITIONS}/{name}", changed).status == 200
    else:
        assert api.ask("POST", DEFINITIONS, definition).status == 201
    eventually(lambda: api.ask("GET", JOBS.format("default")).status == 200)


def without_schema(definition: Raw) -> Raw:
    """The definition of a version that lets everything in."""
    anything = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    versions = [version | {"schema": anything} for version in definition["spec"]["versions"]]
    return definition | {"spec": definition["spec"] | {"versions": versions}}


def _in_status(fields: Fields, size: int) -> Raw:
    return {"status": fields(size)}


class Mallory:
    """Its namespace, and the names of what it has stored."""

    def __init__(self, api: ApiClient) -> None:
        self.team = Team(api, "mallory")
        self.api = api
        self.stored: list[str] = []

    def store_jobs(self) -> None:
        """Jobs and statuses that the definition of today would refuse. It holds again afterwards."""
        definition = yaml.safe_load(CRD.read_text())
        put_definition(self.api, without_schema(definition))
        for poison in poison_corpus.specs():
            self._job(poison)
        for poison in poison_corpus.statuses():
            self._job(poison, poison.text)
        put_definition(self.api, definition)

    def store_children(self, own: Raw) -> None:
        """Pods that claim to be those of this job, and objects with the names of its children."""
        for poison in poison_corpus.pods(own):
            self._put("api/v1/{}/pods", poison)
        for collection, poison in poison_corpus.neighbours(own):
            self._put(collection, poison)

    def store_heavy(self, heavy: Iterable[Heavy]) -> None:
        """These objects, each as large as the API server takes it."""
        for each in heavy:
            path = "/" + each.collection.format(f"namespaces/{self.team.namespace}")
            self._as_large_as_may_be(each.name, partial(self._ask, "POST", path, each.body))
            self.stored.append(each.name)
            if each.status is not None:
                status_of = partial(_in_status, each.status)
                self._as_large_as_may_be(
                    each.name, partial(self._ask, "PATCH", f"{path}/{each.name}/status", status_of)
                )

    def _ask(self, method: str, path: str, body: Fields, size: int) -> Answer:
        return self.api.ask(method, path, body(size))

    def _as_large_as_may_be(self, name: str, ask: Callable[[int], Answer]) -> None:
        size = heavy_objects.LARGEST
        while (answer := ask(size)).status not in (200, 201):
            size //= 2
            assert size > MUCH, f"{name}: {answer.status} {answer.body[:300]!r}"

    def report(self, reports: Iterable[Poison]) -> None:
        """Run a job for each, and end its pod with these last words."""
        for poison in reports:
            self.team.create(poison.name, workers={"replicas": 1}, runPolicy={"maxRestarts": 0})
        for poison in reports:
            self.team.wait_for("Running", name=poison.name)
            (pod,) = [p for p in self.team.pods(1) if p["metadata"]["name"].startswith(f"{poison.name}-")]
            self._last_words(pod, poison.text)
            self.stored.append(poison.name)

    def _job(self, poison: Poison, status: str | None = None) -> None:
        """Store a job with this spec, or a valid one with this status, also while an operator writes to it."""
        spec = json.dumps(poison_corpus.command()) if status is not None else poison.text
        head = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": {"name": poison.name}}
        text = json.dumps(head)[:-1] + f',"spec":{spec}}}'
        self._post(JOBS.format(self.team.namespace), text, poison.name)
        if status is not None:
            path = f"{JOBS.format(self.team.namespace)}/{poison.name}"

            def stored() -> bool:
                version = self.api.get(path)["metadata"]["resourceVersion"]
                newest = head | {"metadata": {"name": poison.name, "resourceVersion": version}}
                text = json.dumps(newest)[:-1] + f',"spec":{spec},"status":{status}}}'
                return self._send("PUT", f"{path}/status", text).status == 200

            eventually(stored, lambda: poison.name)

    def _put(self, collection: str, poison: Poison) -> None:
        self._post("/" + collection.format(f"namespaces/{self.team.namespace}"), poison.text, poison.name)

    def _post(self, path: str, text: str, name: str) -> None:
        answer = self._send("POST", path, text)
        assert answer.status == 201, f"{name}: {answer.status} {answer.body[:300]!r}"
        self.stored.append(name)

    def _send(self, method: str, path: str, text: str) -> Answer:
        return self.api.send(method, path, text.encode("utf-8", "surrogatepass"))

    def _last_words(self, pod: Raw, message: str) -> None:
        """End a pod of an own job with this message, as its kubelet would."""
        state = {"exitCode": 1, "reason": "Error", "message": message[:4096], "finishedAt": "2026-01-01T00:00:00Z"}
        container = {"name": "trainer", "image": "i:1", "imageID": "", "ready": False, "restartCount": 0}
        status = {"phase": "Failed", "containerStatuses": [container | {"state": {"terminated": state}}]}
        self.team.set_status(pod, status)
