"""The end of a rank's process, with what the rank has reported and printed."""

from collections.abc import Sequence
from dataclasses import replace

from disttrain_agent.environment import PodEnvironment
from disttrain_agent.output import KEPT_LINES
from disttrain_agent.own_program import end_of_program
from disttrain_agent.processes import RankProcess
from disttrain_agent.reports import Reports
from disttrain_agent.verdict import RankEnd
from disttrain_api.names import ExitCode, exit_reason
from disttrain_api.report import RankFailure


def end_of(process: RankProcess, pod: PodEnvironment, reports: Reports, *, must_report: bool) -> RankEnd:
    """Return how a rank of a pod has ended. must_report: whether it has succeeded only where it has reported so."""
    assert process.returncode is not None
    if pod.config is None:
        found = [report for rank in pod.ranks if (report := reports.of(rank)) is not None]
        lines = process.output.last(KEPT_LINES)
        end = end_of_program(process.rank, process.returncode, found, lines, signaled=process.signaled)
        return replace(end, hung=process.hung)
    return RankEnd(
        rank=process.rank,
        returncode=process.returncode,
        signaled=process.signaled,
        report=reports.of(process.rank),
        tail=tuple(process.output.tail),
        must_report=must_report,
        hung=process.hung,
    )


def own_failure(rank: int, code: ExitCode, message: str) -> RankFailure:
    """Return a failure that the agent reports for its pod."""
    return RankFailure(rank=rank, exit_code=code, reason=exit_reason(code), message=message)


def names(processes: Sequence[RankProcess]) -> str:
    """Return the numbers of ranks, for a sentence."""
    return ", ".join(str(process.rank) for process in processes)
