"""How a program of the user's own has ended, whose process has all ranks of its pod: as the rank that failed first.

Pure.
"""

from collections.abc import Iterable, Sequence

from disttrain_agent.output import TAIL_LINES
from disttrain_agent.verdict import RankEnd, first_cause
from disttrain_api.names import ExitCode
from disttrain_api.program_log import of_torchrun_child, torchrun_child
from disttrain_api.report import RankReport

_OF_A_LAUNCHER = 1
"""With this code torchrun ends, and Python after an exception: of a rank more may be known."""
_SIGNALLED = 128
"""With so much and the signal a shell ends whose program a signal has ended."""
_OF_THE_TRAINER = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.STOPPED}


def end_of_program(
    rank: int, returncode: int, reports: Iterable[RankReport], lines: Sequence[str], *, signaled: bool
) -> RankEnd:
    """Return the end of the rank by which the program failed.

    rank: the first of the pod. returncode: of the process; negative: a signal. reports: of the ranks. lines: the last
    ones that they printed.
    """
    if _SIGNALLED < returncode < _SIGNALLED + 32 and returncode != ExitCode.STOPPED:
        returncode = _SIGNALLED - returncode
    process = RankEnd(rank, _meaningless(returncode), signaled, tail=tuple(lines[-TAIL_LINES:]))
    if returncode <= 0:
        return process
    found = [
        RankEnd(report.rank, returncode, signaled, report.model_copy(update={"done": False}), process.tail)
        for report in reports
        if report.error is not None and returncode in (_OF_A_LAUNCHER, report.error.exit_code)
    ]
    if returncode == _OF_A_LAUNCHER and (child := torchrun_child(log := "\n".join(lines))) is not None:
        code = ExitCode.PEER_LOST if child.lost_a_peer else _meaningless(child.exit_code)
        tail = of_torchrun_child(log).splitlines()[-TAIL_LINES:]
        found.append(RankEnd(child.rank, code, signaled, tail=tuple(tail), exception=child.exception))
    return first_cause(found) or process


def _meaningless(code: int) -> int:
    """The exit code of a rank that has reported no error: a number of the trainer's is another program's."""
    return _OF_A_LAUNCHER if code in _OF_THE_TRAINER else code
