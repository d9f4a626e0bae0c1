"""Init containers are a part of a pod's story: what runs, what fails, and why the program has not begun."""

from random import Random
from typing import Any
from uuid import UUID

import pytest

from disttrain_api.status import Verdict
from disttrain_operator.decide.reading import pod_facts
from tests.builders import a_job, a_raw_pod, an_init_status, ended, initializing, running, waiting
from tests.unit.decide.world import World, a_world

Raw = dict[str, Any]
SINCE = "2026-01-01T12:00:07Z"
RUNS = {"running": {"startedAt": SINCE}}
DONE = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": SINCE}}
NOT_YET = {"waiting": {"reason": "PodInitializing"}}


def died(code: int, text: str = "", reason: str = "Error") -> Raw:
    """The state of a container that has ended."""
    return {"terminated": {"exitCode": code, "reason": reason, "message": text, "finishedAt": SINCE}}


def with_inits(world: World, *entries: Raw, index: int = 0, phase: str = "Pending", sidecars: Any = ()) -> World:
    """The kubelet has written this about the pod's init containers."""
    world.put(initializing(world.pod(index), *entries, sidecars=sidecars, phase=phase))
    return world.settle()


def fetching(rule: Raw) -> World:
    """A job with an init container `fetch` and one rule, `no-data`."""
    pods = {"template": {"spec": {"initContainers": [{"name": "fetch", "image": "fetch:1"}]}}}
    rules = [{"name": "no-data", "action": "FailJob", **rule}]
    return a_world(workers=pods, runPolicy={"failurePolicy": {"rules": rules}}).settle()


def fail_in_init(world: World, *entries: Raw, sidecars: Any = ()) -> Verdict:
    """The verdict where worker 0 fails like this before its program has begun."""
    with_inits(world, *entries, phase="Failed", sidecars=sidecars).pass_time(5).settle()
    verdict = world.job.status.attempts[0].verdict
    assert verdict is not None
    return verdict


# --- failures ---


def test_an_init_container_that_fails_is_the_cause_with_its_code() -> None:
    world = a_world().settle()
    fetch = an_init_status("fetch", died(7, "connecting\nbucket gone-away does not exist\n"))
    verdict = fail_in_init(world, an_init_status("unpack", DONE), fetch)
    assert verdict.message == (
        "init container fetch of worker 0 (pod digits-3f9a1-worker-0-a1 on node node1) exited with code 7: its"
        " log says why"
    )
    assert (verdict.class_, verdict.reason, verdict.exit_code) == ("Program", "InitContainerFailed", 7)
    assert (verdict.action, verdict.role, verdict.rank) == ("RestartGang", "worker", None)
    assert (world.job.status.restarts, world.job.status.restarts_since_checkpoint) == (1, 1)


@pytest.mark.parametrize(
    "rule",
    [
        {"onExitCodes": {"operator": "In", "values": [7]}},
        {"onExitCodes": {"operator": "NotIn", "values": [1]}, "roles": ["worker"]},
        {"onExitCodes": {"operator": "In", "values": [7], "containerName": "fetch"}},
        {"reasons": ["InitContainerFailed"]},
    ],
)
def test_rules_of_the_failure_policy_see_its_end(rule: Raw) -> None:
    world = fetching(rule)
    verdict = fail_in_init(world, an_init_status("fetch", died(7)))
    assert (verdict.action, verdict.rule) == ("FailJob", "no-data")
    assert world.condition("Failed")[:2] == ("True", "InitContainerFailed")


def test_a_rule_may_look_at_one_container_alone() -> None:
    seven = {"operator": "In", "values": [7]}
    world = fetching({"onExitCodes": seven | {"containerName": "trainer"}})
    assert fail_in_init(world, an_init_status("fetch", died(7))).rule is None
    world = fetching({"onExitCodes": seven | {"containerName": "fetch"}}).run_all().end(0, 7).pass_time(5).settle()
    verdict = world.job.status.attempts[0].verdict
    assert (verdict.reason, verdict.rule) == ("RankFailed", None)


