"""`disttrain why` names the cause and what to do, in each situation that the operator's status can show."""

from datetime import timedelta
from typing import Any

import pytest

from disttrain.cluster.remote import RemoteJob
from disttrain.views.why import Why, why
from disttrain_api.names import Reason
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.observed import Job, job_facts
from disttrain_operator.decide.reading import observe
from tests.builders import (
    NOW,
    a_job,
    a_raw_job,
    a_raw_pod,
    an_init_status,
    awaiting_address,
    ended,
    initializing,
    running,
    waiting,
    with_sidecar,
)
from tests.unit.cli.fake_api import TIME, a_condition

LATER = NOW + timedelta(minutes=5)


def held(reason: str, message: str = "the sentence of the operator", **more: Any) -> dict[str, Any]:
    attempts = [{"number": 1, "startTime": TIME}]
    return {"attempt": 1, "attempts": attempts, "conditions": [a_condition("Running", "False", reason, message)]} | more


def failed(reason: str, /, **verdict: Any) -> dict[str, Any]:
    ended = {"reason": reason, "message": "rank 0 did it", **verdict}
    return {
        "attempt": 1,
        "completionTime": TIME,
        "attempts": [{"number": 1, "startTime": TIME, "endTime": TIME, "verdict": ended}],
        "conditions": [
            a_condition("Failed", "True", reason, "rank 0 did it"),
            a_condition("Finished", "True", reason, ""),
        ],
    }


def restarting(reason: str, message: str, /, **verdict: Any) -> dict[str, Any]:
    ended = {"reason": "OOMKilled", "message": "rank 3 ran out of memory", "class": "OutOfMemory", "rank": 3, **verdict}
    first = {"number": 1, "startTime": TIME, "endTime": TIME, "verdict": ended}
    return {
        "attempt": 2,
        "restarts": 1,
        "restartsSinceCheckpoint": 1,
        "attempts": [first, {"number": 2, "startTime": TIME}],
        "conditions": [
            a_condition("Running", "False", reason, message),
            a_condition("Restarting", "True", "GangRestarted", "rank 3 ran out of memory"),
        ],
    }


def runs(**more: Any) -> dict[str, Any]:
    attempt = {"number": 1, "startTime": TIME, "runningTime": TIME}
    condition = a_condition("Running", "True", "AllPodsRunning", "all 2 pods run")
    return {"attempt": 1, "attempts": [attempt], "conditions": [condition]} | more


def waiting_for_a_pod(reason: str, message: str) -> dict[str, Any]:
    """A second attempt, of which a pod was lost."""
    status = restarting(reason, message)
    replacement = {"pod": "a-worker-1-a2", "uid": "u", "time": TIME, "reason": "Drained"}
    status["attempts"][1] |= {"runningTime": TIME, "replacements": [replacement]}
    return status


def progress(**more: Any) -> dict[str, Any]:
    return {"step": 42, "totalSteps": 100, "updateTime": TIME} | more


SUSPENDED = [a_condition("Suspended", "True", "Suspended", "spec.suspend is true; set it to false to resume")]
SUSPENDING = [a_condition("Suspended", "False", "Suspending", "spec.suspend is true: pods write a checkpoint and stop")]

RESTARTED = {
    "number": 1,
    "startTime": TIME,
    "runningTime": TIME,
    "restartsInPlace": 2,
    "lastRestartInPlace": "rank 1 (pod a) was killed by signal 9",
}

