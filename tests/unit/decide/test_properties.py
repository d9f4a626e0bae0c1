"""What holds in every world: whatever fails, whenever the operator crashes, however stale its cache is."""

from collections import Counter
from copy import deepcopy
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from disttrain_api.goodput import by_state
from disttrain_api.report import RankFailure, RankPhase, RestartsInPlace
from disttrain_api.status import GoodputState, JobStatus
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.finish import SETTLING_SECONDS
from disttrain_operator.decide.finished import is_finished
from disttrain_operator.decide.live import Live, Stall
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.news import same_meaning
from tests.builders import NOW, a_claim_template, a_raw_job, a_report, ended, running, waiting, with_sidecar
from tests.soak import SOAK
from tests.suites import GATE
from tests.unit.decide.cluster import Operator, Server, lost, member
from tests.unit.decide.oracle import RULES, Budget, most_lost

INDEX = st.integers(min_value=0, max_value=2)
CODES = st.sampled_from([0, 0, 1, 3, 42, 43, 44, 80, 91, 134, 137, 143])
# Whether it makes a checkpoint, whose program ends first, how, and whether the operator looks before the others end.
MOSTLY = st.sampled_from([True, True, True, False])
LIVES = st.tuples(MOSTLY, INDEX, st.sampled_from([1, 3, 134, 137]), MOSTLY)
COMMAND = {"spec": {"containers": [{"name": "trainer", "image": "an/image:1", "command": ["serve"]}]}}
HUNG = Stall(0, 61, 5, 1.0)
DISRUPTIONS = st.sampled_from(["PreemptionByScheduler", "EvictionByEvictionAPI", "TerminationByKubelet", None])


