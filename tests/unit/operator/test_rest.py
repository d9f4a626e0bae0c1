"""How long a job rests after a look: pods that start one after the other cost few looks, and one that ends waits for
none. A look takes a time of the test's own, and the loop's time passes when the test says so.
"""

from datetime import timedelta

from disttrain_operator.decide.decision import Decision
from tests.builders import NOW, UID
from tests.unit.operator.looking_operator import LOOK, PODS, Operator

LEAST, USUAL = 4 * LOOK, 19 * LOOK


def test_pods_that_start_one_after_the_other_cost_a_twentieth_of_the_time(operator: Operator) -> None:
    """Red where a job rests as long after a look of which nothing came as after others."""
    for index in range(PODS):
        operator.pod(index)
        operator.loop.pass_time(LOOK)
    assert operator.looks <= 1 + PODS * LOOK / USUAL
    operator.loop.pass_time(USUAL)
    looks = operator.looks
    operator.loop.pass_time(10)
    assert operator.looks == looks, "the last pod was looked at"


def test_a_pod_that_ends_waits_for_no_rest(operator: Operator) -> None:
    """Red where the end of a pod is no more urgent than its start."""
    operator.pod(0)
    operator.pod(1)
    assert operator.looks == 1
    operator.pod(2, ends=True)
    assert operator.looks == 2


def test_pods_that_end_one_after_the_other_cost_a_fifth_of_the_time(operator: Operator) -> None:
    """Red where each of them has the job looked at."""
    for index in range(PODS):
        operator.pod(index, ends=True)
        operator.loop.pass_time(LOOK)
    assert PODS * LOOK / LEAST / 2 <= operator.looks <= 2 + PODS * LOOK / LEAST


def test_a_rest_is_over_when_the_decision_asks_for_the_next_look(operator: Operator) -> None:
    """Red where a time that was decided upon, as that of a verdict, waits for the longer rest."""
    between = (LEAST + USUAL) / 2
    operator.decision = Decision("Judging", "", requeue_at=NOW + timedelta(seconds=operator.loop.now + between))
    operator.pod(0)
    assert operator.looks == 1
    operator.loop.pass_time(between - 0.001)
    assert operator.looks == 1
    operator.loop.pass_time(0.002)
    assert operator.looks == 2


def test_a_look_that_has_news_is_followed_by_the_next_one_sooner(operator: Operator) -> None:
    job = operator.world.job(UID)
    assert job is not None
    operator.decision = Decision("Starts", "", status=job.status.model_copy(update={"ready": "1/200"}))
    operator.pod(0)
    assert operator.looks == 1
    operator.pod(1)
    operator.loop.pass_time(LEAST + 0.001)
    assert operator.looks == 2
    operator.pod(2)
    operator.loop.pass_time(LEAST + 0.001)
    assert operator.looks == 2, "nothing came of the look before"
    operator.loop.pass_time(USUAL - LEAST)
    assert operator.looks == 3
