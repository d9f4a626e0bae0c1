"""The lives of a pod's ranks: started together, stopped together, judged together.

    wait for the master's address -> start all ranks -> (all end | one fails | SIGTERM) -> exit code, message
                                     ^                             |
                                     +--- pause <- restart.py <----+  with `restartStrategy: InPlace`

What happens when is in `_step`; processes.py only does it.
"""

import asyncio
import errno
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.listen import listen
from disttrain_agent.look import Look
from disttrain_agent.memory_kills import memory_kills
from disttrain_agent.output import log
from disttrain_agent.processes import Processes, RankProcess, Start, execute
from disttrain_agent.reports import Reports, TerminationMessage
from disttrain_agent.resolve import LIMIT_SECONDS, OWN_NAME_SECONDS, wait_for_address
from disttrain_agent.restart import Failure, Leave, Record, after
from disttrain_agent.verdict import RankEnd, exit_code, first_cause
from disttrain_agent.zygote import Zygote
from disttrain_api.names import ExitCode, exit_reason
from disttrain_api.report import RankFailure, RankPhase, RestartsInPlace
from disttrain_api.times import timestamp


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    collect: float = 1.0
    """After the first failure: time in which the other ranks may fail by themselves, so that the cause is known."""
    peer_grace: float = 5.0
    """Then, between SIGTERM and SIGKILL: they are stuck in a collective and have nothing to save."""
    kill_margin: float = 2.0
    """SIGKILL comes this long before the pod's grace period ends: after the trainer has given up by itself, and early
    enough for the agent to report."""
    own_name: float = OWN_NAME_SECONDS
    """The master's own name must have an address by then."""
    tear_down: float = 30.0
    """A rank that has reported its work done is killed when its process has not ended by then."""
    report: float = 2.0
    """Between two looks at the ranks' reports."""
    orphans: float = 0.02
    """Between two looks for what ranks have left behind."""

    def kill_after(self, grace: float) -> float:
        """Return when ranks that were asked to end are killed, counted from the begin of the pod's grace period."""
        return max(grace - self.kill_margin, grace / 2)


@dataclass
class _Life:
    """What has become of the ranks since they were started."""

    memory_kills: int | None = None
    """Of the pod's processes, before they were started."""
    ends: list[RankEnd] = field(default_factory=list)
    failed_at: float | None = None
    failed_time: str = ""
    """The same, for people."""
    stopping: bool = False
    """They were sent SIGTERM."""
    kill_at: float | None = None
    done_since: float | None = None

    @property
    def failed(self) -> list[RankEnd]:
        return [end for end in self.ends if not end.succeeded]


