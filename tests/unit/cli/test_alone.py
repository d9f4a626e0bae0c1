"""What a job on this machine leaves out, and says so."""

from typing import Any

import pytest

from disttrain.local.alone import alone
from tests.builders import a_job

HERE = {"schedulingPolicy": {"gangScheduler": "None"}, "failureLogInStatus": True}


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        ({"runPolicy": {"progressDeadlineSeconds": 600}}, "progressDeadlineSeconds"),
        ({"ttlSecondsAfterFinished": 600}, "ttlSecondsAfterFinished"),
    ],
)
def test_a_limit_that_nobody_watches_here_is_left_out_and_named(spec: dict[str, Any], field: str) -> None:
    job, left_out = alone(a_job(**spec))
    assert (job.spec, left_out) == (a_job(runPolicy=HERE).spec, [field])
    assert alone(a_job())[1] == []
