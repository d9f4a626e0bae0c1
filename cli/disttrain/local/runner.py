"""The loop of a local run: the operator's own decisions, executed with processes.

pods change, time passes, the user presses Ctrl-C -> decide(job, observed, now) -> status.yaml -> actions -> pods
"""

import asyncio
import contextlib
import itertools
import os
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

from disttrain.errors import CommandError
from disttrain.local.alone import alone
from disttrain.local.folder import RawJob, RunFolder
from disttrain.local.hangs import HangWatch
from disttrain.local.launch import launch
from disttrain.local.left_out import left_out
from disttrain.local.pods import Pods
from disttrain.local.ports import free_ports
from disttrain.local.progress import LiveProgress, live
from disttrain.local.silent import LOOK_SECONDS, SilentAgents, Waiting, Worker
from disttrain_api.agent_token import agent_token
from disttrain_api.names import Env, Reason, Role
from disttrain_api.spec import JobSpec
from disttrain_api.status import ConditionType, JobStatus
from disttrain_operator.decide.conditions import condition
from disttrain_operator.decide.decide import decide
from disttrain_operator.decide.decision import (
    Action,
    CreatePod,
    CreateSupport,
    Decision,
    DeletePod,
    Event,
    RestartInPlace,
)
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import Job, job_facts
from disttrain_operator.decide.reading import observe
from disttrain_operator.plan.desired import GangPlan, Loopback, Site, secret
from disttrain_operator.plan.environment import scratch_environment
from disttrain_operator.plan.identity import child_name
from disttrain_trainer.runtime.host_limits import cores

_LOOK_AT_PROGRESS_SECONDS = 0.25
# A status is written anew with what is seen, and with each write of it the job is looked at.
_LOOKS_PER_STATUS = 8
# Decisions may ask to be made again "now"; the times in a status are whole seconds.
_SHORTEST_PAUSE_SECONDS = 0.02


class View(Protocol):
    """Output for the user while the job runs."""

    def status(self, status: JobStatus) -> None: ...
    def progress(self, progress: LiveProgress) -> None: ...
    def event(self, event: Event) -> None: ...
    def log(self, text: str) -> None: ...


