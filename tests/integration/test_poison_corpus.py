"""Two tenants, the gate on, two replicas of which the leader is killed now and then: one tenant makes everything of
poison_corpus.py, and the other's jobs run as if it were not there."""

import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.api import ApiClient
from tests.cluster.control_plane import ControlPlane
from tests.integration import poison_corpus
from tests.integration.operator_process import CRD, JOBS, OperatorProcess, Raw, Team, eventually
from tests.integration.poison_corpus import Poison

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]

DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/default/leases/disttrain-operator"
GATE = {"schedulingPolicy": {"gang": "Gate"}, "cleanPodPolicy": "All"}
MOST_BYTES = 512 << 20
"""The chart's limit on the operator's memory."""


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


class Mallory:
    """The tenant that makes everything."""

    def __init__(self, api: ApiClient) -> None:
        self.team = Team(api, "mallory")
        self.api = api
        self.stored: list[str] = []

    def job(self, poison: Poison, status: str | None = None) -> None:
        """Store a job with this spec, or a valid one with this status."""
        spec = json.dumps(poison_corpus.command()) if status is not None else poison.text
        head = {"apiVersion": "disttrain.io/v1alpha1", "kind": "DistTrainingJob", "metadata": {"name": poison.name}}
        text = json.dumps(head)[:-1] + f',"spec":{spec}}}'
        self._send("POST", JOBS.format(self.team.namespace), text, poison.name)
        if status is not None:
            path = f"{JOBS.format(self.team.namespace)}/{poison.name}"
            version = self.api.get(path)["metadata"]["resourceVersion"]
            head["metadata"]["resourceVersion"] = version
            text = json.dumps(head)[:-1] + f',"spec":{spec},"status":{status}}}'
            self._send("PUT", f"{path}/status", text, poison.name)

    def put(self, collection: str, poison: Poison) -> None:
        self._send("POST", "/" + collection.format(f"namespaces/{self.team.namespace}"), poison.text, poison.name)

    def _send(self, method: str, path: str, text: str, name: str) -> None:
        answer = self.api.send(method, path, text.encode("utf-8", "surrogatepass"))
        assert answer.status in (200, 201), f"{name}: {answer.status} {answer.body[:300]!r}"
        if method == "POST":
            self.stored.append(name)

    def last_words(self, pod: Raw, message: str) -> None:
        """End a pod of an own job with this message, as its kubelet would."""
        state = {"exitCode": 1, "reason": "Error", "message": message[:4096], "finishedAt": "2026-01-01T00:00:00Z"}
        container = {"name": "trainer", "image": "i:1", "imageID": "", "ready": False, "restartCount": 0}
        status = {"phase": "Failed", "containerStatuses": [container | {"state": {"terminated": state}}]}
        self.team.set_status(pod, status)


class Pair:
    """Two replicas with the gate on."""

    def __init__(self, control_plane: ControlPlane, folder: Path) -> None:
        self.operators = []
        for name in ("one", "two"):
            (folder / name).mkdir()
            flags = ("--leader-elect", f"--replica-name={name}", "--gang-gate", "--lease-namespace=default")
            self.operators.append(OperatorProcess(control_plane, folder / name, *flags))

    def kill_the_leader(self) -> None:
        """SIGKILL, once one leads; it is started again at once."""
        leader = eventually(self._leader, self.logs)
        leader.kill()
        leader.start(wait=False)

    def _leader(self) -> OperatorProcess | None:
        for operator in self.operators:
            if operator.health("readyz") and "disttrain_leader 1.0" in operator.page("metrics"):
                return operator
        return None

    def logs(self) -> str:
        return "\n".join(operator.log()[-3000:] for operator in self.operators)


def tracebacks(operator: OperatorProcess) -> list[str]:
    """Every different error that nobody foresaw, with the line before it."""
    parts = re.findall(r"^(.*)\nTraceback .*\n((?:[ \t].*\n)+)(\S.*)$", operator.log(), re.MULTILINE)
    return sorted({f"{before[-200:]} ... {frames[-400:]} {error[:300]}" for before, frames, error in parts})


def peak_bytes(operator: OperatorProcess) -> int:
    """The most memory that the process has had."""
    assert operator.process is not None
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{operator.process.pid}/status").read_text())
    assert found is not None
    return int(found[1]) << 10


