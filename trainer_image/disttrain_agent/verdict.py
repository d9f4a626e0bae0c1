"""How a pod ended: which of its ranks failed first, and with which exit code the agent ends. Pure."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from disttrain_api.names import PERMANENT, ExitCode, Reason, exit_reason
from disttrain_api.program_log import exception_type, last_exception
from disttrain_api.report import RankFailure, RankReport, left


@dataclass(frozen=True)
class RankEnd:
    """How one rank ended."""

    rank: int
    returncode: int
    """Negative: the signal that ended it."""
    signaled: bool = False
    """The agent had sent it a signal before."""
    report: RankReport | None = None
    tail: tuple[str, ...] = ()
    must_report: bool = False
    """Whether exit code 0 alone is no success: a rank of the trainer also reports that its work is done."""
    exception: str | None = None
    """`Type: message`, where torchrun has named it."""
    hung: bool = False
    """Whether its agent has killed it since its gang did no step."""

    @property
    def succeeded(self) -> bool:
        """Work reported as done is done, even if the process then aborts in tear-down, as gloo's do."""
        return self.done or (self.returncode == 0 and not self.must_report)

    @property
    def done(self) -> bool:
        """Whether it has reported that its work is done."""
        return self.report is not None and self.report.done

    @property
    def signal(self) -> int | None:
        return -self.returncode if self.returncode < 0 and not self._reported_code else None

    @property
    def code(self) -> int:
        """Exit code of the rank. Its own report takes precedence over how its process ended."""
        if self._reported_code:
            return self._reported_code
        if self.returncode == 0 and not self.succeeded:
            return ExitCode.STOPPED if self.signaled else ExitCode.LEFT_EARLY
        return 128 - self.returncode if self.returncode < 0 else self.returncode

    @property
    def _reported_code(self) -> int | None:
        return self.report.error.exit_code if self.report is not None and self.report.error is not None else None

    def as_failure(self) -> RankFailure:
        if self.hung and self.signal == signal.SIGKILL:
            return RankFailure(
                rank=self.rank, exit_code=self.code, signal=self.signal, reason=Reason.PROGRESS_DEADLINE_EXCEEDED,
                message="its agent killed it, since no rank did a step",
            )  # fmt: skip
        error = self.report.error if self.report is not None else None
        return RankFailure(
            rank=self.rank,
            exit_code=self.code,
            signal=self.signal,
            reason=error.reason if error else _reason(self.code),
            message=error.message if error else self._message(),
            unquoted=error.unquoted if error else self._type_of_error(),
            signature=error.signature if error else None,
            log_tail="\n".join(self.tail) or None,
        )

    def _message(self) -> str | None:
        """Return what is known of a rank that has reported no error."""
        if self.code == ExitCode.LEFT_EARLY:
            step, steps = (self.report.step, self.report.total_steps) if self.report is not None else (None, 0)
            return left(step, steps, 0, "code that it ran ended the process, for example by os._exit")
        if self.exception is not None:
            return self.exception
        # A program without a report names its error in its exception or last line; one that was killed does not.
        return last_exception("\n".join(self.tail)) or self.tail[-1] if self.tail and self.signal is None else None

    def _type_of_error(self) -> str | None:
        """Return the part of its last message for readers without the right to read its log; None: all of it, written
        by disttrain."""
        return None if self.code == ExitCode.LEFT_EARLY else exception_type(self._message() or "")


def first_cause(ends: Sequence[RankEnd]) -> RankEnd | None:
    """Return the rank whose failure explains the others, of ranks in the order of their ends; None without a
    failure."""
    failed = [
        (distance(end.code, end.signal, signaled=end.signaled), place, end)
        for place, end in enumerate(ends)
        if not end.succeeded
    ]
    return min(failed, key=lambda entry: entry[:2])[2] if failed else None


def distance(code: int | None, killed_by: int | None, *, signaled: bool) -> int:
    """Return how far a failure is from the first cause, by its exit code and signal; smaller is nearer.

    signaled: the agent had sent the rank a signal before.
    """
    if code in PERMANENT:
        return 0
    if code == ExitCode.PEER_LOST:
        return 5
    if code == ExitCode.STOPPED or (signaled and killed_by is not None):
        return 4
    if killed_by == signal.SIGKILL:
        return 1
    # gloo and NCCL abort the survivors of a dead peer.
    return 3 if killed_by == signal.SIGABRT else 2


def exit_code(ends: Sequence[RankEnd], *, stopped: bool) -> int:
    """Return the exit code of the agent. `stopped`: it had to stop before any rank had failed."""
    cause = first_cause(ends)
    if cause is None:
        return ExitCode.DONE
    if stopped and cause.code not in PERMANENT:
        return ExitCode.STOPPED
    return cause.code


def _reason(code: int) -> str | None:
    try:
        return exit_reason(ExitCode(code))
    except ValueError:
        return None