class Jobs(RuleBasedStateMachine):
    """One job of three pods in a cluster where everything may happen at any time."""

    @initialize(
        max_restarts=st.integers(0, 3),
        backoff=st.sampled_from([0, 10]),
        clean=st.sampled_from(["Running", "All", "None"]),
        rules=st.booleans(),
        success=st.sampled_from(["All", "Any", "First"]),
        trains=st.sampled_from(["", "Recreate", "InPlace"]),
        sidecars=st.booleans(),
    )
    def apply(
        self, max_restarts: int, backoff: int, clean: str, rules: bool, success: str, trains: str, sidecars: bool
    ) -> None:
        policy: dict[str, Any] = {
            "maxRestarts": max_restarts,
            "restartBackoffSeconds": backoff,
            "cleanPodPolicy": clean,
            "startingDeadlineSeconds": 600,
            "successPolicy": {"operator": success},
            **({"failurePolicy": {"rules": RULES[2:] if trains else RULES}} if rules and trains != "InPlace" else {}),
            **({"progressDeadlineSeconds": 60, "restartStrategy": trains} if trains else {}),
        }
        program: dict[str, Any] = {} if trains else {"training": None}
        workers = {"replicas": 3, **({} if trains else {"template": COMMAND})}
        job = a_raw_job(workers=workers, runPolicy=policy, storage=a_claim_template(), **program)
        assert job_facts(job).problems == ()
        job["metadata"]["creationTimestamp"] = timestamp(NOW)
        self.sidecars = sidecars
        """Whether a further container in each pod goes on when the program has ended, until the pod is deleted."""
        self.server = Server(job)
        self.looked_at = NOW
        self.operator = Operator(self.server)
        self.terminal: str | None = None
        self.attempt = self.restarts = 0
        self.made: dict[str, set[str]] = {}
        self.checkpoint = 0
        self.budget = Budget(trains == "InPlace")
        self.done: set[str] = set()
        """Pods that were seen to have succeeded, and the status that followed from it was written."""

    # The operator

    def _step(self, crash_after: int | None = None) -> bool:
        """One reconcile, of which the oracle gets what was seen and written."""
        before, made = self.server.job, len(self.server.created)
        busy = self.operator.step(crash_after)
        if self.server.job is not before:
            self._audit(job_facts(before).status, job_facts(self.server.job).status)
        assert not self.done & {name for name, _ in self.server.created[made:]}, "a success is for good"
        return busy

    def _audit(self, before: JobStatus, after: JobStatus) -> None:
        self._audit_goodput(before, after)
        self._audit_hangs(before, after)
        self.done |= {pod.name for pod in self.operator.seen.pods if pod.program_succeeded}
        lost = [entry.verdict.pod for entry in after.attempts if entry.verdict and entry.verdict.reason == "PodLost"]
        assert not self.done & set(lost), "who has succeeded is not missed"
        unstarted = [entry for entry in after.attempts if entry.verdict and entry.verdict.class_ == "NotStarted"]
        assert all(entry.replacements for entry in unstarted if entry.running_time), "who was there is no symptom"
        assert after.restarts - before.restarts <= 3, "at most one restart for each pod that failed"
        self.budget.observe(self.operator.seen)
        used = self.budget.used
        self.budget.see(self.operator.seen, before, after)
        if is_finished(job_facts(self.server.job)):
            verdict = after.attempts[-1].verdict if after.attempts else None
            if verdict is not None and verdict.reason == "RestartsExhausted":
                assert used >= self._policy["maxRestarts"], "it had a restart left"
            return
        assert after.restarts_since_checkpoint == self.budget.used

    def _audit_goodput(self, before: JobStatus, after: JobStatus) -> None:
        """Every second until the last look has one state, and none is ever taken back."""
        spent, known = (by_state(status.goodput) if status.goodput is not None else {} for status in (after, before))
        assert all(seconds >= known.get(state, 0) for state, seconds in spent.items())
        assert set(known) <= set(spent) <= set(GoodputState)
        assert after.goodput is not None
        if before.completion_time is None:
            self.looked_at = max(self.looked_at, self.server.now)
        assert sum(spent.values()) == (self.looked_at - NOW).total_seconds()
        assert (after.goodput.since, after.goodput.update_time) == (timestamp(NOW), timestamp(self.looked_at))
        assert (after.goodput.state is None) == (after.completion_time is not None)

    def _audit_hangs(self, before: JobStatus, after: JobStatus) -> None:
        """An attempt is taken for one that hangs where all of it runs and its own agent has just said so."""
        if not before.attempts or before.attempts[-1].verdict is not None:
            return
        verdict = next((entry.verdict for entry in after.attempts if entry.number == before.attempt), None)
        if verdict is not None and verdict.class_ == "Hang":
            live, pods = self.operator.seen.live, self.operator.seen.pods
            assert (live.attempt, live.stall.seconds > 60) == (before.attempt, True)
            runs = [pod for pod in pods if pod.attempt == before.attempt and pod.program_started and pod.program_alive]
            assert {pod.index for pod in runs} == {0, 1, 2}
            assert not any(pod.deleting or pod.disruption for pod in runs)

    @rule()
    def reconcile(self) -> None:
        self._step()

    @rule(requests=st.integers(0, 7))
    def reconcile_and_crash(self, requests: int) -> None:
        """The process dies after some of its requests; the next one knows the cluster, and nothing else."""
        self._step(crash_after=requests)
        self.operator = Operator(self.server)

    @rule()
    def reconcile_in_full_view(self) -> None:
        self.operator.deliver(100)
        self.operator.read_job()
        self._step()

    @rule(count=st.integers(1, 4), twice=st.booleans())
    def events_arrive(self, count: int, twice: bool) -> None:
        self.operator.deliver(count, twice=twice)

    @rule()
    def the_watch_breaks_and_lists_again(self) -> None:
        self.operator.relist()

    @rule()
    def the_job_is_read(self) -> None:
        self.operator.read_job()

    # The kubelets and the programs

    @rule(index=INDEX)
    def a_pod_starts(self, index: int) -> None:
        for pod in self._pods(index, "Pending"):
            self.server.put_pod(running(pod))

    @rule(index=INDEX, reason=st.sampled_from(["ErrImagePull", "CreateContainerConfigError"]))
    def a_pod_cannot_start(self, index: int, reason: str) -> None:
        for pod in self._pods(index, "Pending"):
            self.server.put_pod(waiting(pod, reason))

    @rule()
    def a_checkpoint_is_made(self) -> None:
        if len([pod for index in range(3) for pod in self._programs(index)]) == 3:
            self.checkpoint += 10

    @rule(
        phase=st.sampled_from([None, *RankPhase]),
        lost=st.sampled_from([0, 5]),
        stall=st.sampled_from([None, None, Stall(0, 59, 5, 1.0), HUNG]),
        again=st.sampled_from([0, 0, 1, 5]),
        refuses=st.sampled_from([None, "it answers 409"]),
    )
    def an_agent_answers(
        self, phase: str | None = None, lost: int = 0, stall: Any = None, again: int = 0, refuses: str | None = None
    ) -> None:
        """Known long after the pod has ended, maybe. Steps may have been `lost`, and ranks have started `again`."""
        self.operator.refuses = refuses
        failed = {"time": timestamp(self.server.now), "failure": RankFailure(rank=1, signal=9)}
        restarts = RestartsInPlace(count=again, **failed) if again else None
        for pod in self._programs(0):
            report = a_report(max(self.checkpoint - lost, 0), checkpoint=self.checkpoint or None).progress
            report = report.model_copy(update={"phase": phase})
            self.operator.live = Live(pod["metadata"]["uid"], member(pod)[2], report, stall, restarts, frozenset({1}))

    @rule(index=INDEX, code=CODES, reports=st.booleans())
    def a_program_ends(self, index: int, code: int, reports: bool = False) -> None:
        """Its last words tell of the newest checkpoint, which may be of an earlier attempt."""
        report = a_report(self.checkpoint, checkpoint=self.checkpoint or None) if reports else None
        for pod in self._programs(index):
            if not lost(pod):
                pod = ended(pod, code, at=timestamp(self.server.now), report=report)
                self.server.put_pod(with_sidecar(pod) if self.sidecars else pod)

    @rule()
    def what_was_told_to_stop_stops(self) -> None:
        for name, pod in list(self.server.pods.items()):
            if "deletionTimestamp" in pod["metadata"] and not lost(pod):
                self.server.remove_pod(name)

    @rule(index=INDEX, reason=DISRUPTIONS)
    def somebody_deletes_a_pod(self, index: int, reason: str | None) -> None:
        for pod in self._pods(index, "Running", "Pending"):
            if reason is not None:
                self.server.disrupt(pod, reason, ready=True)
            self.server.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"], None)

    @rule(index=INDEX)
    def somebody_deletes_a_pod_by_force(self, index: int) -> None:
        for pod in self._pods(index, "Running", "Pending", "Failed", "Succeeded"):
            self.server.remove_pod(pod["metadata"]["name"])

    @rule(index=INDEX, restarts=st.booleans())
    def a_pod_that_has_succeeded_is_collected(self, index: int, restarts: bool) -> None:
        """And nobody remembers it where the operator `restarts` then."""
        for pod in self._pods(index, "Succeeded"):
            self.server.remove_pod(pod["metadata"]["name"])
        if restarts:
            self.operator = Operator(self.server)

    @rule(index=INDEX)
    def a_node_dies(self, index: int) -> None:
        for pod in self._pods(index, "Running"):
            self.server.disrupt(pod, "DeletionByTaintManager", ready=False)
            self.server.delete_pod(pod["metadata"]["name"], pod["metadata"]["uid"], None)

    # What is common on a cluster and rare in a drawn order of rules

    @rule(lives=st.lists(LIVES, min_size=2, max_size=4), asked=st.booleans(), hung=st.booleans())
    def attempts_run_and_fail(self, lives: list[tuple[bool, int, int, bool]], asked: bool, hung: bool) -> None:
        for checkpoint, first, code, looks in lives:
            for _ in range(3):
                self.reconcile_in_full_view()
                self.what_was_told_to_stop_stops()
                for index in range(3):
                    self.a_pod_starts(index)
            self.reconcile_in_full_view()
            if checkpoint:
                self.a_checkpoint_is_made()
            if asked:
                self.an_agent_answers(stall=HUNG if hung else None)
                self.reconcile_in_full_view()
            self.a_program_ends(first, code, reports=True)
            if looks:
                self.reconcile_in_full_view()
            for index in {0, 1, 2} - {first}:
                self.a_program_ends(index, 1, reports=True)
            self.reconcile_in_full_view()
            self.time_passes_or_steps_back(70)

    # People and clocks

    @rule(seconds=st.integers(-30, 90))
    def time_passes_or_steps_back(self, seconds: int) -> None:
        self.server.now += timedelta(seconds=seconds)

    @rule(suspend=st.booleans())
    def a_person_suspends_or_resumes(self, suspend: bool) -> None:
        self.server.edit(lambda spec: spec.update(suspend=suspend))

    @rule()
    def a_person_deletes_the_service(self) -> None:
        self.server.services.clear()

    @rule(refused=st.booleans())
    def the_quota_comes_or_goes(self, refused: bool) -> None:
        self.server.refuses = "QuotaExceeded" if refused else None

    # What always holds

    @invariant()
    def two_attempts_never_live_side_by_side(self) -> None:
        alive = [pod for pod in self.server.pods.values() if pod["status"]["phase"] in ("Pending", "Running")]
        assert len({member(pod)[2] for pod in alive}) <= 1

    @invariant()
    def a_rank_is_made_twice_in_an_attempt_only_where_it_has_been_removed(self) -> None:
        for name, uid in self.server.created:
            self.made.setdefault(name, set()).add(uid)
        existing = Counter(member(pod) for pod in self.server.pods.values())
        assert all(count == 1 for count in existing.values())

    @invariant()
    def no_pod_is_younger_than_the_status(self) -> None:
        attempts = [member(pod)[2] for pod in self.server.pods.values()]
        assert max(attempts, default=0) <= self._status.get("attempt", 0)

    @invariant()
    def attempts_and_restarts_only_grow(self) -> None:
        attempt, restarts = self._status.get("attempt", 0), self._status.get("restarts", 0)
        assert attempt >= self.attempt
        assert restarts >= self.restarts
        self.attempt, self.restarts = attempt, restarts

    @invariant()
    def counted_restarts_stay_within_the_budget(self) -> None:
        used = self._status.get("restartsSinceCheckpoint", 0), most_lost(self._status)
        assert max(used) <= self._policy["maxRestarts"]

    @invariant()
    def what_has_ended_stays_ended(self) -> None:
        ends = {entry["type"]: entry["status"] for entry in self._status.get("conditions", [])}
        now = next((type_ for type_ in ("Complete", "Failed") if ends.get(type_) == "True"), None)
        assert self.terminal in (None, now)
        assert (now is not None) == (ends.get("Finished") == "True")
        self.terminal = now

    @invariant()
    def the_status_is_what_the_api_takes(self) -> None:
        assert len(self._status.get("attempts", [])) <= 10

    def teardown(self) -> None:
        """Once faults stop, every job comes to rest, and to its right end."""
        if not hasattr(self, "server"):
            return
        self.server.refuses = None
        self.a_person_suspends_or_resumes(False)
        for _ in range(40):
            self._come_to_rest()
            self.what_was_told_to_stop_stops()
            self.time_passes_or_steps_back(70)
            self._come_to_rest()
            for index in range(3):
                self.a_pod_starts(index)
        self._come_to_rest()
        ends = {entry["type"]: entry["status"] for entry in self._status["conditions"]}
        if ends["Finished"] == "True":
            self._hold_nothing()
            return
        assert ends["Running"] == "True"
        assert self.server.services, "it is there while an attempt is under way"
        assert {member(pod)[2] for pod in self.server.pods.values()} == {self._status["attempt"]}
        for index in range(3):
            self.a_program_ends(index, 0)
        self._come_to_rest()
        ends = {entry["type"]: entry["status"] for entry in self._status["conditions"]}
        assert ends["Complete"] == "True"
        self._hold_nothing()

    def _hold_nothing(self) -> None:
        """A finished job leaves nothing that runs, unless its policy keeps it."""
        self.time_passes_or_steps_back(SETTLING_SECONDS)
        self._come_to_rest()
        self.what_was_told_to_stop_stops()
        running = [pod for pod in self.server.pods.values() if pod["status"]["phase"] in ("Pending", "Running")]
        assert not running or self._policy["cleanPodPolicy"] == "None"

    def _come_to_rest(self) -> None:
        for _ in range(30):
            self.operator.deliver(1000)
            self.operator.read_job()
            if not self._step():
                break
        else:
            raise AssertionError(f"not at rest: {self.operator.decide()}")
        decision, written = self.operator.decide(), job_facts(self.server.job).status
        assert decision.actions == ()
        if decision.status is not None:
            assert same_meaning(decision.status, written)
            assert decision.status.goodput.state == written.goodput.state, "the state is no news by itself"

    @property
    def _policy(self) -> dict[str, Any]:
        policy: dict[str, Any] = self.server.job["spec"]["runPolicy"]
        return policy

    @property
    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self.server.job.get("status") or {}
        return status

    def _pods(self, index: int, *phases: str) -> list[dict[str, Any]]:
        return [
            deepcopy(pod)
            for pod in self.server.pods.values()
            if member(pod)[1] == index and pod["status"]["phase"] in phases
        ]

    def _programs(self, index: int) -> list[dict[str, Any]]:
        """Pods of which the program runs."""
        pods = self._pods(index, "Running")
        return [pod for pod in pods if "running" in pod["status"]["containerStatuses"][0]["state"]]


Jobs.TestCase.settings = settings(
    max_examples=1500 if SOAK else 12 if GATE else 50, stateful_step_count=60 if SOAK else 40, deadline=None
)
test_jobs = pytest.mark.timeout(3600 if SOAK else 300)(Jobs.TestCase)
