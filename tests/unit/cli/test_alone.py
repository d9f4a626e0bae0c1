"""What a job on this machine leaves out, and says so."""

import pytest

from disttrain.local.alone import alone
from disttrain_api.run_policy import RunPolicy
from disttrain_api.scheduling import GangScheduler, SchedulingPolicy
from tests.builders import a_job

HERE = SchedulingPolicy(gang_scheduler=GangScheduler.NONE)


@pytest.mark.parametrize("field", ["progressDeadlineSeconds", "ttlSecondsAfterFinished"])
def test_a_limit_that_nobody_watches_here_is_left_out_and_named(field: str) -> None:
    job, left_out = alone(a_job(runPolicy={field: 600}))
    assert job.spec is not None
    assert (job.spec.run_policy, left_out) == (RunPolicy(scheduling_policy=HERE), [field])
    assert alone(a_job())[1] == []
