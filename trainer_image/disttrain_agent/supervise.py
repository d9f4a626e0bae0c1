"""The life of a pod's ranks: started together, stopped together, judged together.

    wait for the master's address -> start all ranks -> (all end | one fails | told to stop) -> exit code, last words

What happens when is in `_step`; processes.py only does it.
"""

import asyncio
import errno
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.listen import listen
from disttrain_agent.look import Look
from disttrain_agent.output import say
from disttrain_agent.processes import Processes, RankProcess, Start, execute
from disttrain_agent.reports import Reports, TerminationMessage
from disttrain_agent.resolve import LIMIT_SECONDS, OWN_NAME_SECONDS, wait_for_address
from disttrain_agent.verdict import RankEnd, exit_code, first_cause
from disttrain_api.names import ExitCode, exit_reason
from disttrain_api.report import RankFailure


@dataclass(frozen=True)
class Timing:
    """Seconds."""

    collect: float = 1.0
    """After the first failure: time in which the other ranks may fail by themselves, so that the cause can be told."""
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

    def kill_after(self, grace: float) -> float:
        """Return when ranks that were asked to end are killed, counted from the begin of the pod's grace period."""
        return max(grace - self.kill_margin, grace / 2)


class Supervisor:
    """One life of a pod. `run` may be called once, in an event loop on the main thread.

    must_report: whether a rank has succeeded only where it has reported that its work is done.
    """

    def __init__(
        self, pod: PodEnvironment, command: Sequence[str], last_words: TerminationMessage, start: Start = execute,
        timing: Timing | None = None, *, must_report: bool = False,
    ) -> None:  # fmt: skip
        self._pod, self._command, self._last_words, self._start = pod, command, last_words, start
        self._must_report = must_report
        self._timing = timing or Timing()
        self._reports = Reports(pod.report_dir, pod.ranks)
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._processes = Processes(self._rank_ended)
        self._ends: list[RankEnd] = []
        self._failed_at: float | None = None
        self._stop_at: float | None = None
        self._told = False
        self._kill_at: float | None = None
        self._done_since: float | None = None

    async def run(self) -> int:
        """Exit code of the pod."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._stop, number)
        self._reports.forget()
        if not await self._address_known():
            return self._not_started()
        try:
            self._reports.prepare()
            self._processes.start(self._pod, self._command, self._start)
        except OSError as error:
            self._processes.close()
            return self._cannot_start(error)
        ranks = self._pod.ranks
        say(f"started ranks {ranks.start} to {ranks.stop - 1}" if len(ranks) > 1 else f"started rank {ranks.start}")
        listener = listen(self._pod, Look(self._pod, self._processes, self._reports), say)
        await self._until_all_have_ended()
        self._processes.reap()
        if listener is not None:
            listener.close()
        return self._end()

    async def _until_all_have_ended(self) -> None:
        while self._processes.alive:
            self._changed.clear()
            pause = self._step(self._loop.time())
            try:
                await asyncio.wait_for(self._changed.wait(), pause)
            except TimeoutError:
                continue

    async def _address_known(self) -> bool:
        limit = self._timing.own_name if self._pod.is_master else LIMIT_SECONDS
        known = asyncio.create_task(wait_for_address(self._pod.master_address, say, limit=limit))
        told = asyncio.create_task(self._changed.wait())
        await asyncio.wait({known, told}, return_when=asyncio.FIRST_COMPLETED)
        for task in (known, told):
            task.cancel()
        return self._stop_at is None and known.done() and not known.cancelled() and known.result()

    def _step(self, now: float) -> float:
        """Do what is due; answers with the seconds until something else may be."""
        timing = self._timing
        if not self._told:
            self._tell_ranks_to_end(now)
        if self._kill_at is not None and now >= self._kill_at:
            say(f"killing ranks {_names(self._processes.alive)}: they have not ended in time")
            self._kill_at = None
            for process in self._processes.alive:
                process.kill()
        self._last_words.write(self._reports.progress(), self._failure())
        if all(self._is_done(process.rank) for process in self._processes.alive):
            self._done_since = self._done_since or now
            if self._kill_at is None and now >= self._done_since + timing.tear_down:
                self._kill_at = now
        due = [at for at in (self._kill_at, self._collected_at()) if at is not None]
        return max(0.01, min([timing.report, *(at - now for at in due)]))

    def _tell_ranks_to_end(self, now: float) -> None:
        """Send SIGTERM once, when the pod must stop or a rank has failed."""
        collected_at = self._collected_at()
        if self._stop_at is not None:
            self._kill_at = self._stop_at + self._timing.kill_after(self._pod.grace_seconds)
        elif collected_at is not None and now >= collected_at:
            self._kill_at = now + self._timing.peer_grace
            say(f"stopping ranks {_names(self._processes.alive)} because rank {self._ends_failed()[0].rank} failed")
        else:
            return
        self._told = True
        for process in self._processes.alive:
            process.terminate()

    def _collected_at(self) -> float | None:
        """Return when to stop the ranks that still run after a failure; None: no failure, or already stopped."""
        return None if self._told or self._failed_at is None else self._failed_at + self._timing.collect

    def _rank_ended(self, process: RankProcess) -> None:
        assert process.returncode is not None
        end = RankEnd(
            rank=process.rank,
            returncode=process.returncode,
            told=process.told,
            report=self._reports.of(process.rank),
            tail=tuple(process.output.tail),
            must_report=self._must_report,
        )
        self._ends.append(end)
        if not end.succeeded:
            code = end.returncode
            say(f"rank {end.rank} " + (f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"))
            self._failed_at = self._failed_at or self._loop.time()
        self._changed.set()

    def _stop(self, number: signal.Signals) -> None:
        if self._stop_at is not None:
            return
        say(f"{signal.Signals(number).name}: stopping")
        self._stop_at = self._loop.time()
        self._changed.set()

    def _is_done(self, rank: int) -> bool:
        report = self._reports.of(rank)
        return report is not None and report.done

    def _ends_failed(self) -> list[RankEnd]:
        return [end for end in self._ends if not end.succeeded]

    def _failure(self) -> RankFailure | None:
        """The failure to report; obeying SIGTERM is none."""
        cause = first_cause(self._ends)
        if cause is None or (self._stopped_first and cause.code in (ExitCode.STOPPED, ExitCode.PEER_LOST)):
            return None
        return cause.as_failure()

    @property
    def _stopped_first(self) -> bool:
        """Return whether it had to stop before any rank had failed."""
        return self._stop_at is not None and (self._failed_at is None or self._stop_at <= self._failed_at)

    def _end(self) -> int:
        code = exit_code(self._ends, stopped=self._stopped_first)
        self._last_words.write(self._reports.progress(), self._failure())
        say(f"exit code {code}")
        return code

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
        self._last_words.write(None, _own_failure(self._pod.ranks.start, code, message))
        return code

    def _cannot_start(self, error: OSError) -> int:
        what = f" {error.filename}" if error.filename else ""
        message = f"cannot start the ranks: {error.strerror}{what}"
        say(message)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self._last_words.write(None, _own_failure(self._pod.ranks.start, ExitCode.DISK_FULL, message))
            return ExitCode.DISK_FULL
        self._last_words.write(None, RankFailure(rank=self._pod.ranks.start, exit_code=1, message=message))
        return 1


def _own_failure(rank: int, code: ExitCode, message: str) -> RankFailure:
    return RankFailure(rank=rank, exit_code=code, reason=exit_reason(code), message=message)


def _names(processes: Sequence[RankProcess]) -> str:
    return ", ".join(str(process.rank) for process in processes)
