"""Queries to a pod's ranks while they run."""

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import Protocol

from disttrain_agent.checkpoint_request import request_checkpoint
from disttrain_agent.collectives import answered_collectives, ask_for_collectives, other_threads
from disttrain_agent.environment import PodEnvironment, stacks_file
from disttrain_agent.reports import Reports, figures_of
from disttrain_agent.step_clock import StepClock
from disttrain_api.flight_recorder import Collective
from disttrain_api.names import STACKS_SIGNAL
from disttrain_api.report import MAX_AWAITED, AgentStatus, Figures, RankStatus, RestartsInPlace
from disttrain_api.stacks import (
    MAIN_THREAD,
    MAX_STACKS_ANSWER_BYTES,
    MAX_WHOLE_STACKS_BYTES,
    STOPPED,
    main_thread,
    with_collectives,
    without_collectives,
)

MAX_STACKS_BYTES = 256 * 1024
"""For all threads of a rank, and less where many ranks share what is read of the pod's answer."""
_OF_ONE_THREAD = "Stack "
_STACKS_SECONDS = 2.0
_PAUSE_SECONDS = 0.05
_PAUSES_FOR_COLLECTIVES = 10
"""Beyond what it takes a rank to write its stacks: it may not come to run any Python."""
_NOT_ASKED = "it cannot be asked: it is starting, or neither the trainer nor a program that reports"


class Output(Protocol):
    """What a rank printed."""

    def last(self, count: int) -> list[str]: ...


class Rank(Protocol):
    """The process of a rank."""

    @property
    def rank(self) -> int: ...
    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    @property
    def alive(self) -> bool: ...
    @property
    def output(self) -> Output: ...


