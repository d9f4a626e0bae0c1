"""Several gangs behind one gate, with the real cache, gatekeeper and decisions, in random events: the operator dies,
watches lag, others take room. No node is ever promised twice, and in the end whoever can run runs."""

import asyncio
from copy import deepcopy
from datetime import datetime, timedelta
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import CreatePod, DeletePod, ReleasePod
from disttrain_operator.decide.observed import job_facts
from disttrain_operator.decide.policies.admission import SCHEDULING_SECONDS
from disttrain_operator.decide.reading import observe
from disttrain_operator.gatekeeper import Gatekeeper
from disttrain_operator.kept_pod import keep_pod, read_pod
from disttrain_operator.plan.identity import child_name
from disttrain_operator.plan.schedulers import release_patch
from disttrain_operator.snapshot import World
from tests.builders import NOW, a_raw_job, a_raw_pod, merge, running
from tests.soak import SOAK
from tests.suites import GATE

Raw = dict[str, Any]
GPUS = {"a": 4, "b": 4, "c": 2}


class Fleet:
    """The API server's truth, and an operator that sees it by watches."""

    def __init__(self, sizes: list[tuple[int, int]]) -> None:
        self.version, self.made, self.now = 10, 0, NOW
        self.pods: dict[str, Raw] = {}
        self.jobs: dict[str, Raw] = {}
        self.gpus: dict[str, int] = {}
        self.requeues: dict[str, datetime | None] = {}
        self.gate: Gatekeeper | None = None
        for number, (pods, gpus) in enumerate(sizes):
            name = f"job{number}"
            policy = {"schedulingPolicy": {"gangScheduler": "Gate"}, "startingDeadlineSeconds": 10**6}
            raw = a_raw_job(name, workers={"replicas": pods}, runPolicy=policy)
            raw["metadata"] |= {"uid": f"{number}0000-{name}", "creationTimestamp": f"2026-01-01T12:00:{number:02}Z"}
            self.jobs[raw["metadata"]["uid"]] = self._next(raw)
            self.gpus[raw["metadata"]["uid"]] = gpus

    def _next(self, raw: Raw) -> Raw:
        self.version += 1
        raw["metadata"]["resourceVersion"] = str(self.version)
        return raw

    # The operator.

    async def start_operator(self) -> None:
        """A process without memory; its gate's watch of pods lags until `deliver_events`. The one before it is gone."""
        await self.stop_operator()
        self.world = World()
        self.gate = Gatekeeper(self.world, lambda uid: None, now=lambda: self.now)
        nodes = [self._node(name) for name in GPUS]
        self.gate.nodes.replace([self.gate.nodes.trimmed(raw) for raw in nodes], self.version)
        await self.deliver_events()

    async def stop_operator(self) -> None:
        if self.gate is not None:
            await self.gate.close()

    async def deliver_events(self) -> None:
        self.gate.pods.replace([self.gate.pods.trimmed(deepcopy(raw)) for raw in self.pods.values()], self.version)
        self.world.jobs.replace([self.world.jobs.trimmed(raw) for raw in self.jobs.values()], self.version)
        await self.gate.run_cycle()

    def step(self, number: int, requests: int = 1000) -> bool:
        """Look at one job; the process may die after some requests. Returns whether there was anything to do."""
        raw = list(self.jobs.values())[number % len(self.jobs)]
        job = job_facts(raw)
        own = [read_pod(keep_pod(pod)) for pod in self.pods.values() if _job(pod) == job.uid]
        decision = decide(
            job, observe(own, (), (), [child_name(job.name, job.uid)], self.gate.admission(job)), self.now
        )
        self.requeues[job.uid] = decision.requeue_at
        changed = False
        if decision.status is not None and decision.status != job.status:
            raw["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
            self._next(raw)
            changed = True
        for action in decision.actions[:requests]:
            self._act(raw, action)
        return changed or bool(decision.actions)

    def _act(self, job: Raw, action: Any) -> None:
        if isinstance(action, CreatePod):
            self.made += 1
            facts = job_facts(job)
            pod = a_raw_pod(facts, index=action.index, attempt=action.attempt, uid=f"pod-{self.made}")
            requests = {"resources": {"requests": {"gpu": str(self.gpus[facts.uid])}}}
            pod["spec"] = {"containers": [requests], "schedulingGates": [{"name": "disttrain.io/gang"}]}
            assert action.gated
            self.pods.setdefault(pod["metadata"]["name"], self._next(pod))
        elif isinstance(action, ReleasePod):
            pod = self.pods[action.name]
            if pod["metadata"]["uid"] == action.uid and pod["spec"].get("schedulingGates"):
                self.pods[action.name] = self._next(merge(pod, release_patch(pod, action.node, action.at)))
        elif (
            isinstance(action, DeletePod)
            and self.pods.get(action.name, {}).get("metadata", {}).get("uid") == action.uid
        ):
            del self.pods[action.name]

    # The rest of the cluster.

    def _node(self, name: str) -> Raw:
        status = {
            "allocatable": {"gpu": str(GPUS[name]), "pods": "100"},
            "conditions": [{"type": "Ready", "status": "True"}],
        }
        return {"metadata": {"name": name, "uid": name, "resourceVersion": "1"}, "spec": {}, "status": status}

    def free(self, node: str) -> int:
        return GPUS[node] - sum(_gpus(pod) for pod in self.pods.values() if pod["spec"].get("nodeName") == node)

    def schedule(self) -> None:
        """The cluster's scheduler, and the kubelets."""
        for name, pod in list(self.pods.items()):
            node = (pod["metadata"].get("annotations") or {}).get("disttrain.io/reserved-node")
            if node and "nodeName" not in pod["spec"] and self.free(node) >= _gpus(pod):
                pod["spec"]["nodeName"] = node
                self.pods[name] = self._next(running(pod))
                self.pods[name]["spec"]["nodeName"] = node

    def take_room(self, node: str) -> None:
        """A pod of somebody else, scheduled behind the gate's back."""
        if self.free(node) >= 1:
            name = f"stranger-{self.version}"
            requests = {"resources": {"requests": {"gpu": "1"}}}
            spec = {"nodeName": node, "containers": [requests]}
            raw = {"metadata": {"name": name, "uid": name}, "spec": spec, "status": {"phase": "Running"}}
            self.pods[name] = self._next(raw)

    def strangers_leave(self) -> None:
        self.pods = {name: pod for name, pod in self.pods.items() if not name.startswith("stranger")}
        self.version += 1

    def end_running(self) -> None:
        """Jobs that run are deleted: others get their room."""
        for uid in self.running():
            del self.jobs[uid]
            self.pods = {name: pod for name, pod in self.pods.items() if _job(pod) != uid}
        self.version += 1

    def running(self) -> list[str]:
        return [uid for uid, raw in self.jobs.items() if _reason(raw) == "AllPodsRunning"]

    def half_gangs(self) -> list[str]:
        """Jobs of which some pods have been let go and others not."""
        released: dict[str | None, set[bool]] = {}
        for pod in self.pods.values():
            released.setdefault(_job(pod), set()).add("annotations" in pod["metadata"])
        return [str(uid) for uid, both in released.items() if len(both) > 1]

    def promised(self, node: str) -> int:
        """What jobs' pods have of a node, or were sent to it for."""
        return sum(
            _gpus(pod)
            for pod in self.pods.values()
            if (pod["metadata"].get("annotations") or {}).get("disttrain.io/reserved-node") == node
        )

    async def settle(self) -> None:
        """Until there is nothing to do, now or when the scheduler has had its time.

        The time goes on only to what the decisions ask for: one that does not ask in time leaves its job as it is.
        """
        for _ in range(60):
            await self.deliver_events()
            busy = [self.step(number) for number in range(len(self.jobs))]
            before = self.version
            self.schedule()
            if any(busy) or self.version != before:
                continue
            soon = self.now + timedelta(seconds=SCHEDULING_SECONDS)
            times = [at for uid in self.jobs if (at := self.requeues[uid]) is not None and at <= soon]
            if not times:
                return
            self.now = max(self.now, min(times))
        raise AssertionError([_reason(raw) for raw in self.jobs.values()])


def _job(pod: Raw) -> str | None:
    uid: str | None = (pod["metadata"].get("labels") or {}).get("disttrain.io/job-uid")
    return uid


def _gpus(pod: Raw) -> int:
    return int(pod["spec"]["containers"][0]["resources"]["requests"]["gpu"])


def _reason(raw: Raw) -> str:
    conditions = (raw.get("status") or {}).get("conditions") or [{"type": "Running", "reason": ""}]
    reason: str = next(entry["reason"] for entry in conditions if entry["type"] == "Running")
    return reason


events = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 3), st.sampled_from([1, 1, 2, 1000])),
        st.tuples(st.just("step"), st.integers(0, 3), st.sampled_from([1, 1, 2, 1000])),
        st.tuples(st.just("deliver")),
        st.tuples(st.just("wait"), st.sampled_from([1, 31])),
        st.tuples(st.just("crash")),
        st.tuples(st.just("schedule")),
        st.tuples(st.just("take"), st.sampled_from(sorted(GPUS))),
        st.tuples(st.just("leave")),
    ),
    min_size=5,
    max_size=40,
)


