"""Jobs whose pods a quota refuses: what they ask for, and when they get in."""

from disttrain_operator.kube.client import Client
from disttrain_operator.queue import WorkQueue
from disttrain_operator.refused import WOKEN_AT_ONCE
from disttrain_operator.snapshot import Key
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.test_reconcile import JOBS, Shell, a_shell, refuse


async def test_jobs_of_a_full_namespace_try_again_a_few_at_a_time(api: FakeApi, client: Client) -> None:
    """A pod that goes costs a few requests, not one for each job that waits."""
    never_by_itself = WorkQueue[Key](first_delay=3600, max_delay=3600)
    shell = await a_shell(api, client, workers=1, queue=never_by_itself)
    keys = [shell.key]
    for number in range(20):
        raw = await api.put(f"{JOBS}/more-{number}", spec=shell.job()["spec"])
        shell.world.jobs.observe(raw)
        keys.append(Key("default", f"more-{number}", raw["metadata"]["uid"]))
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    for key in keys:
        await shell.reconciler.reconcile(key)
    assert list(shell.queue) == [], "all wait for their back-off"
    shell.api.requests.clear()
    shell.reconciler.refused.freed("default")
    assert list(shell.queue) == keys[:WOKEN_AT_ONCE]
    await work_off(shell)
    assert len(api.asked("POST", "/pods")) == WOKEN_AT_ONCE
    api.refusals.clear()
    shell.reconciler.refused.freed("default")
    assert list(shell.queue) == keys[WOKEN_AT_ONCE : 2 * WOKEN_AT_ONCE], "in turn"
    await work_off(shell)
    assert len(shell.pods()) == len(keys), "who gets in wakes the next ones"
    assert len(shell.reconciler.refused) == 0


async def test_a_job_of_a_full_namespace_that_is_looked_at_does_not_ask_before_its_turn(
    api: FakeApi, client: Client
) -> None:
    """Whoever changes it: it is told to be refused, and nothing is asked."""
    shell = await a_shell(api, client, workers=1, queue=WorkQueue[Key](first_delay=3600, max_delay=3600))
    for number in range(100):
        shell.reconciler.refused.again(Key("default", f"other-{number}", f"uid-{number}"), 1)
    api.refusals.append(refuse("/pods", lambda: refusal(403, "Forbidden", "exceeded quota: pods")))
    await shell.reconcile()
    assert len(api.asked("POST", "/pods")) == 1
    for _ in range(3):
        await shell.reconcile()
    assert shell.running()["reason"] == "QuotaExceeded"
    assert len(api.asked("POST", "/pods")) == 1
    assert list(shell.queue) == [], "it comes again by itself"
    api.refusals.clear()
    for _ in range(101):
        shell.reconciler.refused.freed("default")
    await shell.reconcile()
    assert len(shell.pods()) == 1


async def work_off(shell: Shell) -> None:
    """All that is due now, one after the other."""
    while shell.queue.ready:
        key = await shell.queue.get()
        await shell.reconciler.reconcile(key)
        shell.queue.done(key)