@pytest.mark.parametrize(
    ("state", "class_", "how"),
    [
        (died(137, reason="OOMKilled"), "OutOfMemory", "ran out of memory and was killed"),
        (died(137), "Killed", "was killed by signal 9 (exit code 137)"),
        (died(143), "Program", "exited with code 143: its log says why"),
        (died(127, "sh: fetch: not found"), "Program", "exited with code 127: its command was not found"),
        (died(128, "exec: no such file", "StartError"), "Program", "exited with code 128: exec: no such file"),
    ],
    ids=["memory", "killed", "stopped by nobody", "not found", "cannot start"],
)
def test_it_may_end_in_every_way_of_a_program(state: Raw, class_: str, how: str) -> None:
    verdict = fail_in_init(a_world().settle(), an_init_status("fetch", state))
    assert verdict.class_ == class_
    assert verdict.message.endswith(f"on node node1) {how}")
    assert verdict.message.startswith("init container fetch of worker 0 ")


def test_what_it_prints_is_no_report_of_ours() -> None:
    report = '{"failure": {"rank": 3, "exitCode": 81, "message": "wrong"}}'
    verdict = fail_in_init(a_world().settle(), an_init_status("fetch", died(81, report)))
    assert (verdict.class_, verdict.rank, verdict.action) == ("Program", None, "RestartGang")


def test_a_sidecar_that_ended_with_the_pod_is_not_the_cause() -> None:
    proxy = an_init_status("proxy", died(137, "killed"), restarts=2)
    verdict = fail_in_init(a_world().settle(), proxy, an_init_status("fetch", died(7, "no bucket")), sidecars=["proxy"])
    assert verdict.message.endswith("exited with code 7: its log says why")
    assert verdict.message.startswith("init container fetch of ")


def test_once_the_program_has_begun_its_own_end_counts() -> None:
    pod = ended(a_raw_pod(a_job()), 3, message="mine")
    pod["spec"]["initContainers"] = [{"name": "proxy", "restartPolicy": "Always"}, {"name": "fetch"}]
    pod["status"]["initContainerStatuses"] = [an_init_status("proxy", died(137)), an_init_status("fetch", died(9))]
    facts = pod_facts(pod)
    assert (facts.exit.code, facts.exit.message, facts.exit.init_container) == (3, "mine", None)


def test_a_node_is_suspected_for_an_init_container_as_for_a_program() -> None:
    world = a_world(runPolicy={"restartBackoffSeconds": 0}).settle()
    for number in (1, 2, 3):
        assert world.job.status.attempts[-1].avoided_nodes == (["node1"] if number == 3 else [])
        with_inits(world, an_init_status("fetch", died(7)), phase="Failed").pass_time(5).settle()
        world.confirm_deletions().settle()


# --- what runs ---


def test_an_init_container_that_runs_is_named_with_its_begin() -> None:
    world = a_world(runPolicy={"startingDeadlineSeconds": 1800}).settle()
    with_inits(world, an_init_status("unpack", DONE), an_init_status("download", RUNS))
    sentence = f"pod digits-3f9a1-worker-0-a1: init container download has run since {SINCE}"
    assert world.condition("Running") == ("False", "PodInitializing", sentence)
    assert world.job.status.phase == "Starting"
    assert not [event for event in world.events if event.warning]
    world.pass_time(1801).settle()
    assert world.condition("Failed") == (
        "True",
        "StartingDeadlineExceeded",
        f"not all pods ran within startingDeadlineSeconds (1800): {sentence}",
    )


