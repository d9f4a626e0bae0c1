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
from dataclasses import replace

from disttrain_agent.ends import end_of, names, own_failure
from disttrain_agent.environment import PodEnvironment
from disttrain_agent.gang.join import Gang, join_gang
from disttrain_agent.gang.messages import PodFailure
from disttrain_agent.life import Life, Timing
from disttrain_agent.listen import Listener, listen
from disttrain_agent.look import Look
from disttrain_agent.master_address import MasterAddress
from disttrain_agent.memory import open_memory
from disttrain_agent.memory_kills import memory_kills
from disttrain_agent.output import log
from disttrain_agent.own_ranks import OwnRanks
from disttrain_agent.processes import Processes, RankProcess
from disttrain_agent.reports import Reports, TerminationMessage
from disttrain_agent.restart import hopeless
from disttrain_agent.step_clock import StepClock
from disttrain_agent.verdict import exit_code, first_cause
from disttrain_agent.zygote import Zygote
from disttrain_api.names import ExitCode, Reason
from disttrain_api.report import RankFailure, RestartsInPlace

_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""Exit codes of a pod whose command cannot be started, as a shell's."""

_WHAT_HAPPENED: dict[str, str] = {Reason.POD_LOST: "was lost with its pod", Reason.OOM_KILLED: "ran out of memory"}