class Supervisor:
    """Runs the ranks of a pod. `run` may be called once, in an event loop on the main thread.

    must_report: whether a rank has succeeded only where it has reported that its work is done.
    zygote: starts ranks that start again; None: `start` does.
    """

    def __init__(
        self, pod: PodEnvironment, command: Sequence[str], message: TerminationMessage, start: Start = execute,
        timing: Timing | None = None, *, must_report: bool = False, zygote: Zygote | None = None,
    ) -> None:  # fmt: skip
        self._pod, self._command, self._message, self._start = pod, command, message, start
        self._must_report, self._zygote = must_report, zygote
        self._timing = timing or Timing()
        self._reports = Reports(pod.report_dir, pod.ranks)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._processes = Processes(self._rank_ended)
        self._life = _Life()
        self._stop_at: float | None = None
        self._record = Record()
        self._restarts: RestartsInPlace | None = None
        self._repeated = False

    async def run(self) -> int:
        """Exit code of the pod."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        if self._pod.restarts_in_place is not None:
            self._processes.adopt_orphans()
        self._reports.forget()
        if not await self._address_known():
            return self._not_started()
        listener = None
        try:
            self._reports.prepare()
            self._start_ranks(self._start)
            listener = listen(self._pod, Look(self._pod, self._processes, self._reports, lambda: self._restarts), log)
            while True:
                await self._until_all_have_ended()
                self._processes.reap()
                if not await self._ready_to_restart():
                    return self._end()
                self._start_ranks(self._start if self._zygote is None else self._zygote.start)
        except OSError as error:
            self._processes.close()
            return self._cannot_start(error)
        finally:
            if listener is not None:
                listener.close()
            if self._zygote is not None:
                self._zygote.close()

    def _start_ranks(self, start: Start) -> None:
        """Raises OSError where they cannot be started."""
        self._life = _Life(memory_kills())
        self._processes.start(self._pod, self._command, start)
        ranks = self._pod.ranks
        log(f"started ranks {ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else f"started rank {ranks.start}")

    async def _until_all_have_ended(self) -> None:
        while self._processes.alive:
            await self._until_changed(self._step(self._loop.time()))

    async def _until_changed(self, seconds: float) -> None:
        """Wait until a rank ends or the pod must stop, but no longer."""
        self._changed.clear()
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return

    async def _ready_to_restart(self) -> bool:
        """Prepare another life of the ranks, which have all ended, where one is to follow; returns whether it may begin
        now. Raises OSError as `Reports.prepare`."""
        limits, cause = self._pod.restarts_in_place, first_cause(self._life.ends)
        if limits is None or cause is None or self._stop_at is not None:
            return False
        killed, now = self._life.memory_kills, memory_kills()
        out_of_memory = killed is not None and now is not None and now > killed
        follows = after(Failure(cause, self._reports.checkpoint, out_of_memory), self._record, limits)
        if isinstance(follows, Leave):
            log(f"no restart in place: {follows.why}")
            self._repeated = follows.repeated
            return False
        self._record = follows.record
        self._restarts = RestartsInPlace(
            count=follows.record.restarts,
            time=self._life.failed_time,
            pause_seconds=follows.pause_seconds,
            failure=cause.as_failure().model_copy(update={"log_tail": None}),
        )
        pause = f" after {follows.pause_seconds} s" if follows.pause_seconds else ""
        log(f"restart {follows.record.restarts} in place{pause}: rank {cause.rank} failed")
        spared = self._zygote.pid if self._zygote is not None else None
        while self._processes.kill_orphans(spared) and self._stop_at is None:
            await self._until_changed(self._timing.orphans)
        self._reports.begin_again()
        self._message.write(self._reports.progress(), None, self._restarts)
        at = self._loop.time() + follows.pause_seconds
        while self._stop_at is None and (left := at - self._loop.time()) > 0:
            await self._until_changed(left)
        return self._stop_at is None

    async def _address_known(self) -> bool:
        limit = self._timing.own_name if self._pod.is_master else LIMIT_SECONDS
        known = asyncio.create_task(wait_for_address(self._pod.master_address, log, limit=limit))
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait({known, changed}, return_when=asyncio.FIRST_COMPLETED)
        for task in (known, changed):
            task.cancel()
        return self._stop_at is None and known.done() and not known.cancelled() and known.result()

    def _step(self, now: float) -> float:
        """Do what is due; answers with the seconds until something else may be."""
        timing, life = self._timing, self._life
        if not life.stopping:
            self._stop_ranks(now)
        if life.kill_at is not None and now >= life.kill_at:
            log(f"killing ranks {_names(self._processes.alive)}: they have not ended in time")
            life.kill_at = None
            for process in self._processes.alive:
                process.kill()
        self._message.write(self._reports.progress(), self._failure(), self._restarts)
        if self._zygote is not None and all(self._trains(rank) for rank in self._pod.ranks):
            self._zygote.begin(self._pod.of_rank(self._pod.ranks.start))
        if all(self._is_done(process.rank) for process in self._processes.alive):
            life.done_since = life.done_since or now
            if life.kill_at is None and now >= life.done_since + timing.tear_down:
                life.kill_at = now
        due = [at for at in (life.kill_at, self._collected_at()) if at is not None]
        return max(0.01, min([timing.report, *(at - now for at in due)]))

    def _stop_ranks(self, now: float) -> None:
        """Send SIGTERM once, when the pod must stop or a rank has failed."""
        life, collected_at = self._life, self._collected_at()
        if self._stop_at is not None:
            life.kill_at = self._stop_at + self._timing.kill_after(self._pod.grace_seconds)
        elif collected_at is not None and now >= collected_at:
            life.kill_at = now + self._timing.peer_grace
            log(f"stopping ranks {_names(self._processes.alive)} because rank {life.failed[0].rank} failed")
        else:
            return
        life.stopping = True
        for process in self._processes.alive:
            process.terminate()

    def _collected_at(self) -> float | None:
        """Return when to stop the ranks that still run after a failure; None: no failure, or already stopped."""
        life = self._life
        return None if life.stopping or life.failed_at is None else life.failed_at + self._timing.collect

    def _rank_ended(self, process: RankProcess) -> None:
        assert process.returncode is not None
        end = RankEnd(
            rank=process.rank,
            returncode=process.returncode,
            signaled=process.signaled,
            report=self._reports.of(process.rank),
            tail=tuple(process.output.tail),
            must_report=self._must_report,
        )
        life = self._life
        life.ends.append(end)
        if not end.succeeded:
            code = end.returncode
            log(f"rank {end.rank} " + (f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"))
            if life.failed_at is None:
                life.failed_at, life.failed_time = self._loop.time(), timestamp(datetime.now(UTC))
        self._changed.set()

    def _stop(self, number: signal.Signals) -> None:
        if self._stop_at is not None:
            return
        log(f"{signal.Signals(number).name}: stopping")
        self._stop_at = self._loop.time()
        self._changed.set()

    def _is_done(self, rank: int) -> bool:
        report = self._reports.of(rank)
        return report is not None and report.done

    def _trains(self, rank: int) -> bool:
        report = self._reports.of(rank)
        return report is not None and report.phase == RankPhase.TRAINING

    def _failure(self) -> RankFailure | None:
        """The failure to report; obeying SIGTERM is none."""
        cause = first_cause(self._life.ends)
        if cause is None or (self._stopped_first and cause.code in (ExitCode.STOPPED, ExitCode.PEER_LOST)):
            return None
        return cause.as_failure().model_copy(update={"repeated": self._repeated})

    @property
    def _stopped_first(self) -> bool:
        """Return whether it had to stop before any rank had failed."""
        failed_at = self._life.failed_at
        return self._stop_at is not None and (failed_at is None or self._stop_at <= failed_at)

    def _end(self) -> int:
        code = exit_code(self._life.ends, stopped=self._stopped_first)
        self._message.write(self._reports.progress(), self._failure(), self._restarts)
        log(f"exit code {code}")
        return code

    def _report_failure(self, failure: RankFailure) -> None:
        self._message.write(self._reports.progress(), failure, self._restarts)

    def _not_started(self) -> int:
        if self._stop_at is not None:
            return ExitCode.STOPPED
        code, why = ExitCode.PEER_LOST, "worker 0 or the cluster's DNS cannot be reached"
        if self._pod.is_master:
            code = ExitCode.NETWORK_FAULTY
            why = (
                "it is this pod's own name: the cluster's DNS cannot be reached from here, or the job's Service is gone"
            )
        message = f"{self._pod.master_address} has no address: {why}"
        self._report_failure(_own_failure(self._pod.ranks.start, code, message))
        return code

    def _cannot_start(self, error: OSError) -> int:
        what = f" {error.filename}" if error.filename else ""
        message = f"cannot start the ranks: {error.strerror}{what}"
        log(message)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._report_failure(_own_failure(self._pod.ranks.start, ExitCode.DISK_FULL, message))
            return ExitCode.DISK_FULL
        self._report_failure(RankFailure(rank=self._pod.ranks.start, exit_code=1, message=message))
        return 1


def _own_failure(rank: int, code: ExitCode, message: str) -> RankFailure:
    return RankFailure(rank=rank, exit_code=code, reason=exit_reason(code), message=message)


def _names(processes: Sequence[RankProcess]) -> str:
    return ", ".join(str(process.rank) for process in processes)
