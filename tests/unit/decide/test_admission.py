"""A gang behind the operator's own gate: held, let go together, taken back where a part finds no room."""

from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

import pytest

from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, Decision, DeletePod, ReleasePod
from disttrain_operator.decide.observed import Admission, CreateProblem, job_facts
from disttrain_operator.decide.reading import observe
from disttrain_operator.plan.identity import child_name
from tests.builders import NOW, a_raw_job, a_raw_pod, ended, running

WHY = "needs 2 pods x 8 nvidia.com/gpu; 1 fit"
NO_WORD = Admission()
NO_ROOM = Admission(why=WHY)


@dataclass
class Gated:
    """A job of two pods, decided on with whatever the gate says."""

    raw: dict[str, Any]
    now: datetime = NOW
    pods: dict[int, dict[str, Any]] = field(default_factory=dict)
    problems: tuple[CreateProblem, ...] = ()

    def decide(self, answer: Admission | None) -> Decision:
        """Decide, and write the status."""
        job = job_facts(self.raw)
        services = [child_name(job.name, job.uid)] if self.pods else []
        decision = decide(job, observe(self.pods.values(), (), self.problems, services, answer), self.now)
        if decision.status is not None:
            self.raw["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        return decision

    def hold(self, *indices: int) -> "Gated":
        """Pods of the current attempt come into being behind the gate."""
        for index in indices:
            pod = a_raw_pod(job_facts(self.raw), index=index, attempt=self.raw["status"]["attempt"])
            pod["spec"] = {"schedulingGates": [{"name": "disttrain.io/gang"}]}
            held = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated"}
            pod["status"]["conditions"] = [held]
            self.pods[index] = pod
        return self

    def let_go(self, *indices: int, node: str | None = "node1") -> "Gated":
        for index in indices:
            pod = self.pods[index]
            pod["spec"] = {"nodeName": node} if node else {}
            pod["metadata"]["annotations"] = {"disttrain.io/released-at": self.now.strftime("%Y-%m-%dT%H:%M:%SZ")}
            refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "taken"}
            pod["status"]["conditions"] = [] if node else [refused]
        return self

    def run(self) -> "Gated":
        self.pods = {index: running(pod) for index, pod in self.pods.items()}
        return self

    def wait(self, seconds: float) -> "Gated":
        self.now += timedelta(seconds=seconds)
        return self

    def running_reason(self) -> tuple[str, str]:
        entry = next(entry for entry in self.raw["status"]["conditions"] if entry["type"] == "Running")
        return entry["reason"], entry["message"]

    def admitted(self) -> Admission:
        return Admission(tuple((pod["metadata"]["uid"], f"node{i}") for i, pod in self.pods.items()))


def a_gated(begun: bool = True, **policy: Any) -> Gated:
    scheduling = {"gangScheduler": "Gate", **policy.pop("scheduling", {})}
    gated = Gated(a_raw_job(runPolicy={"schedulingPolicy": scheduling, **policy}))
    if begun:
        gated.decide(NO_WORD)
        gated.hold(0, 1)
    return gated


def of_kind(decision: Decision, kind: type) -> list[Any]:
    return [action for action in decision.actions if isinstance(action, kind)]


def test_all_pods_are_made_behind_the_gate() -> None:
    decision = a_gated(begun=False).decide(NO_WORD)
    assert [pod.gated for pod in of_kind(decision, CreatePod)] == [True, True]


def test_pods_of_other_gangs_are_made_without_a_gate() -> None:
    decision = Gated(a_raw_job()).decide(None)
    assert [pod.gated for pod in of_kind(decision, CreatePod)] == [False, False]


def test_until_the_gate_has_decided_nothing_is_reported_of_it() -> None:
    gated = a_gated()
    before = gated.raw["status"]
    decision = gated.decide(NO_WORD)
    assert decision.actions == ()
    assert gated.raw["status"]["conditions"] == before["conditions"]