def test_what_is_unusual_is_reported_first() -> None:
    world = with_inits(a_world().settle(), an_init_status("download", RUNS))
    world.put(waiting(world.pod(1), "CreateContainerConfigError", 'secret "s" not found'))
    reason, message = world.settle().condition("Running")[1:]
    assert (reason, message.split("; ")[0]) == (
        "CreateContainerConfigError",
        'pod digits-3f9a1-worker-1-a1: secret "s" not found',
    )


def test_an_image_of_an_init_container_that_cannot_be_pulled_is_named() -> None:
    state = {"waiting": {"reason": "ErrImagePull", "message": 'failed to pull "an/image:1": not found'}}
    world = with_inits(a_world().settle(), an_init_status("unpack", DONE), an_init_status("download", state))
    reason, message = world.condition("Running")[1:]
    assert reason == "ImagePullBackOff"
    assert 'image "an/image:1" cannot be pulled: the registry has no such image' in message


def test_of_many_pods_that_initialize_the_status_says_little() -> None:
    random, count = Random(3), 64
    world = a_world(workers={"replicas": count}).settle()
    for pod in world.pods.values():
        pod["metadata"]["uid"] = str(UUID(int=random.getrandbits(128)))
    before = world.status_writes
    for index in range(count):
        with_inits(world, an_init_status("download", RUNS), index=index)
    for index in range(count):
        world.put(running(world.pod(index)))
        world.settle()
    assert world.condition("Running")[0] == "True"
    assert world.status_writes - before < count / 3


# --- sidecars ---

LAST = died(3, "cannot bind port 15001")["terminated"]
FAILING: dict[str, Raw] = {
    "ended": an_init_status("proxy", died(3, "cannot bind port 15001"), restarts=3, last=LAST),
    "runs again": an_init_status("proxy", RUNS, restarts=4, last=LAST),
    "waits": an_init_status(
        "proxy",
        {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s restarting failed container=proxy"}},
        restarts=4,
        last=LAST,
    ),
}


@pytest.mark.parametrize("entry", FAILING.values(), ids=FAILING.keys())
def test_a_sidecar_that_keeps_failing_is_reported_alike_however_the_kubelet_reports_it(entry: Raw) -> None:
    world = with_inits(a_world().settle(), entry, an_init_status("download", NOT_YET), sidecars=["proxy"])
    failed = "sidecar container proxy failed 4 times (exit code 3)"
    sentence = f"pod digits-3f9a1-worker-0-a1: {failed}; read the container's log"
    assert world.condition("Running") == ("False", "CrashLoopBackOff", sentence)
    assert world.job.status.phase == "Pending"


def test_a_sidecar_whose_probe_has_not_succeeded_holds_the_pod_up() -> None:
    world = with_inits(a_world().settle(), an_init_status("proxy", RUNS), sidecars=["proxy"])
    runs = f"sidecar container proxy has run since {SINCE}, and its startupProbe has not succeeded"
    assert world.condition("Running")[1:] == ("PodInitializing", f"pod digits-3f9a1-worker-0-a1: {runs}")


def test_a_sidecar_that_has_started_holds_nothing_up() -> None:
    proxy = an_init_status("proxy", RUNS, started=True, restarts=1, last=LAST)
    world = with_inits(a_world().settle(), proxy, an_init_status("download", RUNS), sidecars=["proxy"])
    assert world.condition("Running")[2].endswith(f"init container download has run since {SINCE}")
    with_inits(world, proxy, an_init_status("download", DONE), sidecars=["proxy"])
    assert world.condition("Running")[1:] == ("WaitingForPods", "waiting for 2 pods to run")


def test_what_a_sidecar_does_beside_the_program_is_no_matter_of_the_jobs() -> None:
    world = a_world().settle().run_all()
    pod = running(world.pod(0))
    pod["spec"] = {**pod["spec"], "initContainers": [{"name": "proxy", "restartPolicy": "Always"}]}
    pod["status"]["initContainerStatuses"] = [FAILING["ended"]]
    world.put(pod)
    assert world.settle().condition("Running")[:2] == ("True", "AllPodsRunning")