some_sizes = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=2, max_size=4)


@settings(max_examples=2000 if SOAK else 50 if GATE else 120, deadline=None)
# The first pod of the second gang is let go to a room that is taken at that moment.
@example([(2, 3), (2, 2)], ["a", "a", "b"], [("take", "a"), ("step", 1, 1)])
@given(some_sizes, st.lists(st.sampled_from(sorted(GPUS)), max_size=4), events)
def test_no_room_is_promised_twice_and_no_gang_stays_half(sizes, taken, happenings):
    async def run_fleet() -> None:
        fleet = Fleet(sizes)
        await fleet.start_operator()
        for number in range(len(sizes)):
            fleet.step(number)
        for node in taken:
            fleet.take_room(node)
        await fleet.deliver_events()
        for what, *how in happenings:
            match what:
                case "step":
                    fleet.step(*how)
                case "deliver":
                    await fleet.deliver_events()
                case "wait":
                    fleet.now += timedelta(seconds=how[0])
                case "crash":
                    await fleet.start_operator()
                case "schedule":
                    fleet.schedule()
                case "take":
                    fleet.take_room(*how)
                case "leave":
                    fleet.strangers_leave()
            for node, gpus in GPUS.items():
                assert fleet.promised(node) <= gpus
        for _ in range(len(sizes) + 1):
            await fleet.settle()
            assert fleet.half_gangs() == [], "all of a gang, or nothing"
            fleet.strangers_leave()
            fleet.end_running()
        assert all(_reason(raw) == "WaitingForRoom" for raw in fleet.jobs.values()), "what is left can never run"
        await fleet.stop_operator()

    asyncio.run(run_fleet())