def test_an_admitted_gang_goes_as_a_whole_and_the_status_is_not_written() -> None:
    gated = a_gated()
    before = gated.running_reason()
    releases = of_kind(gated.decide(gated.admitted()), ReleasePod)
    assert [(pod.uid, pod.node) for pod in releases] == list(gated.admitted().nodes)
    assert gated.running_reason() == before
    held = gated.pods[0]["status"]["conditions"]
    gated.let_go(0, 1).wait(1)
    gated.pods[0]["status"]["conditions"] = held  # the scheduler comes later
    assert gated.decide(NO_WORD).actions == ()
    assert gated.running_reason() == before
    gated.run().decide(NO_WORD)
    assert gated.running_reason()[0] == "AllPodsRunning"
    assert gated.raw["status"]["attempts"][0]["admittedTime"] == "2026-01-01T12:00:00Z"


def test_only_what_is_still_held_is_let_go() -> None:
    gated = a_gated()
    answer = gated.admitted()
    gated.let_go(1)
    assert [pod.uid for pod in of_kind(gated.decide(answer), ReleasePod)] == [gated.pods[0]["metadata"]["uid"]]


def test_a_gang_without_room_says_why_and_is_pending() -> None:
    gated = a_gated()
    decision = gated.decide(NO_ROOM)
    assert gated.running_reason() == ("WaitingForRoom", WHY)
    assert gated.raw["status"]["phase"] == "Pending"
    assert [event.reason for event in decision.events] == ["WaitingForRoom"]
    assert gated.decide(NO_ROOM).events == ()


def test_it_waits_for_ever_without_a_timeout() -> None:
    gated = a_gated(startingDeadlineSeconds=60).wait(10**6)
    assert gated.decide(NO_ROOM).actions == ()
    assert gated.running_reason()[0] == "WaitingForRoom"


def test_a_gang_that_is_not_admitted_in_time_fails_with_the_reason() -> None:
    gated = a_gated(scheduling={"timeoutSeconds": 60}).wait(59)
    decision = gated.decide(NO_ROOM)
    assert decision.requeue_at == NOW + timedelta(seconds=60)
    gated.wait(1).decide(NO_ROOM)
    assert gated.running_reason() == ("NoRoom", f"no room within timeoutSeconds (60) of schedulingPolicy: {WHY}")


def test_room_at_the_last_moment_is_taken() -> None:
    gated = a_gated(scheduling={"timeoutSeconds": 60}).wait(61)
    assert len(of_kind(gated.decide(gated.admitted()), ReleasePod)) == 2


def test_the_starting_deadline_counts_from_the_release() -> None:
    gated = a_gated(startingDeadlineSeconds=60).wait(1000).let_go(0, 1).wait(59)
    gated.decide(NO_WORD)
    assert gated.running_reason()[0] == "WaitingForPods"
    gated.wait(1).decide(NO_WORD)
    assert gated.running_reason()[0] == "StartingDeadlineExceeded"


def test_without_a_deadline_what_was_let_go_is_waited_for() -> None:
    gated = a_gated().let_go(0, 1).wait(10**6)
    gated.decide(NO_WORD)
    assert gated.running_reason()[0] == "WaitingForPods"
    assert gated.raw["status"]["phase"] == "Starting"


def test_pods_that_cannot_be_created_fail_the_job_at_the_starting_deadline() -> None:
    gated = a_gated(startingDeadlineSeconds=60).wait(60)
    del gated.pods[1]
    gated.problems = (CreateProblem("Pod", "digits-3f9a1-worker-1-a1", 403, "QuotaExceeded", "exceeded quota"),)
    gated.decide(NO_WORD)
    assert gated.running_reason()[0] == "QuotaExceeded"
    assert gated.raw["status"]["phase"] == "Failed"


