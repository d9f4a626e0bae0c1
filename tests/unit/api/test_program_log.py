"""What is read from the end of a program's log."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from disttrain_api.program_log import Child, last_exception, of_torchrun_child, torchrun_child
from tests.recorded import kept, torchrun_log

VALUE_ERROR = "ValueError: a sample that cannot be read"


@pytest.mark.parametrize(
    ("name", "whole", "cut"),
    [
        ("raised", Child(1, 1, VALUE_ERROR), Child(1, 1)),
        ("recorded", Child(1, 1, VALUE_ERROR), Child(1, 1, VALUE_ERROR)),
        ("raised_of_one_rank", Child(1, 1, VALUE_ERROR), Child(1, 1, VALUE_ERROR)),
        ("killed", Child(1, -9), Child(1, -9)),
        ("exited", Child(1, 3), Child(1, 3)),
    ],
)
def test_torchruns_table_names_the_rank_that_failed_first(name: str, whole: Child, cut: Child) -> None:
    """Also in what Kubernetes keeps of a log, where its exception may be cut off."""
    assert torchrun_child(torchrun_log(name)) == whole
    assert torchrun_child(kept(torchrun_log(name))) == cut


@pytest.mark.parametrize("cut", [False, True])
def test_a_rank_that_lost_its_peer_is_known_as_one(cut: bool) -> None:
    log = torchrun_log("peer_of_one_rank")
    child = torchrun_child(kept(log) if cut else log)
    assert (child.rank, child.lost_a_peer) == (0, True)
    if not cut:
        assert child.exception.startswith("RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/")


def test_the_exception_of_another_rank_is_not_taken_for_the_one_that_failed() -> None:
    log = "\n".join(line for line in torchrun_log("raised").splitlines() if not line.startswith("[rank1]"))
    assert torchrun_child(log) == Child(1, 1)


def test_a_child_that_torchrun_stopped_is_not_the_first_that_failed() -> None:
    log = torchrun_log("killed").replace("-9 (pid", "-x (pid").replace("-15 (pid", "-9 (pid").replace("-x (", "-15 (")
    assert torchrun_child(log) == Child(0, -9)


@pytest.mark.parametrize("log", ["", "a line", "Root Cause (first observed failure):", VALUE_ERROR])
def test_another_log_has_no_child(log: str) -> None:
    assert torchrun_child(log) is None


TABLE = torchrun_log("raised").splitlines()
ODD = ["", " ", "[0]:", "  exitcode  : -99999999 (pid: 7)", "  rank      : 99999999999 (local_rank: 0)"]
EXIT_CODE = max(place for place, line in enumerate(TABLE) if "exitcode" in line)
CHANGES = st.tuples(st.integers(0, len(TABLE) - 1), st.integers(0, 2), st.sampled_from([*TABLE, *ODD]))


@given(st.lists(CHANGES, max_size=5))
@example([(EXIT_CODE, 1, ODD[3])])
@example([(EXIT_CODE - 1, 1, ODD[4])])
def test_no_log_is_too_odd(changes: list[tuple[int, int, str]]) -> None:
    """A log of torchrun's with lines left out, put in and exchanged. Red where a number in it may have any length, or
    where a table without an entry is taken for one."""
    lines = list(TABLE)
    for place, taken, line in changes:
        lines[place : place + taken] = [line]
    log = "\n".join(lines)
    child = torchrun_child(log)
    assert child is None or (child.rank in (0, 1) and -9999 <= child.exit_code <= 9999)
    last_exception(log)
    assert len(of_torchrun_child(log)) <= len(log)


@pytest.mark.parametrize("name", ["raised", "recorded", "killed", "exited"])
def test_little_is_left_of_a_log_where_only_the_child_counts(name: str) -> None:
    log = torchrun_log(name)
    shorter = of_torchrun_child(log)
    assert len(shorter) < len(log) - 1000
    assert torchrun_child(shorter) == torchrun_child(log)
    assert "launch_agent" not in shorter
    assert "[rank0]" not in shorter


def test_another_log_is_left_as_it_is() -> None:
    assert of_torchrun_child(TRACEBACK) == TRACEBACK


TRACEBACK = """\
step: 3
Traceback (most recent call last):
  File "/app/train.py", line 12, in <module>
    main()
    ~~~~^^
  File "/app/train.py", line 4, in main
    raise KeyError("image")
KeyError: 'image'
"""


@pytest.mark.parametrize(
    ("log", "exception"),
    [
        (TRACEBACK, "KeyError: 'image'"),
        (TRACEBACK + "wandb: run finished\nwandb: bye\n", "KeyError: 'image'"),
        (TRACEBACK[TRACEBACK.index("    main()") :], "KeyError: 'image'"),
        (TRACEBACK.replace("\n", "\n[rank3]: "), "KeyError: 'image'"),
        (TRACEBACK.replace("KeyError: 'image'", "my.package.Wrong: a\nb"), "my.package.Wrong: a"),
        (TRACEBACK.replace("KeyError: 'image'", "KeyboardInterrupt"), "KeyboardInterrupt"),
        (TRACEBACK.replace("KeyError: 'image'", "E" * 5000 + ": x"), "E" * 500),
        (TRACEBACK.replace("KeyError: 'image'\n", ""), None),
        (TRACEBACK.replace("'image'", "of `Net`:\n\tno `a`\n\n\tno `b`\nbye"), "KeyError: of `Net`: no `b`"),
        (TRACEBACK.replace("'image'", "of `Net`:\n\t" + "b" * 5000), "KeyError: of `Net`: " + "b" * 500),
        (TRACEBACK.replace("'image'", "of `Net`:\nbye"), "KeyError: of `Net`:"),
        ("ValueError: no traceback", None),
        ("", None),
    ],
)
def test_the_last_exception_of_a_log(log: str, exception: str | None) -> None:
    assert last_exception(log) == exception