@dataclass
class LocalRun:
    """One job on this machine. `raw` is the job as an API server would hold it."""

    folder: RunFolder
    raw: RawJob
    view: View
    gpus: Sequence[str]
    """CUDA_VISIBLE_DEVICES of each worker."""
    modules: Sequence[str] = ()
    """What its ranks import; empty: each imports it for itself."""

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()
        self._pods = Pods(self.folder, self._changed.set, self.modules)
        self._sites: dict[int, Site] = {}
        self._token = secrets.token_hex(32)
        self._unwritten: str | None = None
        self._left_out_reported = False
        self._live: Live | None = None
        self._waiting = Waiting()
        self._hangs = HangWatch(agent_token(self._token), self._changed.set)

    @property
    def job(self) -> Job:
        return alone(job_facts(self.raw))[0]

    async def run(self) -> JobStatus:
        """Until the job has finished or is suspended, and no process of it is left."""
        watches = (self._watch_progress(), self._watch_agents(), self._hangs.run())
        watching = [asyncio.create_task(watch) for watch in watches]
        try:
            while not await self._step():
                pass
        finally:
            for task in watching:
                task.cancel()
            await self._pods.close()
            self.folder.forget_pods()
            if self._unwritten is not None:
                # The pods have made room.
                self._store()
        return self.job.status

    @property
    def unwritten(self) -> str | None:
        """Why status.yaml is not as the job is; None: it is."""
        return self._unwritten

    def suspend(self) -> None:
        """Suspend the job as `kubectl patch` would: the pods write a checkpoint and stop."""
        set_suspend(self.raw, True)
        self._changed.set()

    def stop_now(self) -> None:
        """Nobody waits for checkpoints any more."""
        set_suspend(self.raw, True)
        self._pods.kill_all()
        self._changed.set()

    async def _step(self) -> bool:
        """One decision and its execution; True when nothing is left to do."""
        self._changed.clear()
        now = datetime.now(UTC)
        job = self.job
        # Loopback addresses need no Service.
        services = [child_name(job.name, job.uid)]
        self._hangs.see(self.raw, self._pods.raw)
        heard = self._hangs.heard(job.uid, self._live, self._waiting.awaited)
        seen = observe(self._pods.raw, self._pods.gone, services=services, live=heard)
        decision = decide(job, replace(seen, silent=self._waiting.silent, order=self._hangs.order(job.uid)), now)
        written = self._write(job, decision)
        for action in decision.actions:
            await self._execute(job, action)
        if written:
            # As on a cluster, where the write itself comes back as a change of the job.
            self._changed.set()
        if _holds(self.job.status, ConditionType.FINISHED):
            self._delete_spared()
        else:
            # The end is left to the summary, which says more.
            for event in decision.events:
                if event.reason != Reason.CONTAINER_MISNAMED:  # said when the manifest was read
                    self.view.event(event)
        over = any(_holds(self.job.status, end) for end in (ConditionType.FINISHED, ConditionType.SUSPENDED))
        if over and not self._pods.alive and not decision.actions and not written:
            return True
        await self._pause(decision, now)
        return False

    def _delete_spared(self) -> None:
        """On a cluster, pods that cleanPodPolicy spares run on; here they end with this process."""
        for pod in observe(self._pods.raw).pods:
            if pod.pod_alive and not pod.deleting:
                self._pods.delete(pod.name, pod.uid, None)

    async def _pause(self, decision: Decision, now: datetime) -> None:
        timeout = None
        if decision.requeue_at is not None:
            timeout = max(_SHORTEST_PAUSE_SECONDS, (decision.requeue_at - now).total_seconds())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout)

    def _write(self, job: Job, decision: Decision) -> bool:
        """Write the status if it changed."""
        if decision.status is None or decision.status == job.status:
            return False
        self.raw["status"] = decision.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        before = self._unwritten
        self._store()
        if self._unwritten is not None and before is None:
            self.view.log(f"cannot write {self.folder.status_file}: {self._unwritten}; the job continues without it")
        self.view.status(decision.status)
        return True

    def _store(self) -> None:
        """Write status.yaml, where that is possible."""
        try:
            self.folder.write_job(self.raw)
            self._unwritten = None
        except OSError as error:
            self._unwritten = error.strerror or str(error)

    async def _execute(self, job: Job, action: Action) -> None:
        if isinstance(action, CreateSupport):
            self._support(job, action.attempt)
        elif isinstance(action, CreatePod):
            await self._create(job, action)
        elif isinstance(action, DeletePod):
            self._pods.delete(action.name, action.uid, action.grace_seconds)
        elif isinstance(action, RestartInPlace):
            await self._hangs.give(job.uid, action)
            self._changed.set()

    def _support(self, job: Job, attempt: int) -> None:
        if attempt in self._sites:
            return
        spec = _spec(job)
        self._sites[attempt] = site = self._site(spec)
        self._pods.forget_gone_before(attempt - 1)
        try:
            agents = site.loopback.agent_ports if site.loopback is not None else ()
            self.folder.write_support(secret(job, site)["stringData"], spec.storage, agents)
        except OSError as error:
            raise CommandError(f"cannot write to {error.filename}: {error.strerror}") from error

    def _site(self, spec: JobSpec) -> Site:
        servers = spec.parameter_servers.replicas if spec.parameter_servers else 0
        master, gang, *others = free_ports(2 + servers + spec.workers.replicas)
        return Site(
            trainer_image="",
            token=self._token,
            config_dir=str(self.folder.config),
            storage_dir=str(self.folder.storage(spec.storage)),
            loopback=Loopback(master, tuple(others[:servers]), tuple(others[servers:]), gang),
        )

    async def _create(self, job: Job, action: CreatePod) -> None:
        spec = _spec(job)
        plan = GangPlan(job, action.attempt, self._sites[action.attempt])
        name = plan.pod(action.role, action.index)["metadata"]["name"]
        site = replace(self._sites[action.attempt], scratch_dir=str(self.folder.scratch(name)))
        manifest = GangPlan(job, action.attempt, site).pod(action.role, action.index, replacement=action.replacement)
        self._report_left_out()
        process = launch(
            manifest,
            shell=os.environ,
            local=self._local_environment(spec, action, name),
            scratch_defaults=scratch_environment(site),
            folder=Path.cwd(),
        )
        await self._pods.create(manifest, process)

    def _local_environment(self, spec: JobSpec, action: CreatePod, pod: str) -> dict[str, str]:
        """Return the defaults of this machine for a pod; its template may override them."""
        loopback = "lo" if sys.platform.startswith("linux") else "lo0"
        threads = max(1, cores() // spec.world_size)
        return {
            "GLOO_SOCKET_IFNAME": loopback,
            "NCCL_SOCKET_IFNAME": loopback,
            "TP_SOCKET_IFNAME": loopback,
            "CUDA_VISIBLE_DEVICES": self.gpus[action.index] if action.role is Role.WORKER else "",
            # The ranks share one machine: each gets its part of the cores, not all of them.
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
            Env.TERMINATION_LOG: str(self.folder.termination_log(pod)),
            Env.METRICS_DIR: str(self.folder.metrics),
            Env.NODE_NAME: socket.gethostname(),
        }

    def _report_left_out(self) -> None:
        missing = left_out(job_facts(self.raw))
        if missing and not self._left_out_reported:
            self.view.log(f"not part of a local run: {missing}")
        self._left_out_reported = True

    async def _watch_progress(self) -> None:
        shown = LiveProgress.of(self.job.status)
        for look in itertools.count(1):
            await asyncio.sleep(_LOOK_AT_PROGRESS_SECONDS)
            scratches = [self.folder.scratch(pod["metadata"]["name"]) for pod in self._pods.raw]
            newer = shown.look(scratches)
            if newer != shown:
                shown = newer
                self.view.progress(shown)
            if look % _LOOKS_PER_STATUS == 0:
                self._learn(live(self._pods.raw, self.folder.scratch, self.folder.termination_log))

    async def _watch_agents(self) -> None:
        """Have pods given up that are stopped while others wait for them."""
        agents = SilentAgents(agent_token(self._token), asyncio.get_running_loop().time)
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            heard = self._hangs.heard(self.job.uid, self._live, frozenset())
            waiting = await agents.look(self._workers(), heard.silent if heard is not None else frozenset())
            if waiting != self._waiting:
                self._waiting = waiting
                self._changed.set()

    def _workers(self) -> list[Worker]:
        """The pods of the newest attempt that run and have an agent."""
        pods = [pod for pod in observe(self._pods.raw).pods if pod.role is Role.WORKER and pod.undisturbed]
        newest = max((pod.attempt for pod in pods), default=0)
        loopback = self._sites[newest].loopback if newest in self._sites else None
        ports = loopback.agent_ports if loopback is not None else ()
        return [Worker(pod.uid, pod.index, ports[pod.index]) for pod in pods if pod.attempt == newest and ports]

    def _learn(self, seen: Live | None) -> None:
        """Have the next decision see what the first worker says."""
        if seen is not None and seen != self._live:
            self._live = seen
            self._changed.set()


def set_suspend(raw: RawJob, value: bool) -> None:
    """Change the spec as the API server would."""
    if bool(raw["spec"].get("suspend")) != value:
        raw["spec"]["suspend"] = value
        raw["metadata"]["generation"] += 1


def _spec(job: Job) -> JobSpec:
    assert job.spec is not None, "a manifest is validated before it gets here"
    return job.spec


def _holds(status: JobStatus, type_: ConditionType) -> bool:
    found = condition(status, type_)
    return found is not None and found.status == "True"