SITUATIONS: list[tuple[str, dict[str, Any] | None, dict[str, Any], list[str], list[str]]] = [
    # what, status, spec, what the paragraph says, what is to be done
    ("nobody looks", None, {}, ["no operator has looked at it"], ["disttrain doctor"]),
    ("another's", held("ManagedElsewhere"), {"managedBy": "x.io/y"}, ["names the controller x.io/y"], ["managedBy"]),
    ("no room", held("Unschedulable", "0/3 nodes"), {}, ["since 5m (Unschedulable): 0/3 nodes", "2 pods"], ["doctor"]),
    ("gate", held("WaitingForRoom", "needs 8 pods"), {}, ["needs 8 pods"], ["request fewer or smaller pods"]),
    ("queue", held("Queued", "waiting in queue q"), {}, ["waiting in queue q"], ["kubectl get workloads -n default"]),
    ("no Kueue", held("QueueNotServed"), {}, ["QueueNotServed"], ["administrator"]),
    ("image", held("ImagePullBackOff", 'image "a" cannot be pulled'), {}, ['image "a" cannot be pulled'], []),
    ("quota", held("QuotaExceeded", "exceeded quota; raise it"), {}, ["exceeded quota; raise it"], []),
    ("volume", held("VolumeNotBound"), {}, ["VolumeNotBound"], ["kubectl describe pvc -n default"]),
    ("operator fails", held("OperatorError", "KeyError"), {}, ["KeyError"], ["Report it"]),
    ("old pods", held("WaitingForOldPods"), {}, ["two attempts never run side by side"], ["Nothing"]),
    ("starting", held("WaitingForPods"), {}, ["starting since 5m: 0 of 2 pods run"], []),
    ("address", held("WaitingForAddress", "pods a, b wait"), {}, ["pods a, b wait"], ["endpointslices -n default"]),
    ("pulling", held("Pulling"), {}, ["starting since 5m: 0 of 2 pods run"], []),
    ("mount", held("FailedMount", "no such map; check"), {}, ["since 5m (FailedMount): no such map; check"], []),
    (
        "lost pod",
        waiting_for_a_pod("ReplacingPods", "all wait for it"),
        {},
        [
            "restarting within attempt 2: all wait for it.",
            "a single pod was recreated, last a-worker-1-a2 5m ago (Drai",
        ],
        [],
    ),
    ("lost pod, no room", waiting_for_a_pod("Unschedulable", "0/3"), {}, ["within attempt 2: 0/3."], ["doctor"]),
    ("restart", restarting("WaitingForPods", ""), {}, ["attempt 1 ended, because rank 3 ran out"], ["memory limit"]),
    ("back-off", restarting("BackingOff", "attempt 3 begins at 12:09"), {}, ["Attempt 3 begins at 12:09."], []),
    (
        "hang",
        restarting(
            "WaitingForPods",
            "",
            **{
                "class": "Hang",
                "reason": "ProgressDeadlineExceeded",
                "message": "rank 0 has trained for 700 s without a step; it is in all_reduce (c10d.py:28)",
            },
        ),
        {},
        ["without a step; it is in all_reduce (c10d.py:28)", "(ProgressDeadlineExceeded)"],
        ["Look at where the rank waits"],
    ),
    ("drain", restarting("WaitingForPods", "", **{"class": "Disruption"}), {}, ["not counted"], []),
    (
        "runs",
        runs(progress=progress(samplesPerSecond=99.0)),
        {},
        ["step that is known is 42 of 100", "99 samples/s"],
        [],
    ),
    ("when it was", runs(progress=progress(lastStepTime="2026-01-01T12:04:20Z")), {}, ["logged 40s ago"], []),
    ("no news", runs(progress=progress(updateTime="2026-01-01T11:00:00Z")), {}, ["heard of 65m ago"], ["hangs"]),
    ("no steps", runs(), {}, ["have not reported a step yet", "no `storage`: a restart would begin at step 0"], []),
    ("slow by restarts", runs(restarts=5), {}, ["It is slow since it has restarted 5 times"], []),
    (
        "restarts in place",
        runs(attempts=[RESTARTED]),
        {},
        ["In this attempt ranks were restarted in place 2 times, last because rank 1 (pod a) was killed by signal 9."],
        [],
    ),
    (
        "a slow rank",
        runs(conditions=[*runs()["conditions"], a_condition("Straggling", "True", "RankSlow", "rank 3 is slow")]),
        {},
        ["pods run. Rank 3 is slow."],
        ["Look at that node"],
    ),
    (
        "slow data",
        runs(progress=progress(loadingPercent=83)),
        {},
        ["Its data are slow: rank 0 waits for samples in 83 % of a step."],
        ["`training.dataWorkers`, now 0"],
    ),
    (
        "a rank that seems to hang",
        runs(conditions=[*runs()["conditions"], a_condition("HangSuspected", "True", "HangSuspected", "rank 3 is so")]),
        {},
        ["pods run. Rank 3 is so."],
        ["nothing restarts the job without `runPolicy.progressDeadlineSeconds`"],
    ),
    (
        "a rank that seems to hang, with a deadline",
        runs(conditions=[*runs()["conditions"], a_condition("HangSuspected", "True", "HangSuspected", "rank 3 is so")]),
        {"runPolicy": {"progressDeadlineSeconds": 600}},
        ["pods run. Rank 3 is so."],
        ["the job restarts after `runPolicy.progressDeadlineSeconds`"],
    ),
    ("evaluation", runs(progress=progress(evaluationFailure="no data")), {}, ["Its evaluation failed: no data"], []),
    ("suspended", held("Suspended", conditions=SUSPENDED), {"suspend": True}, ["is suspended"], ["disttrain resume"]),
    ("suspending", held("Suspending", conditions=SUSPENDING), {"suspend": True}, ["is being suspended"], []),
    (
        "done",
        {
            "conditions": [a_condition("Complete", "True"), a_condition("Finished", "True")],
            "progress": progress(
                loss=0.5, metrics=[{"name": "accuracy", "value": 0.9}, {"name": "loss", "value": 0.6}]
            ),
        },
        {},
        ["steps, loss 0.5, accuracy 0.9, held-out loss 0.6."],
        [],
    ),
    ("memory", failed("OOMKilled"), {}, ["failed 5m ago in attempt 1 (OOMKilled): rank 0 did it"], ["memory limit"]),
    ("exhausted", failed("RestartsExhausted", **{"class": "OutOfMemory"}), {}, ["RestartsExhausted"], ["memory limit"]),
    ("data", failed("DataNotFound", **{"class": "Configuration"}), {}, ["would fail the same"], ["correct the path"]),
    ("spec", failed("InvalidSpec"), {}, ["InvalidSpec"], ["disttrain validate"]),
    ("deadline", failed("DeadlineExceeded"), {}, ["(DeadlineExceeded)"], ["activeDeadlineSeconds"]),
    ("nan", failed("NonFiniteLoss"), {}, ["NonFiniteLoss"], ["learning rate"]),
    (
        "no program",
        failed("RankFailed", exitCode=127, message="its command was not found"),
        {},
        [],
        ["Correct the command"],
    ),
    ("no module", failed("RankFailed", message="ModuleNotFoundError (its log"), {}, [], ["Put the module"]),
    ("crash", failed("RankFailed", signal=11, exitCode=139), {}, [], ["native code", "PYTHONFAULTHANDLER=1"]),
    ("killed", failed("RankFailed", signal=9, exitCode=137), {}, [], ["Find out what killed it"]),
    ("exception", failed("RankFailed", exitCode=1), {}, [], ["Correct the program"]),
    (
        "an init container, used up",
        failed("RestartsExhausted", reason="InitContainerFailed", **{"class": "Program"}),
        {},
        [],
        ["Correct the named init container", "submit the job again"],
    ),
]


