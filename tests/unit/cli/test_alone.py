"""What a job on this machine leaves out, and says so."""

from disttrain.local.alone import alone
from tests.builders import a_job


def test_a_limit_that_nobody_watches_here_is_left_out_and_named() -> None:
    job, left_out = alone(a_job(runPolicy={"progressDeadlineSeconds": 600}))
    assert job.spec is not None
    assert (job.spec.run_policy.progress_deadline_seconds, left_out) == (None, ["progressDeadlineSeconds"])
    assert alone(a_job())[1] == []
