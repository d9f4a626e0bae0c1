"""How a program with all ranks of its pod has ended: by which of them, as far as torchrun or the ranks say."""

import signal

import pytest

from disttrain_agent.own_program import end_of_program
from disttrain_agent.verdict import RankEnd
from disttrain_api.names import ExitCode
from disttrain_api.report import RankError, RankReport

TABLE = """
E1129 03:00:00.000000 7 torch/distributed/elastic/multiprocessing/api.py:986] failed
Traceback (most recent call last):
  File "/usr/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-29_03:00:00
  host      : a
  rank      : 5 (local_rank: 1)
  exitcode  : CODE (pid: 9)
  error_file: <N/A>
============================================================
"""
LOST = "RuntimeError: [../third_party/gloo/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:29500"


def table(code: int, *before: str) -> list[str]:
    return [*before, *TABLE.replace("CODE", str(code)).splitlines()]


def reported(rank: int, code: int, *, done: bool = False) -> RankReport:
    error = RankError(exit_code=code, reason="Any", message="a sentence")
    return RankReport(rank=rank, step=3, total_steps=9, error=error, done=done)


def end(returncode: int, *reports: RankReport, lines: list[str] | None = None, signaled: bool = False) -> RankEnd:
    return end_of_program(4, returncode, reports, lines or [], signaled=signaled)


def test_a_program_that_reports_nothing_ends_as_its_process() -> None:
    found = end(7, lines=["ValueError: bad"])
    assert (found.rank, found.code, found.signal, found.as_failure().message) == (4, 7, None, "ValueError: bad")
    assert end(0).succeeded
    killed = end(-signal.SIGKILL, signaled=True)
    assert (killed.code, killed.signal, killed.signaled) == (137, 9, True)


def test_a_shells_code_for_a_signal_is_the_signal_but_not_that_of_a_stop() -> None:
    assert (end(137).code, end(137).signal) == (137, 9)
    assert (end(ExitCode.STOPPED).code, end(ExitCode.STOPPED).signal) == (ExitCode.STOPPED, None)


@pytest.mark.parametrize("code", [ExitCode.CHECKPOINT_MISMATCH, ExitCode.FENCED, ExitCode.PEER_LOST])
def test_a_number_of_the_trainers_counts_from_a_session_alone(code: ExitCode) -> None:
    assert end(code).code == 1
    assert (end(code, reported(4, code)).code, end(1, reported(6, code)).code) == (code, code)
    assert end(1, reported(6, code)).rank == 6
    assert end(1, lines=table(code)).code == 1, "nor from a child of torchrun"


def test_an_error_that_a_rank_has_reported_explains_no_other_exit_code() -> None:
    assert end(64, reported(4, ExitCode.NON_FINITE_LOSS)).code == 64
    assert end(-signal.SIGKILL, reported(4, ExitCode.NON_FINITE_LOSS)).signal == 9
    assert end(0, reported(4, ExitCode.NON_FINITE_LOSS)).succeeded
    assert not end(1, reported(4, 1, done=True)).succeeded, "what comes after a session may fail"


def test_the_rank_that_torchrun_names_is_the_one_that_failed() -> None:
    killed = end(1, lines=table(-9))
    assert (killed.rank, killed.code, killed.signal) == (5, 137, 9)
    raised = end(1, lines=table(3, "[rank5]: Traceback", '[rank5]:   File "a.py", line 1', "[rank5]: KeyError: 'x'"))
    failure = raised.as_failure()
    assert (failure.rank, failure.exit_code, failure.message) == (5, 3, "KeyError: 'x'")
    assert failure.unquoted == "KeyError"


def test_a_lost_peer_is_no_cause_whether_torchrun_or_a_session_says_so() -> None:
    said = ["[rank5]: Traceback", '[rank5]:   File "a.py", line 1', f"[rank5]: {LOST}"]
    assert end(1, lines=table(1, *said)).code == ExitCode.PEER_LOST
    killed = end(1, reported(4, ExitCode.PEER_LOST), lines=table(-9))
    assert (killed.rank, killed.signal) == (5, 9)