class Ranks(Protocol):
    """The processes of a pod's ranks, and those that run."""

    @property
    def ranks(self) -> Sequence[Rank]: ...
    @property
    def alive(self) -> Sequence[Rank]: ...


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped a process."""
    with contextlib.suppress(OSError, IndexError):
        # The name before it may hold anything, also parentheses.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0] in ("T", "t")
    return False


class Look:
    """A view of the ranks of one pod. All that it changes is whether they are asked for a checkpoint, whether those of
    a gang that hangs start again, and where worker 0's agent is looked for."""

    def __init__(
        self,
        pod: PodEnvironment,
        processes: Ranks,
        reports: Reports,
        restarts: Callable[[], RestartsInPlace | None] = lambda: None,
        awaited: Callable[[], Set[int]] = frozenset,
        steps: StepClock | None = None,
        generation: Callable[[], int] = lambda: 0,
        *,
        asked: Ranks | None = None,
        send: Callable[[int, int], None] = os.kill,
        is_stopped: Callable[[int], bool] = _is_stopped,
        hangs: Callable[[int, int | None], bool | str] = lambda generation, rank: "its ranks do not restart in place",
        hear_leader: Callable[[str, int, str], bool] = lambda address, replacement, proof: False,
    ) -> None:
        """steps: of ranks that write the times of their steps; None: of a program that does not. generation: how often
        the ranks have started before. asked: who is asked for stacks; None: `processes`. send: sends a signal to a
        process. is_stopped: whether a signal has stopped a process, by what the kernel says now. hangs: has a rank of a
        generation killed (None: all), so that all start again; answers whether it does, or why it may not. hear_leader:
        takes the address of worker 0's pod, which replacement that is, and a proof of who says it; returns whether it
        is one to look for."""
        self._pod, self._processes, self._reports, self._restarts = pod, processes, reports, restarts
        self._awaited, self._steps, self._generation = awaited, steps, generation
        self._asked = processes if asked is None else asked
        self._send, self._is_stopped = send, is_stopped
        self._hangs = hangs
        self._asking = asyncio.Lock()
        self.hear_leader, self.proves, self.on_loopback = hear_leader, pod.proves, pod.on_loopback

    @property
    def started(self) -> bool:
        """Whether ranks have been started in the pod."""
        return bool(self._processes.ranks)

    def status(self, refused: Mapping[str, int]) -> AgentStatus:
        """Return where every rank is. refused: what the API has refused so far, by the reason."""
        ranks = [self._rank(process) for process in self._processes.ranks]
        return AgentStatus(
            job_uid=self._pod.job_uid,
            attempt=self._pod.attempt,
            ranks=ranks,
            generation=self._generation(),
            refused=dict(refused),
            restarts_in_place=self._restarts(),
            awaited=sorted(self._awaited())[:MAX_AWAITED],
        )

    def log(self, rank: int, lines: int) -> list[str] | None:
        """Return the last lines that a rank printed; None where the pod has no such rank."""
        process = self._process(rank)
        return None if process is None else process.output.last(lines)

    def figures(self, rank: int) -> Figures | None:
        """Return the last logged figures of a rank; None where the pod has no such rank."""
        return None if self._process(rank) is None else figures_of(self._pod.report_dir, rank)

    async def stacks(self, *, main: bool = False) -> dict[str, str]:
        """Return the stacks of each rank's threads, or why they cannot be had, by the rank. main: those of the main
        threads alone, the innermost calls."""
        async with self._asking:
            ranks = self._asked.ranks
            unknown = {str(process.rank): _NOT_ASKED for process in self._processes.ranks}
            found = await asyncio.gather(*(self._stacks(process) for process in ranks))
            texts = (main_thread(text, len(ranks)) for text in found) if main else found
            stacks = unknown | {str(process.rank): text for process, text in zip(ranks, texts, strict=True)}
            # Nothing is read of a longer answer.
            fits = not main or len(json.dumps({"stacks": stacks})) <= MAX_STACKS_ANSWER_BYTES
            return stacks if fits else without_collectives(stacks)

    def ask_for_checkpoint(self) -> bool:
        """Ask the ranks for a checkpoint; False where none of them would write one."""
        return bool(self._processes.alive) and request_checkpoint(self._pod.report_dir)

    def restart(self, attempt: int, generation: int, step: int, rank: int | None) -> bool | str:
        """Restart the ranks of all pods, of which this one is to be killed (None: all), unless they have done something
        else since that step of theirs; return whether that is so, or why it may not be."""
        world = self._pod.workers * self._pod.ranks_here
        if rank is not None and rank >= world:
            return f"the job has {world} ranks, and no rank {rank}"
        report = self._reports.of(self._pod.ranks.start)
        if attempt != self._pod.attempt or report is None or report.step != step:
            return False
        return self._hangs(generation, rank)

    async def _stacks(self, process: Rank) -> str:
        path = stacks_file(self._pod.report_dir, process.rank)
        if not process.alive:
            return "it has ended"
        if not path.exists():
            # A program that does not expect the signal would end by it.
            return _NOT_ASKED
        if self._is_stopped(process.pid):
            return STOPPED
        asked = ask_for_collectives(process.rank, self._pod.report_dir)
        try:
            os.truncate(path, 0)
            self._send(process.pid, STACKS_SIGNAL)
        except OSError as error:
            return f"it cannot be asked: {error.strerror}"
        found = await _written(path, lambda: process.alive and not self._is_stopped(process.pid))
        # A signal stops a process when that is given a processor next: maybe not before it was asked.
        if self._is_stopped(process.pid):
            return STOPPED
        if not found:
            return "it does not answer: it is stopped, or the disk is full"
        # So faulthandler calls the thread that has answered where it writes of others, too.
        found = found.replace(_OF_ONE_THREAD, MAIN_THREAD, 1) if found.startswith(_OF_ONE_THREAD) else found
        if not asked:
            return found
        collectives = await self._collectives(process)
        # As JSON, and with the collective calls, it is up to twice as long.
        most = min(MAX_STACKS_BYTES, MAX_WHOLE_STACKS_BYTES // (2 * len(self._asked.ranks)))
        threads = other_threads(process.rank, self._pod.report_dir)[: max(0, most - len(found))]
        return with_collectives(f"{found.rstrip()}\n\n{threads}" if threads else found, collectives)

    async def _collectives(self, process: Rank) -> list[Collective]:
        """The last collective calls of a rank that was asked for them; none where it does not answer soon."""
        for left in reversed(range(_PAUSES_FOR_COLLECTIVES)):
            found = answered_collectives(process.rank, self._pod.report_dir)
            if found is not None or not process.alive or not left:
                break
            await asyncio.sleep(_PAUSE_SECONDS)
        return found or []

    def _rank(self, process: Rank) -> RankStatus:
        rank = process.rank
        report = self._reports.of(rank)
        return RankStatus(
            rank=rank,
            pid=process.pid,
            exit_code=process.returncode,
            seconds_since_step=self._reports.seconds_since_step(rank),
            report=report,
            pace=self._steps.pace(rank) if self._steps is not None else None,
            idle=self._steps.idle(rank) if self._steps is not None else None,
        )

    def _process(self, rank: int) -> Rank | None:
        return next((process for process in self._processes.ranks if process.rank == rank), None)


async def _written(path: Path, writes: Callable[[], bool]) -> str:
    """Return what is written to the file until it stops growing. writes: whether somebody may write to it."""
    size = 0
    for _ in range(int(_STACKS_SECONDS / _PAUSE_SECONDS)):
        await asyncio.sleep(_PAUSE_SECONDS)
        with contextlib.suppress(OSError):
            former, size = size, path.stat().st_size
            if size and size == former:
                break
        if not writes():
            break
    with contextlib.suppress(OSError), path.open("rb") as file:
        return file.read(MAX_STACKS_BYTES).decode(errors="replace")
    return ""
