"""`disttrain why` names the cause and what to do, in faults that a real cluster has, all of them at once."""

from collections.abc import Iterator

import pytest

from tests.e2e.conftest import fresh_namespace
from tests.e2e.faults import FAULTS, OBJECTS, Fault
from tests.e2e.kubectl import Kubectl
from tests.e2e.observe import disttrain

PATIENCE = 400
"""Seconds until the cluster shows a fault: the jobs share the processors of one machine."""


@pytest.fixture(scope="module")
def faulty(operator: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace, restricted and with a quota, that has a job for each fault."""
    with fresh_namespace(operator, "why") as kubectl:
        kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
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
    said = disttrain(faulty, "why", fault.name)
    paragraph, _, todo = said.partition("\n\nWhat to do: ")
    assert [text for text in fault.says if text not in paragraph] == [], said
    assert [text for text in fault.todo if text not in todo] == [], said