@pytest.fixture(scope="module")
def control_plane() -> Iterator[ControlPlane]:
    with ControlPlane(controller_manager=True, scheduler=True, kwok=True, nodes=2) as started:
        yield started


@pytest.fixture
def mallory(control_plane: ControlPlane) -> Mallory:
    """With everything stored that the definition of today would refuse."""
    definition = yaml.safe_load(CRD.read_text())
    put_definition(control_plane.api, without_schema(definition))
    tenant = Mallory(control_plane.api)
    for poison in poison_corpus.specs():
        tenant.job(poison)
    for poison in poison_corpus.statuses():
        tenant.job(poison, poison.text)
    put_definition(control_plane.api, definition)
    return tenant


class Good:
    """The other tenant: gangs of two pods, one after the other."""

    def __init__(self, api: ApiClient) -> None:
        self.team = Team(api, "good")
        self._numbers = itertools.count()
        self.names: list[str] = []

    def launch(self, count: int) -> None:
        for _ in range(count):
            name = f"good-{next(self._numbers)}"
            self.team.create(name, runPolicy=GATE)
            self.names.append(name)

    def all_run(self, why: Any) -> None:
        def running() -> bool:
            return all(self.team.condition("Running", name)["status"] == "True" for name in self.names)

        eventually(running, lambda: [self._story(), why()], pause=0.2)

    def all_end_well(self) -> None:
        """Let their pods end. No attempt was lost on the way."""
        self.team.finish([pod for pod in self.team.pods(1) if "deletionTimestamp" not in pod["metadata"]])
        for name in self.names:
            self.team.wait_for("Complete", name=name)
            status = self.team.status(name)
            assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 1, 0), status

    def _story(self) -> object:
        return {name: self.team.condition("Running", name) for name in self.names}


def test_a_tenant_that_makes_everything_costs_the_other_nothing(
    control_plane: ControlPlane, mallory: Mallory, tmp_path: Path
) -> None:
    api, good = control_plane.api, Good(control_plane.api)
    pair = Pair(control_plane, tmp_path)
    try:
        for operator in pair.operators:
            operator.start()
        good.launch(2)
        good.all_run(pair.logs)
        pair.kill_the_leader()

        own = mallory.team.create(poison_corpus.OWN, runPolicy=GATE)
        good.launch(2)
        for poison in poison_corpus.pods(own):
            mallory.put("api/v1/{}/pods", poison)
        for collection, poison in poison_corpus.neighbours(own):
            mallory.put(collection, poison)
        pair.kill_the_leader()
        good.launch(2)
        good.all_run(pair.logs)

        reports = list(poison_corpus.reports())
        for poison in reports:
            mallory.team.create(poison.name, workers={"replicas": 1}, runPolicy={"maxRestarts": 0})
        for poison in reports:
            mallory.team.wait_for("Running", name=poison.name)
            (pod,) = [p for p in mallory.team.pods(1) if p["metadata"]["name"].startswith(f"{poison.name}-")]
            mallory.last_words(pod, poison.text)
            mallory.stored.append(poison.name)
        pair.kill_the_leader()
        good.launch(2)
        good.all_run(pair.logs)
        good.all_end_well()
        for poison in reports:
            assert mallory.team.wait_for("Failed", name=poison.name)["message"], "its own failure is still its own"

        assert len(set(mallory.stored)) >= 60, len(set(mallory.stored))
        for operator in pair.operators:
            assert not tracebacks(operator), "\n".join(tracebacks(operator))
            eventually(operator.ready, operator.log)
            assert peak_bytes(operator) < MOST_BYTES
    finally:
        for operator in pair.operators:
            operator.kill()
        api.ask("DELETE", LEASE)

    # Who comes new to all of this serves, too.
    (tmp_path / "fresh").mkdir()
    fresh = OperatorProcess(control_plane, tmp_path / "fresh", "--gang-gate")
    try:
        fresh.start()
        good.launch(1)
        good.names = good.names[-1:]
        good.all_run(fresh.log)
        good.all_end_well()
        assert not tracebacks(fresh), "\n".join(tracebacks(fresh))
        assert peak_bytes(fresh) < MOST_BYTES
    finally:
        fresh.kill()
