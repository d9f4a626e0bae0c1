"""`disttrain why` names the cause and what to do, in faults that a real cluster has, all of them at once."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.e2e.conftest import fresh_namespace
from tests.e2e.faults import FAULTS, OBJECTS, Fault
from tests.e2e.faulty_jobs import sleeps
from tests.e2e.kubectl import Kubectl
from tests.e2e.manifests import USER_CODE, long_job
from tests.e2e.observe import disttrain, pod, stop_ranks

PATIENCE = 400
"""Seconds until the cluster shows a fault: the jobs share the processors of one machine."""


@pytest.fixture(scope="module")
def faulty(operator: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace, restricted and with a quota, that has a job for each fault."""
    with fresh_namespace(operator, "why") as kubectl:
        kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
        kubectl("create", "configmap", USER_CODE, f"--from-file={Path(__file__).with_name('slow_data.py')}")
        first = [fault.manifest for fault in FAULTS if not fault.after]
        kubectl.apply({"apiVersion": "v1", "kind": "List", "items": [*OBJECTS, *first]})
        yield kubectl


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_cause_is_named_and_what_to_do(faulty: Kubectl, fault: Fault) -> None:
    if fault.after:
        faulty.wait("Finished", fault.after, patience=PATIENCE)
        faulty.apply(fault.manifest)
    type_, reason = fault.shown
    faulty.wait_for(f'{{.status.conditions[?(@.type=="{type_}")].reason}}={reason}', fault.name, patience=PATIENCE)
    explained(faulty, fault.name, fault.says, fault.todo)


def explained(kubectl: Kubectl, name: str, says: Sequence[str], todo: Sequence[str]) -> None:
    """The command names the cause, and what to do."""
    said = disttrain(kubectl, "why", name)
    paragraph, _, advice = said.partition("\n\nWhat to do: ")
    assert [text for text in says if text not in paragraph] == [], said
    assert [text for text in todo if text not in advice] == [], said


def test_what_is_wrong_with_a_job_that_runs_is_named(faulty: Kubectl) -> None:
    """Its data are slow; then a rank hangs; then somebody deletes its pod, and no restart is left."""
    faulty.apply(long_job("slow", storage=None, training={"checkpoint": None}, runPolicy={"maxRestarts": 0}))
    faulty.wait_for("{.status.progress.loadingPercent}", "slow")
    explained(faulty, "slow", ["Its data are slow: rank 0 waits for samples in "], ["`training.dataWorkers`, now 0"])
    stopped = pod(faulty, "slow", "worker", "1")["metadata"]["name"]
    stop_ranks(faulty, stopped)
    faulty.wait("HangSuspected", "slow")
    explained(faulty, "slow", [f"Rank 1 (pod {stopped}", "is stopped by a signal"], ["Look at that rank and its node"])
    faulty("delete", "pod", stopped, "--grace-period=0", "--force")
    faulty.wait("Failed", "slow")
    explained(faulty, "slow", [f"pod {stopped} (worker 1) was deleted while the job ran"], ["what deletes pods"])


def test_that_no_operator_runs_is_named(faulty: Kubectl, operator: Kubectl) -> None:
    replicas = operator.get("deploy", "disttrain")["spec"]["replicas"]
    operator("scale", "deploy/disttrain", "--replicas=0")
    try:
        operator("wait", "--for=delete", "pod", "-l", "app.kubernetes.io/name=disttrain-operator", "--timeout=60s")
        faulty.apply(sleeps("unseen"))
        faulty.until(lambda: "no operator has looked at it" in disttrain(faulty, "why", "unseen"), "it is unseen")
        explained(faulty, "unseen", ["none leads"], ["disttrain doctor"])
    finally:
        operator("scale", "deploy/disttrain", f"--replicas={replicas}")
        operator("rollout", "status", "deploy/disttrain", "--timeout=180s", timeout=200)