def test_a_pod_whose_room_is_lost_is_made_again() -> None:
    gated = a_gated().let_go(0).let_go(1, node=None).wait(29)
    lost = Admission(lost=frozenset({gated.pods[1]["metadata"]["uid"]}))
    assert gated.decide(lost).actions == ()
    decision = gated.wait(1).decide(lost)
    assert [pod.uid for pod in of_kind(decision, DeletePod)] == [gated.pods[1]["metadata"]["uid"]]
    assert [(event.reason, event.warning) for event in decision.events] == [("RoomLost", True)]
    assert gated.running_reason()[0] == "RoomLost"
    assert gated.running_reason()[1].endswith("was released and not scheduled within 30 s: taken")
    del gated.pods[1]
    (made,) = of_kind(gated.decide(NO_WORD), CreatePod)
    assert (made.index, made.attempt, made.gated) == (1, 1, True)
    gated.hold(1)
    assert [pod.uid for pod in of_kind(gated.decide(gated.admitted()), ReleasePod)] == [
        gated.pods[1]["metadata"]["uid"]
    ]


def test_half_a_gang_whose_rest_finds_no_room_is_taken_back_uncounted() -> None:
    gated = a_gated().let_go(0)
    decision = gated.decide(NO_ROOM)
    assert [pod.uid for pod in of_kind(decision, DeletePod)] == [pod["metadata"]["uid"] for pod in gated.pods.values()]
    assert [(event.reason, event.warning) for event in decision.events] == [("RoomLost", True)]
    status = gated.raw["status"]
    assert (status["attempt"], status["restarts"]) == (2, 0)
    assert status["attempts"][0]["verdict"]["reason"] == "RoomLost"
    gated.pods.clear()
    assert [pod.attempt for pod in of_kind(gated.decide(NO_WORD), CreatePod)] == [2, 2]


def test_a_running_gang_is_not_the_gates_business() -> None:
    gated = a_gated().let_go(0, 1).run()
    gated.decide(NO_WORD)
    for answer in (None, NO_WORD, NO_ROOM):
        assert gated.decide(answer).actions == ()
        assert gated.running_reason()[0] == "AllPodsRunning"


@pytest.mark.parametrize("begun", [False, True])
def test_without_a_gate_the_job_fails_and_says_what_to_do(begun: bool) -> None:
    gated = a_gated(begun)
    decision = gated.decide(None)
    assert gated.running_reason()[0] == "GateOff"
    assert "gangGate.enabled" in gated.running_reason()[1]
    assert not of_kind(decision, CreatePod)


def test_a_gang_that_was_let_go_by_an_operator_with_a_gate_comes_up_without_it() -> None:
    gated = a_gated().let_go(0, 1)
    gated.decide(None)
    assert gated.running_reason()[0] == "WaitingForPods"
    gated.run().decide(None)
    assert gated.running_reason()[0] == "AllPodsRunning"


def test_the_same_world_gives_the_same_decision() -> None:
    gated = a_gated()
    assert gated.decide(gated.admitted()) == gated.decide(gated.admitted())


@pytest.mark.parametrize(
    ("answer", "why"), [(Admission(why="no room"), "no room"), (Admission(), "waiting until all pods have room")]
)
def test_who_gives_up_waiting_for_a_pod_that_the_gate_holds_is_a_symptom(answer: Admission, why: str) -> None:
    """It was let go with the others, and lost its room to somebody else."""
    gated = a_gated(maxRestarts=0).hold(0, 1)
    gated.let_go(0, 1)
    gated.decide(Admission())
    gated.hold(1).pods[0] = ended(running(gated.pods[0]), 1, at=gated.now.strftime("%Y-%m-%dT%H:%M:%SZ"))
    gated.decide(answer)
    attempt = gated.raw["status"]["attempts"][0]
    assert (attempt["verdict"]["class"], attempt["verdict"]["reason"]) == ("NotStarted", "WaitingForRoom")
    assert attempt["verdict"]["message"].startswith(f"{why}; meanwhile worker 0 ")
    assert attempt["admittedTime"] == "2026-01-01T12:00:00Z", "the start deadline counts from it"
