"""What of an exception goes into its signature."""

import errno
import json
import re
import socket
import sys
from collections.abc import Callable, Iterator
from json import JSONDecodeError
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest
import torch

from disttrain_api.names import ExitCode
from disttrain_api.report import MAX_ERROR_NAME, MAX_PLACE, FailureSignature, RankError, RankReport
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.runtime.errors import (
    Fenced,
    InvalidConfiguration,
    NetworkFaulty,
    NonFiniteLoss,
    PeerLost,
    PortInUse,
    Stopped,
    StoreError,
    describe,
    describe_exit,
)


def raised(function: Callable[[], object]) -> BaseException:
    with pytest.raises(Exception) as caught:
        function()
    return caught.value


def signature(error: BaseException) -> FailureSignature:
    found = describe(error).signature
    assert found is not None
    return found


def frames(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next


def line_of(function: Callable[[], object]) -> int:
    return function.__code__.co_firstlineno + 1


def wrong_shape() -> None:
    torch.nn.Sequential(torch.nn.Linear(2, 2))(torch.zeros(3, 3))


def no_json() -> None:
    json.loads("{")


def plain() -> None:
    raise ValueError("wrong")


@pytest.mark.parametrize(
    ("function", "name"),
    [(wrong_shape, "RuntimeError"), (no_json, "json.decoder.JSONDecodeError"), (plain, "ValueError")],
)
def test_the_place_is_the_innermost_line_outside_of_libraries(function: Callable[[], None], name: str) -> None:
    found = signature(raised(function))
    assert found.error == name
    assert found.place == f"{__file__}:{line_of(function)}"
    assert found.step is None


def test_an_error_that_was_never_raised_has_no_place() -> None:
    assert signature(ValueError("wrong")).place is None


def test_an_error_raised_by_a_library_alone_has_the_place_in_it() -> None:
    namespace: dict[str, object] = {"__name__": "torch.nothing"}
    exec(compile("def f():\n    raise ValueError('wrong')\n", "/usr/torch/nothing.py", "exec"), namespace)
    function = namespace["f"]
    assert callable(function)
    error = raised(function)
    # Without the frames of this test.
    error.__traceback__ = list(frames(error))[-1]
    assert signature(error).place == "/usr/torch/nothing.py:2"


def test_names_and_places_are_bounded_and_keep_their_ends() -> None:
    kind = type("E" * 5000, (Exception,), {})
    namespace: dict[str, object] = {"__name__": "user"}
    exec(compile("def f(kind):\n    raise kind\n", "/" + "d" * 5000 + "/model.py", "exec"), namespace)
    function = namespace["f"]
    assert callable(function)
    found = signature(raised(lambda: function(kind)))
    assert len(found.error) == MAX_ERROR_NAME
    assert len(found.place) == MAX_PLACE
    assert found.place.endswith("/model.py:2")


@pytest.mark.parametrize("kind", [PeerLost, Stopped, Fenced, NetworkFaulty, PortInUse])
def test_what_comes_from_outside_has_no_signature(kind: type[Exception]) -> None:
    assert describe(kind("somebody else")).signature is None


def raised_by(module: str, error: BaseException) -> BaseException:
    """The error as it comes from a frame of this module, by way of the standard library."""
    source = "import functools\ndef fail(): raise error\nfunctools.reduce(lambda *_: fail(), [1, 2])"
    code = compile(source, module, "exec")
    return raised(lambda: exec(code, {"__name__": module, "error": error}))


@pytest.mark.parametrize(
    "module", ["torch.distributed.distributed_c10d", "disttrain_trainer.runtime.rendezvous.forwarder"]
)
def test_a_lost_connection_between_ranks_is_a_lost_peer_without_a_signature(module: str) -> None:
    found = describe(raised_by(module, ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")))
    assert (found.reason, found.signature) == ("PeerLost", None)


class LibraryError(Exception):
    """How a library says that a server does not answer."""


def wrapped(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


OUTAGES = [
    OSError(errno.ESTALE, "Stale file handle"),
    StoreError(None, "no endpoint"),
    ConnectionError("no route to the label server"),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    TimeoutError("timed out"),
    wrapped(
        LibraryError("max retries"), wrapped(OSError("new connection"), ConnectionRefusedError(errno.ECONNREFUSED))
    ),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_a_server_that_does_not_answer_has_no_signature(error: BaseException) -> None:
    """An outage of a server that outlasts one restart must not end the job as a failure that comes again exactly."""
    found = describe(raised_by("my_data", error))
    assert (found.reason, found.signature) == ("RankFailed", None)
    assert re.fullmatch(rf"{type(error).__name__} at \S*:\d+", found.unquoted or ""), "where it was raised is said"


def met_by(error: BaseException, met: BaseException) -> BaseException:
    error.__context__ = met
    return error


@pytest.mark.parametrize(("kind", "passes"), [(LibraryError, True), (ValueError, False), (JSONDecodeError, False)])
def test_an_outage_that_was_being_handled_counts_where_a_library_puts_its_own_error_in_its_place(
    kind: type[Exception], passes: bool
) -> None:
    error = met_by(JSONDecodeError("bad", "", 0) if kind is JSONDecodeError else kind("bad"), TimeoutError("timed out"))
    assert (describe(raised_by("my_data", error)).signature is None) is passes


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "no such file"), KeyError("label"), OSError("odd")])
def test_what_comes_again_exactly_has_one(error: Exception) -> None:
    assert describe(raised_by("my_data", error)).signature is not None


def failed(error: BaseException, reporter: Reporter) -> FailureSignature:
    reporter.fail(describe(error))
    assert isinstance(reporter.report.error, RankError)
    assert reporter.report.error.signature is not None
    return reporter.report.error.signature


def test_an_error_that_names_a_file_whose_name_is_no_text_is_reported(tmp_path: Path) -> None:
    reporter = Reporter(0, tmp_path)
    for error in (ValueError("no image: b\udcff.png"), InvalidConfiguration("no folder \udcff")):
        place = compile("raise error", "/data/\udcff.py", "exec")
        reporter.fail(describe(raised(lambda place=place, error=error: exec(place, {"error": error}))))
        read = RankReport.model_validate_json((tmp_path / "rank-0.json").read_bytes())
        assert read.error == reporter.report.error
        assert read.error.message.startswith(("ValueError: no image: b\\udcff.png", "no folder \\udcff"))


def test_a_report_adds_the_step() -> None:
    reporter, now = Reporter(0, None), [7]
    reporter.follow(lambda: now[0])
    now[0] = 9
    found = failed(InvalidConfiguration("wrong"), reporter)
    assert (found.step, found.steps_done) == (9, 2)


def test_before_the_first_step_is_known_none_was_done() -> None:
    found = failed(InvalidConfiguration("wrong"), Reporter(0, None))
    assert (found.step, found.steps_done) == (None, 0)


def test_a_loss_that_is_not_finite_belongs_to_its_own_step() -> None:
    reporter, now = Reporter(0, None), [7]
    reporter.follow(lambda: now[0])
    now[0] = 10
    assert describe(NonFiniteLoss("the next attempt has other samples", step=8, repeats=False)).signature is None
    found = failed(NonFiniteLoss("the loss of step 8 is nan", step=8), reporter)
    assert (found.error, found.step, found.steps_done) == ("NonFiniteLoss", 8, 3)


@pytest.mark.parametrize(
    ("code", "exit_code", "reason", "text"),
    [
        (None, ExitCode.LEFT_EARLY, "LeftEarly", "with exit code 0 before"),
        (0, ExitCode.LEFT_EARLY, "LeftEarly", "with exit code 0 before"),
        (256, ExitCode.LEFT_EARLY, "LeftEarly", "with exit code 0 before"),
        (3, 3, "RankFailed", "with exit code 3 before"),
        (int(ExitCode.DATA_NOT_FOUND), ExitCode.LEFT_EARLY, "LeftEarly", "with exit code 81 before"),
        ("wrong flags", 1, "RankFailed", "called sys.exit: wrong flags"),
    ],
)
def test_a_user_that_calls_sys_exit_is_named(code: Any, exit_code: int, reason: str, text: str) -> None:
    def leave() -> None:
        sys.exit(code)

    with pytest.raises(SystemExit) as caught:
        leave()
    found = describe_exit(caught.value, 9, 20)
    assert (found.exit_code, found.reason) == (exit_code, reason)
    assert found.message.startswith("left at step 9 of 20 with exit code ")
    assert text in found.message
    assert f"code in {__file__}:{line_of(leave)} called sys.exit" in found.message
    assert found.signature.error == "SystemExit"


def test_a_user_that_leaves_before_the_first_step_is_named() -> None:
    assert describe_exit(SystemExit(0), None, 20).message.startswith("left before its first step with exit code 0 ")