@pytest.mark.parametrize(
    ("status", "spec", "sentences", "does"), [one[1:] for one in SITUATIONS], ids=[one[0] for one in SITUATIONS]
)
def test_each_situation_has_its_cause_and_what_to_do(status, spec, sentences, does):
    raw = a_raw_job(status=status, **spec)
    raw["metadata"]["creationTimestamp"] = TIME
    found = why(RemoteJob(raw), [], [], LATER)
    assert found.paragraph.startswith("digits ")
    assert "\n" not in found.paragraph
    for text in sentences:
        assert text in found.paragraph
    for text in does:
        assert text in " ".join(found.todo)


def decided(pods: list[dict[str, Any]]) -> tuple[Job, dict[str, Any]]:
    """The job after the operator has looked at its first attempt with these pods, and as it is stored."""
    job, raw = a_job(), a_raw_job()
    for observed in ([], pods):
        decision = decide(job, observe(observed, services=[]), NOW)
        raw["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        job = job_facts(raw)
    return job, raw


@pytest.mark.parametrize(
    ("change", "sentences"),
    [
        (lambda pod: waiting(pod, "ErrImagePull", 'failed to pull "an/image:1": not found'), "cannot be pulled"),
        (lambda pod: waiting(pod, "CreateContainerConfigError", 'secret "s" not found'), 'secret "s" not found'),
        (lambda pod: pod, "0 of 2 pods run"),
        (running, "all of its 2 pods run"),
        (lambda pod: ended(pod, 137, reason="OOMKilled"), "ran out of memory"),
    ],
    ids=["image", "secret", "pending", "running", "killed"],
)
def test_what_the_operator_itself_writes_is_understood(change: Any, sentences: str) -> None:
    pods = [change(a_raw_pod(a_job(), index=index)) for index in range(2)]
    _, raw = decided(pods)
    assert sentences in why(RemoteJob(raw), pods, [], LATER).paragraph


def test_an_init_container_is_named_with_the_way_to_its_log() -> None:
    pods = [initializing(a_raw_pod(a_job()), an_init_status("fetch", {"running": {"startedAt": TIME}}))]
    _, raw = decided(pods)
    found = why(RemoteJob(raw), pods, [], LATER)
    assert f"PodInitializing: init container fetch has run since {TIME}." in found.paragraph
    assert "init containers run first" in found.todo[0]

    failed = {"terminated": {"exitCode": 7, "message": "no such bucket", "finishedAt": TIME}}
    pods = [initializing(a_raw_pod(a_job()), an_init_status("fetch", failed), phase="Failed")]
    _, raw = decided(pods)
    found = why(RemoteJob(raw), pods, [], LATER)
    assert "init container fetch of worker 0" in found.paragraph
    assert "exited with code 7: its log says why (InitContainerFailed)" in found.paragraph
    assert "It said: no such bucket." in found.paragraph
    assert found.todo == ("Correct the named init container, or what it needs",)
    assert found.next[0] == "kubectl logs digits-3f9a1-worker-0-a1 -n default -c fetch"


def test_a_sidecar_of_an_older_attempt_is_what_the_next_one_waits_for() -> None:
    pods = [with_sidecar(ended(a_raw_pod(a_job(), index=index), 1)) for index in range(2)]
    raw = a_raw_job(status=restarting("WaitingForOldPods", ""))
    assert "2 are left, for example digits-3f9a1-worker-0-a1" in why(RemoteJob(raw), pods, [], LATER).paragraph


def test_a_pod_that_starts_is_named_with_its_newest_event() -> None:
    pods = [a_raw_pod(a_job(), index=index) for index in range(2)]
    name = pods[0]["metadata"]["name"]
    event = {"involvedObject": {"name": name}, "reason": "Pulling", "message": "Pulling image x."}
    found: Why = why(RemoteJob(a_raw_job(status=held(Reason.WAITING_FOR_PODS))), pods, [event], LATER)
    assert f"Pod {name} (and 1 more) is on no node yet" in found.paragraph
    assert "The newest event on it: Pulling: Pulling image x." in found.paragraph
    assert "If it does not run within 25m it fails" not in found.paragraph, "the manifest does not say so"


def test_a_pod_that_looks_for_worker_0_is_not_one_that_runs() -> None:
    pods = [awaiting_address(a_raw_pod(a_job())), running(a_raw_pod(a_job(), index=1))]
    found: Why = why(RemoteJob(a_raw_job(status=held(Reason.WAITING_FOR_PODS))), pods, [], LATER)
    assert "1 of 2 pods run" in found.paragraph
    assert (
        f"Pod {pods[0]['metadata']['name']} is on node node1 and looks for the address of worker 0" in found.paragraph
    )


def test_by_when_it_must_run_is_shown_where_the_stored_job_has_it() -> None:
    raw = a_raw_job(status=held("Unschedulable"), runPolicy={"startingDeadlineSeconds": 1800})
    assert "If it does not run within 25m it fails" in why(RemoteJob(raw), [], [], LATER).paragraph


def test_that_nothing_but_its_reason_ends_the_wait_is_shown_where_there_is_no_deadline() -> None:
    found = why(RemoteJob(a_raw_job(status=held("Unschedulable"))), [], [], LATER)
    assert found.paragraph.startswith("digits is pending since 5m (Unschedulable): ")
    assert "It waits for as long as that takes (it has no startingDeadlineSeconds)." in found.paragraph


def test_a_start_that_takes_several_attempts_has_one_end() -> None:
    later = timestamp(LATER)
    ended = {"reason": "Unschedulable", "message": "no room; meanwhile worker 0 gave up", "class": "NotStarted"}
    attempts: list[dict[str, Any]] = [{"number": 1, "startTime": TIME, "endTime": later, "verdict": ended}]
    attempts += [{"number": 2, "startTime": later}]
    conditions = [
        a_condition("Restarting", "True", "GangRestarted", "no room"),
        a_condition("Running", "False", "Unschedulable", "no room"),
    ]
    status = {"attempt": 2, "restarts": 1, "startTime": TIME, "attempts": attempts, "conditions": conditions}
    raw = a_raw_job(status=status, runPolicy={"startingDeadlineSeconds": 1800})
    found = why(RemoteJob(raw), [], [], LATER)
    assert (
        "because no room; meanwhile worker 0 gave up (Unschedulable). Not all of its pods had started, so"
        in found.paragraph
    )
    assert "If it does not run within 25m it fails (startingDeadlineSeconds: 1800)." in found.paragraph
    assert found.todo == ("`kubectl get nodes` and `disttrain doctor` show what the cluster has",)


def test_data_that_are_fast_enough_are_not_named() -> None:
    found = why(RemoteJob(a_raw_job(status=runs(progress=progress(loadingPercent=29)))), [], [], LATER)
    assert "slow" not in found.paragraph


def test_what_the_kubelet_says_of_a_log_that_is_not_there_is_no_word_of_the_program() -> None:
    pod = ended(a_raw_pod(a_job()), 137, message="Error on reading termination message from logs: no such file")
    found = why(RemoteJob(a_raw_job(status=failed("RankFailed", pod=pod["metadata"]["name"]))), [pod], [], LATER)
    assert "It said" not in found.paragraph


def test_a_program_of_ones_own_is_not_said_to_be_about_to_report() -> None:
    raw = a_raw_job(status=runs())
    del raw["spec"]["training"]
    assert "what it does is in its log alone" in why(RemoteJob(raw), [], [], LATER).paragraph


def test_a_silent_node_is_named() -> None:
    pod = running(a_raw_pod(a_job()))
    pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
    found = why(RemoteJob(a_raw_job(status=runs())), [pod], [], LATER)
    assert "has no contact with node node1" in found.paragraph
    assert "kubectl get nodes" in " ".join(found.todo)


def test_the_log_that_is_left_is_named_with_the_rank() -> None:
    pod = ended(a_raw_pod(a_job()), 137)
    found = why(RemoteJob(a_raw_job(status=failed("OOMKilled", rank=0))), [pod], [], LATER)
    assert found.next[0] == "disttrain logs digits --attempt 1 --rank 0"


@pytest.mark.parametrize("status", [{"conditions": 1}, {"phase": [], "attempts": {}}, {"attempts": [{"number": "x"}]}])
def test_a_status_that_cannot_be_read_is_no_traceback(status: dict[str, Any]) -> None:
    raw = a_raw_job(status=status, workers={"replicas": "x"}, runPolicy=[])
    raw["spec"]["workers"] = 7
    assert why(RemoteJob(raw), [{}, {"metadata": {"labels": 1}}], [{}, {"involvedObject": 1}], LATER).paragraph