class Supervisor:
    """Runs the ranks of a pod. `run` may be called once, in an event loop on the main thread.

    must_report: whether a rank has succeeded only where it has reported that its work is done.
    zygote: starts ranks; None: as programs.
    """

    def __init__(
        self, pod: PodEnvironment, command: Sequence[str], message: TerminationMessage, zygote: Zygote | None = None,
        timing: Timing | None = None, *, must_report: bool = False,
    ) -> None:  # fmt: skip
        self._memory = open_memory(pod)
        if self._memory is not None:
            pod = replace(pod, memory=self._memory.place)
        self._pod, self._command, self._message = pod, command, message
        self._must_report, self._zygote = must_report, zygote or Zygote(warm=False)
        self._timing = timing or Timing()
        self._reports = Reports(pod.report_dir, pod.ranks)
        self._loop = asyncio.get_running_loop()
        self._changed, self._ends = asyncio.Event(), asyncio.Event()
        self._zygote.changed = self._changed.set
        self._processes = Processes(self._rank_ended)
        self._life = Life()
        self._master = MasterAddress(pod, self._timing.own_name, log)
        self._listener: Listener | None = None
        self._stop_at: float | None = None
        self._gang: Gang | None = None
        self._restarts: RestartsInPlace | None = None
        self._repeated = False
        self._not_in_place: str | None = None

    async def run(self) -> int:
        """Exit code of the pod."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        if self._pod.restarts_in_place is not None:
            self._processes.adopt_orphans()
        if self._pod.replacement:
            # All others wait for this pod: what its ranks import is there when they meet.
            self._zygote.begin(self._pod.of_rank(self._pod.ranks.start))
        self._reports.forget()
        steps = StepClock(self._pod.report_dir, self._pod.ranks)
        own = OwnRanks(self._pod.report_dir, self._pod.ranks) if self._pod.config is None else None
        look = Look(
            self._pod, self._processes, self._reports, lambda: self._restarts, self._awaited, steps,
            lambda: 0 if self._gang is None else self._gang.generation,
            asked=own, hangs=self._hangs, hear_leader=self._hear_leader,
        )  # fmt: skip
        watch = None
        try:
            if self._pod.awaits_address:
                if not self._pod.on_loopback:
                    self._listener = listen(self._pod, look, log)
                if not await self._master.known(self._ends) or self._stop_at is not None:
                    return self._not_started()
            self._gang = join_gang(self._pod, self._timing, self._changed.set, log, self._master.heard)
            if not await self._ordered_to_start():
                return self._not_ordered()
            self._reports.prepare()
            self._start_ranks()
            watch = self._loop.create_task(steps.watch())
            self._listener = self._listener or listen(self._pod, look, log)
            while True:
                await self._until_all_have_ended()
                self._processes.reap()
                if not await self._ready_to_restart():
                    return self._end()
                self._start_ranks()
        except OSError as error:
            self._processes.close()
            return self._cannot_start(error)
        finally:
            if watch is not None:
                watch.cancel()
            for part in (self._listener, self._gang, self._memory):
                if part is not None:
                    part.close()
            self._zygote.close()

    def _awaited(self) -> frozenset[int]:
        """Workers that all ranks wait for."""
        return self._gang.awaited if self._gang is not None else frozenset()

    def _hangs(self, generation: int, rank: int | None) -> bool | str:
        """Have a rank of any pod killed (None: all), since the gang does no step; whether it is, or why not."""
        if self._gang is None:
            return "its ranks do not restart in place"
        return "the pod is to end" if self._stop_at else self._gang.hangs(generation, rank, self._reports.kept)

    def _hear_leader(self, address: str, replacement: int, proof: str) -> bool:
        if self._gang is not None and replacement:
            return self._gang.hear_leader(address, replacement)
        return self._master.hear(address, proof, replacement)

    async def _ordered_to_start(self) -> bool:
        """Return whether the first ranks may start: those of a replacement start with the others' next ones."""
        gang = self._gang
        if not self._pod.replacement:
            return True
        if gang is None:
            return False
        log(f"replacement {self._pod.replacement} of a lost pod: its ranks start when all others do")
        until = self._loop.time() + self._timing.replacement
        while self._in_gang and gang.generation == 0:
            if self._loop.time() >= until:
                gang.leave("worker 0's agent has not ordered a start in time")
            await self._until_gang_changed(gang, self._timing.report)
        self._restart_is_decided(gang)
        until = self._loop.time() + self._timing.imports
        while self._zygote.imports and self._in_gang and not gang.must_stop and self._loop.time() < until:
            await self._until_gang_changed(gang, self._timing.report)
        return self._in_gang

    def _start_ranks(self) -> None:
        """Raises OSError where they cannot be started."""
        self._life = Life(memory_kills())
        gang = self._gang
        generation, port, address = (
            (0, None, None) if gang is None else (gang.generation, gang.master_port, gang.master_address)
        )
        address, start = address or self._master.heard, self._zygote.start
        self._processes.start(self._pod, self._command, start, generation, port, address)
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
        gang, failure = self._gang, self._life.pod_failure(self._reports.kept)
        if gang is not None and failure is None:
            # The next ranks of the others would wait for those of this pod.
            gang.leave("its ranks have succeeded")
        if gang is None or failure is None or self._stop_at is not None:
            return False
        self._leave_where_hopeless(gang, failure)
        while self._in_gang and self._processes.kill_orphans(self._zygote.pid):
            await self._until_gang_changed(gang, self._timing.orphans)
        generation = gang.generation
        if self._in_gang:
            gang.ended(failure, self._since_failure)
        while self._in_gang:
            if self._restart_is_decided(gang):
                # Now, not when they start: there may be a pause.
                self._reports.begin_again()
                self._message.write(self._reports.progress(), None, self._restarts)
            if gang.generation != generation:
                break
            await self._until_gang_changed(gang, self._timing.report)
        if gang.left is not None:
            log(f"no restart in place: {gang.left.why}")
            own, former = failure.cause.signature, gang.left.repeated
            self._repeated = own is not None and own.repeats(former)
            if former is None and hopeless(failure.cause) is None:
                self._not_in_place = gang.left.why
            return False
        if not self._pod.is_master:
            self._reports.begin_again()
            self._message.write(self._reports.progress())
        return self._stop_at is None

    def _restart_is_decided(self, gang: Gang) -> bool:
        """Note a restart that this agent, as the leader, has decided on; returns whether there is a new one."""
        decided = gang.restarts
        if decided is None or decided == self._restarts:
            return False
        pause = f" after {decided.pause_seconds:g} s" if decided.pause_seconds else ""
        what = _WHAT_HAPPENED.get(decided.failure.reason or "", "failed")
        log(f"restart {decided.count} in place{pause}: rank {decided.failure.rank} {what}")
        self._restarts = decided
        return True

    async def _until_gang_changed(self, gang: Gang, seconds: float) -> None:
        """Wait until something happens in the gang or is due there, but no longer."""
        if gang.awaited and self._listener is not None:
            # It will be said where worker 0's next pod is, and all wait for this one to hear it.
            self._listener.load()
        if gang.due is not None:
            seconds = max(0.0, min(seconds, gang.due - self._loop.time()))
        await self._until_changed(seconds)
        gang.tick()

    @property
    def _in_gang(self) -> bool:
        """Whether ranks may start again."""
        return self._gang is not None and self._gang.left is None and self._stop_at is None

    def _leave_where_hopeless(self, gang: Gang, failure: PodFailure) -> None:
        """Tell the gang at once of a failure that ends the pod, unless it follows from another pod's. Ranks also stop
        because those of a pod that departs have asked all to: the leader knows."""
        why = hopeless(failure.cause)
        obeyed = failure.cause.exit_code == ExitCode.STOPPED
        if why is not None and not failure.signaled and not obeyed:
            gang.leave(why)

    def _step(self, now: float) -> float:
        """Do what is due; answers with the seconds until something else may be."""
        timing, life, gang = self._timing, self._life, self._gang
        if gang is not None:
            gang.tick()
            self._kill_hung(gang)
        if not life.stopping:
            self._stop_ranks(now)
        if life.kill_at is not None and now >= life.kill_at:
            log(f"killing ranks {names(self._processes.alive)}: they have not ended in time")
            life.kill_at = None
            self._processes.kill()
        if life.cut_at is not None and now >= life.cut_at:
            life.cut_at = None
            self._processes.terminate()
        self._message.write(self._reports.progress(), self._failure(), self._restarts)
        if all(self._reports.trains(rank) for rank in self._pod.ranks):
            self._zygote.begin(self._pod.of_rank(self._pod.ranks.start))
        if self._pod.config is not None and all(self._reports.done(process.rank) for process in self._processes.alive):
            life.done_since = life.done_since or now
            if life.kill_at is None and now >= life.done_since + timing.tear_down:
                life.kill_at = now
        due_in_gang = gang.due if gang is not None else None
        due = [at for at in (life.cut_at, life.kill_at, self._collected_at(), due_in_gang) if at is not None]
        return max(0.01, min([timing.report, *(at - now for at in due)]))

    def _kill_hung(self, gang: Gang) -> None:
        """SIGKILL to ranks of this pod, once, where the gang hangs and they are to be killed for that."""
        if gang.kill is None or self._life.hung or self._life.stopping:
            return
        self._life.hung, rank = True, gang.kill.rank
        all_of_pod = rank is None or (self._pod.config is None and rank in self._pod.ranks)
        killed = [process for process in self._processes.alive if all_of_pod or process.rank == rank]
        if killed:
            why = "no rank begins with what another one has in memory" if rank is None else "the others wait for it"
            log(f"no rank does a step: killing ranks {names(killed)}; {why}")
        for process in killed:
            process.kill(hung=True)

    def _stop_ranks(self, now: float) -> None:
        """Send SIGTERM once, when the pod must stop or a rank has failed, here or in another pod."""
        life, collected_at, gang = self._life, self._collected_at(), self._gang
        if self._stop_at is not None:
            life.kill_at = self._stop_at + self._timing.kill_after(self._pod.grace_seconds)
        elif collected_at is not None and now >= collected_at:
            life.kill_at = now + self._timing.peer_grace
            log(f"stopping ranks {names(self._processes.alive)} because rank {life.failed[0].rank} failed")
            if gang is not None and (failure := self._life.pod_failure(self._reports.kept)) is not None:
                self._leave_where_hopeless(gang, failure)
                gang.failed(self._since_failure)
        elif gang is not None and gang.must_stop:
            life.kill_at = now + self._timing.peer_grace
            # A program of the user's own may take it for something else.
            life.cut_at = None if self._pod.config is None else now + self._timing.peer_cut
            life.stopped_by_gang = True
            log(f"stopping ranks {names(self._processes.alive)} because a rank of another pod failed")
        else:
            return
        life.stopping = True
        self._processes.terminate()

    def _collected_at(self) -> float | None:
        """Return when to stop the ranks that still run after a failure; None: no failure, or already stopped."""
        life = self._life
        return None if life.stopping or life.failed_at is None else life.failed_at + self._timing.collect

    def _rank_ended(self, process: RankProcess) -> None:
        end, life = end_of(process, self._pod, self._reports, must_report=self._must_report), self._life
        life.ends.append(end)
        if not end.succeeded:
            code = process.returncode or 0
            who = f"rank {end.rank}" if self._pod.config is not None else "the command"
            log(f"{who} " + (f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"))
            if life.failed_at is None:
                life.failed_at = self._loop.time()
        self._changed.set()

    def _stop(self, number: signal.Signals) -> None:
        if self._stop_at is not None:
            return
        log(f"{signal.Signals(number).name}: stopping")
        self._stop_at = self._loop.time()
        if self._gang is not None:
            self._gang.depart(f"{signal.Signals(number).name} to the pod")
        self._ends.set()
        self._changed.set()

    def _failure(self) -> RankFailure | None:
        """The failure to report; obeying SIGTERM is none."""
        cause = first_cause(self._life.ends)
        if cause is None or (self._stopped_first and cause.code in (ExitCode.STOPPED, ExitCode.PEER_LOST)):
            return None
        if self._life.ended_for_gang:
            why = "its agent stopped it, since ranks of another pod had failed"
            return own_failure(cause.rank, ExitCode.PEER_LOST, why)
        decided = {"repeated": self._repeated, "not_in_place": self._not_in_place}
        return self._life.failure_of(cause).model_copy(update=decided)

    @property
    def _since_failure(self) -> float:
        """Seconds since the first rank failed."""
        return 0.0 if self._life.failed_at is None else self._loop.time() - self._life.failed_at

    @property
    def _stopped_first(self) -> bool:
        """Return whether it had to stop before any rank had failed."""
        failed_at = self._life.failed_at
        return self._stop_at is not None and (failed_at is None or self._stop_at <= failed_at)

    def _end(self) -> int:
        code = exit_code(self._life.ends, stopped=self._stopped_first)
        if self._life.ended_for_gang and not self._stopped_first:
            code = ExitCode.PEER_LOST
        self._message.write(self._reports.progress(), self._failure(), self._restarts)
        log(f"exit code {code}")
        return code

    def _report_failure(self, failure: RankFailure) -> None:
        self._message.write(self._reports.progress(), failure, self._restarts)

    def _not_started(self) -> int:
        if self._stop_at is not None:
            return ExitCode.STOPPED
        code, message = self._master.why_unknown()
        self._report_failure(own_failure(self._pod.ranks.start, code, message))
        return code

    def _not_ordered(self) -> int:
        """The exit code of a replacement whose ranks were never to start."""
        if self._stop_at is not None:
            return ExitCode.STOPPED
        left = self._gang.left if self._gang is not None else None
        why = left.why if left is not None else "it has no token of its job, or no port for its gang"
        log(f"no rank starts in this pod: {why}")
        self._report_failure(own_failure(self._pod.ranks.start, ExitCode.PEER_LOST, why))
        return ExitCode.PEER_LOST

    def _cannot_start(self, error: OSError) -> int:
        what = f" {error.filename}" if error.filename else ""
        message = f"cannot start the ranks: {error.strerror}{what}"
        log(message)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._report_failure(own_failure(self._pod.ranks.start, ExitCode.DISK_FULL, message))
            return ExitCode.DISK_FULL
        code = 1
        if self._pod.config is None:
            code = _NOT_FOUND if error.errno == errno.ENOENT else _NOT_EXECUTABLE
        self._report_failure(RankFailure(rank=self._pod.ranks.start, exit_code=code, message=message))
        return code
