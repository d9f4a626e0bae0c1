"""What a job on this machine leaves out, and says so."""

from typing import Any

import pytest

from disttrain.local.alone import alone
from tests.builders import a_job

HERE = {"schedulingPolicy": {"gangScheduler": "None"}, "failureLogInStatus": True}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"ttlSecondsAfterFinished": 600}, "ttlSecondsAfterFinished"),
        ({"runPolicy": {"schedulingPolicy": {"gangScheduler": "Kueue", "queueName": "q"}}}, "schedulingPolicy"),
        ({"runPolicy": {"disruptionBudget": {"minAvailable": 1}}}, "disruptionBudget"),
        ({"managedBy": "kueue.x-k8s.io/multikueue"}, "managedBy"),
    ],
)
def test_what_a_cluster_does_with_a_job_is_left_out_and_named(spec: dict[str, Any], field: str) -> None:
    job, left_out = alone(a_job(**spec))
    assert (job.spec, left_out) == (a_job(runPolicy=HERE).spec, [field])
    assert alone(a_job())[1] == []
