"""What holds in every world: whatever fails, whenever the operator crashes, however stale its cache is."""

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from disttrain_operator.decide.observed import CreateProblem
from tests.builders import a_raw_job, ended, running, waiting
from tests.unit.decide.world import World

INDEX = st.integers(min_value=0, max_value=2)
CODES = st.sampled_from([0, 0, 1, 3, 80, 91, 134, 137, 143])


class Jobs(RuleBasedStateMachine):
    """One job of three pods in a cluster where everything may happen at any time."""

    @initialize(max_restarts=st.integers(0, 2), clean=st.sampled_from(["Running", "All", "None"]))
    def apply(self, max_restarts: int, clean: str) -> None:
        policy = {"maxRestarts": max_restarts, "cleanPodPolicy": clean, "startDeadlineSeconds": 600}
        self.world = World(a_raw_job(workers={"replicas": 3}, runPolicy=policy, storage={"size": "1Gi"}))
        self.terminal: str | None = None
        self.attempt = 0

    @rule(requests=st.integers(0, 6))
    def reconcile_and_crash(self, requests: int) -> None:
        """The operator dies after some of its requests."""
        self.world.step(crash_after=requests)

    @rule()
    def reconcile(self) -> None:
        self.world.step()

    @rule()
    def reconcile_with_every_request_sent_twice(self) -> None:
        """An answer was lost on the way, so the request went out again."""
        self.world.step(repeat=2)

    @rule(index=INDEX)
    def kubelet_starts_a_pod(self, index: int) -> None:
        for pod in self._pods(index, "Pending"):
            self.world.put(running(pod))

    @rule(index=INDEX, reason=st.sampled_from(["ErrImagePull", "CreateContainerConfigError"]))
    def kubelet_cannot_start_a_pod(self, index: int, reason: str) -> None:
        for pod in self._pods(index, "Pending"):
            self.world.put(waiting(pod, reason))

    @rule(index=INDEX, code=CODES)
    def a_program_ends(self, index: int, code: int) -> None:
        at = self.world.now.strftime("%Y-%m-%dT%H:%M:%SZ")
        for pod in self._pods(index, "Running"):
            deletion = pod["metadata"].get("deletionTimestamp")
            done = ended(pod, code, at=at)
            if deletion:
                done["metadata"]["deletionTimestamp"] = deletion
            self.world.put(done)

    @rule()
    def deletions_are_confirmed(self) -> None:
        self.world.confirm_deletions()

    @rule(index=INDEX, remembered=st.booleans())
    def a_person_deletes_a_pod_by_force(self, index: int, remembered: bool) -> None:
        for pod in self._pods(index, "Running")[:1]:
            self.world.remove(pod["metadata"]["name"], remembered=remembered)

    @rule()
    def the_operator_forgets_deleted_pods(self) -> None:
        self.world.gone.clear()

    @rule(seconds=st.integers(-5, 30))
    def time_passes_or_steps_back(self, seconds: int) -> None:
        self.world.pass_time(seconds)

    @rule(suspend=st.booleans())
    def a_person_suspends_or_resumes(self, suspend: bool) -> None:
        self.world.edit(runPolicy={"suspend": suspend})

    @rule(refused=st.booleans())
    def the_quota_comes_or_goes(self, refused: bool) -> None:
        problem = CreateProblem("Pod", "digits-3f9a1-worker-0-a1", 403, "QuotaExceeded", "exceeded quota")
        self.world.problems = [problem] if refused else []

    @invariant()
    def two_attempts_never_live_side_by_side(self) -> None:
        alive = self._pods_in("Pending", "Running")
        assert len({pod["metadata"]["labels"]["disttrain.io/attempt"] for pod in alive}) <= 1

    @invariant()
    def no_pod_is_younger_than_the_status(self) -> None:
        attempts = [int(pod["metadata"]["labels"]["disttrain.io/attempt"]) for pod in self.world.pods.values()]
        assert max(attempts, default=0) <= self.world.job.status.attempt

    @invariant()
    def attempts_only_grow(self) -> None:
        assert self.world.job.status.attempt >= self.attempt
        self.attempt = self.world.job.status.attempt

    @invariant()
    def what_has_ended_stays_ended(self) -> None:
        ends = {
            c.type: c.status for c in self.world.job.status.conditions if c.type in ("Complete", "Failed", "Finished")
        }
        now = next((type_ for type_ in ("Complete", "Failed") if ends.get(type_) == "True"), None)
        assert self.terminal in (None, now)
        assert (now is not None) == (ends.get("Finished") == "True")
        self.terminal = now

    def teardown(self) -> None:
        """Once faults stop, every job comes to rest, and to its right end."""
        if not hasattr(self, "world"):
            return
        self.world.edit(runPolicy={"suspend": False})
        self.world.problems = []
        for _ in range(30):
            self.world.settle().confirm_deletions().pass_time(4).settle().run_all()
        running_ = self.world.condition("Running")[0] == "True"
        assert running_ or self.world.condition("Finished")[0] == "True"
        if running_:
            for index in range(3):
                if self._pods(index, "Running"):
                    self.world.end(index, 0)
            self.world.settle()
            assert self.world.condition("Complete")[0] == "True"

    def _pods_in(self, *phases: str) -> list[dict[str, Any]]:
        return [pod for pod in self.world.pods.values() if pod["status"]["phase"] in phases]

    def _pods(self, index: int, phase: str) -> list[dict[str, Any]]:
        return [
            pod
            for pod in self.world.pods.values()
            if pod["metadata"]["labels"]["disttrain.io/index"] == str(index) and pod["status"]["phase"] == phase
        ]


Jobs.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_jobs = Jobs.TestCase
