"""`disttrain run` on a GPU: ranks are forked from a process that has imported torch, and each starts CUDA itself."""

import pytest

from tests.local.conftest import Workplace, workplace  # noqa: F401 - a fixture
from tests.local.test_restarts_in_place import ends_as_undisturbed, is_held, job


@pytest.mark.gpu_path("restart in place")
@pytest.mark.gpu_only
def test_a_killed_rank_starts_again_in_its_pod_and_the_curve_is_that_of_a_run_without_the_kill(workplace: Workplace):  # noqa: F811
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released))
    run.until(lambda: is_held(run), "it waits behind its second checkpoint")
    run.find("rank 1").kill()
    # What a surviving rank holds in a GPU is gone with it: they go on from the checkpoint.
    ends_as_undisturbed(workplace, run, released, survivors=None)
    assert not run.left()
