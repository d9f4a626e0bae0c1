"""Pods that are told the name of their node."""

from typing import Any

import pytest

from disttrain_api.names import Role
from disttrain_operator.plan.desired import Site, pod
from tests.builders import a_job

SITE = Site(trainer_image="disttrain/trainer:test", token="a-token")
TOLD = {"name": "DISTTRAIN_NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}


def variables(training: dict[str, Any]) -> list[dict[str, Any]]:
    manifest = pod(a_job(training=training), Role.WORKER, 0, 1, SITE)
    return list(manifest["spec"]["containers"][0]["env"])


@pytest.mark.parametrize("preflight", [True, False])
def test_a_pod_is_told_its_node_where_the_preflight_check_would_name_it(preflight: bool) -> None:
    assert (TOLD in variables({"preflight": preflight})) is preflight
