"""The agent's API, asked over HTTP: by who knows the token, by who does not, and by who means harm."""

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from disttrain.local.folder import RunFolder
from disttrain.stacks.of_run import stacks_of_run
from disttrain_agent.connection_limits import ConnectionLimiter
from disttrain_agent.limits import Admission, Bucket, Limits
from disttrain_agent.reports import figures_file
from disttrain_api.agent_token import agent_token
from disttrain_api.names import CHECKPOINT_PATH, REPORTS_FOLDER, STACKS_SIGNAL, TOKEN_FILE, TOKEN_HEADER, Env
from disttrain_api.report import MAX_FIGURES_BYTES, AgentStatus, decode_agent_status
from disttrain_api.stacks import STOPPED, decode_stacks
from disttrain_operator.agent_client import STACKS_PATH, STATUS_PATH, Agent, ask_directly
from disttrain_operator.agent_http import NoAnswer
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.runtime.checkpoint_request import CheckpointRequest
from tests.described_answer import assert_described
from tests.waiting import GENEROUS
from tools.cluster.paths import REPOSITORY

from .conftest import Pod

JOB_TOKEN = "a token of the job"
TOKEN = agent_token(JOB_TOKEN)
TRAINING = f"""
import faulthandler, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
sys.path.insert(0, {str(REPOSITORY)!r})
part = pathlib.Path(os.environ["{Env.REPORT_DIR}"]) / "part"
faulthandler.register({STACKS_SIGNAL}, file=open(part, "ab", buffering=0))
part.rename(part.with_name(f"rank-{{rank}}.stacks"))
print("one", flush=True)
print("two", flush=True)
report(step=1, totalSteps=9, phase="Training")
ready()
def where_it_waits():
    while not (folder / "on").exists():
        time.sleep(0.01)
where_it_waits()
report(step=2, totalSteps=9, phase="Evaluating", loss=0.5, remainingSeconds=7.5)
note("stepped")
while not (folder / "done").exists():
    time.sleep(0.01)
"""


def a_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def asked(pod: Pod) -> Pod:
    """A pod whose agent can be asked, and whose rank waits for the file `on`, then for `done`."""
    pod.changes |= {Env.AGENT_PORT: str(a_port()), Env.JOB_UID: "uid-1", Env.ATTEMPT: "3"}
    (pod.folder / "token").write_text(JOB_TOKEN)
    return pod.start(TRAINING).until_ready()


def ask(pod: Pod, path: str, token: str | None = TOKEN, **options: Any) -> tuple[int, Any]:
    """Return the code and the answer, which is one that the API's document describes."""
    headers = {} if token is None else {TOKEN_HEADER: token}
    url = f"http://127.0.0.1:{pod.changes[Env.AGENT_PORT]}{path}"
    request = urllib.request.Request(url, headers=headers | options.pop("headers", {}), **options)
    try:
        with urllib.request.urlopen(request, timeout=GENEROUS) as response:
            code, answer = response.status, json.load(response)
    except urllib.error.HTTPError as error:
        code, answer = error.code, json.load(error)
    assert_described(path, request.get_method(), code, answer)
    return code, answer


def status_of(pod: Pod) -> AgentStatus:
    code, answer = ask(pod, "/v1/status")
    assert code == 200
    status = decode_agent_status(json.dumps(answer).encode())
    assert status is not None
    return status


def let_go(pod: Pod) -> None:
    (pod.folder / "on").touch()
    (pod.folder / "done").touch()
    assert pod.wait() == 0, pod.log


def test_an_agent_says_where_its_ranks_are(asked: Pod) -> None:
    first = status_of(asked)
    assert (first.job_uid, first.attempt, first.generation) == ("uid-1", 3, 0)
    (rank,) = first.ranks
    assert (rank.rank, rank.exit_code, rank.report.step, rank.report.phase) == (1, None, 1, "Training")
    assert rank.seconds_since_step is None
    os.kill(rank.pid or 0, 0)
    (asked.folder / "on").touch()
    asked.until(lambda: bool(asked.seen("stepped")), "the next step is reported")
    (rank,) = status_of(asked).ranks
    assert (rank.report.step, rank.report.phase, rank.report.remaining_seconds) == (2, "Evaluating", 7.5)
    assert rank.seconds_since_step is not None
    let_go(asked)


def test_an_agent_says_how_a_rank_gets_on_while_it_takes_steps(pod: Pod) -> None:
    pod.changes |= {Env.AGENT_PORT: str(a_port())}
    (pod.folder / "token").write_text(JOB_TOKEN)
    pod.start(
        f"""
        from disttrain_trainer.runtime.step_times import StepTimes
        report(step=20, totalSteps=90, phase="Training", loss=0.5)
        times = StepTimes(rank, pathlib.Path(os.environ["{Env.REPORT_DIR}"]))
        with times.counted():
            for _ in range(20):
                times.stepped()
            ready()
            while not (folder / "on").exists():
                time.sleep(0.01)
        note("rests")
        while not (folder / "done").exists():
            time.sleep(0.01)
        """
    ).until_ready()
    pace = status_of(pod).ranks[0].pace
    assert 0 <= pace.median_seconds <= pace.longest_seconds
    (pod.folder / "on").touch()
    pod.until(lambda: bool(pod.seen("rests")), "the rank takes no steps any more")
    assert status_of(pod).ranks[0].pace is None
    let_go(pod)


def test_an_agent_looks_at_the_times_of_steps_without_being_asked(pod: Pod) -> None:
    """Red where nothing looks between two requests: no more than a second would count of the time between them. The
    rank goes on when its agent has opened the file, which is a pipe here."""
    pod.start(
        f"""
        path = pathlib.Path(os.environ["{Env.REPORT_DIR}"], f"rank-{{rank}}.steps")
        os.mkfifo(path)
        pipe = os.open(path, os.O_WRONLY)
        path.unlink()
        os.close(pipe)
        """
    )
    assert pod.wait() == 0, pod.log


def test_an_agent_says_how_often_its_ranks_have_started_again_and_that_they_have_not_come_back(pod: Pod) -> None:
    port = {Env.AGENT_PORT: str(a_port()), Env.JOB_UID: "uid-1", Env.ATTEMPT: "3"}
    alone = {Env.NODE_RANK: "0", Env.WORLD_SIZE: "1"}
    pod.changes |= port | alone | {Env.RESTARTS_IN_PLACE: "3", Env.RESTART_BACKOFF_SECONDS: "3600"}
    (pod.folder / "token").write_text(JOB_TOKEN)
    pod.start("report(step=4, totalSteps=9, loss=0.5, phase='Training'); os.kill(os.getpid(), signal.SIGKILL)")
    pod.until(lambda: "restart 2 in place after 3600 s" in pod.log, "the second restart waits")
    status = status_of(pod)
    assert (status.generation, status.restarts_in_place.count, status.restarts_in_place.pause_seconds) == (1, 2, 3600)
    assert (status.restarts_in_place.failure.signal, status.restarts_in_place.failure.log_tail) == (9, None)
    (rank,) = status.ranks
    assert (rank.exit_code, rank.report, rank.seconds_since_step) == (-9, None, None)
    pod.signal(signal.SIGTERM)
    assert pod.wait() == 137


def test_logs_are_the_last_lines_of_a_rank(asked: Pod) -> None:
    asked.until(lambda: "[rank 1] two" in asked.log, "both lines are passed on")
    assert ask(asked, "/v1/logs?rank=1&tail=1") == (200, {"rank": 1, "lines": ["two"]})
    assert ask(asked, "/v1/logs?rank=1&tail=999999999") == (200, {"rank": 1, "lines": ["one", "two"]})
    assert ask(asked, "/v1/logs?rank=7")[0] == 404
    for wrong in ("", "?rank=", "?rank=-1", "?rank=1e3", "?rank=" + "1" * 400, "?rank=1&tail=x"):
        assert ask(asked, f"/v1/logs{wrong}")[0] == 400, wrong
    let_go(asked)


def test_figures_are_those_that_a_rank_has_logged_last_whatever_it_writes(asked: Pod) -> None:
    file = figures_file(asked.folder / "scratch" / REPORTS_FOLDER, 1)
    none = (200, {"rank": 1, "figures": {}})
    assert ask(asked, "/v1/metrics?rank=1") == none
    reporter = Reporter(1, file.parent)
    reporter.logged(7, {"grad_norm": 0.5, "lr": math.inf, "tps": math.nan})
    logged = (200, {"rank": 1, "step": 7, "figures": {"grad_norm": 0.5}})
    assert ask(asked, "/v1/metrics?rank=1") == logged
    assert ask(asked, "/v1/metrics?rank=0")[0] == 404
    for wrong in ("", "?rank=", "?rank=-1", "?rank=1e3", "?rank=" + "1" * 400):
        assert ask(asked, f"/v1/metrics{wrong}")[0] == 400, wrong
    many = {f"{number:03}": 1 for number in range(100)}
    written = {"rank": 0, "step": 8, "figures": {"a" * 129: 1, "": 1, "text": "1", "true": True, "large": 1e309} | many}
    file.write_text(json.dumps(written))
    code, answer = ask(asked, "/v1/metrics?rank=1")
    assert (code, answer["rank"], list(answer["figures"])) == (200, 1, sorted(many)[:64])
    bad = ("", "{", "[]", '{"rank": 1, "step": -1}', "\0" * 9, json.dumps(written) + " " * MAX_FIGURES_BYTES)
    for number, text in enumerate(bad):
        file.write_text(text)
        assert ask(asked, "/v1/metrics?rank=1") == none, number
    file.unlink()
    file.mkdir()
    assert ask(asked, "/v1/metrics?rank=1") == none
    let_go(asked)


@pytest.mark.skipif(sys.platform != "linux", reason="real-time signals")
def test_stacks_name_the_function_that_a_rank_is_in_and_a_rank_that_is_stopped_says_nothing(asked: Pod) -> None:
    code, answer = ask(asked, "/v1/stacks")
    assert code == 200
    assert "where_it_waits" in answer["stacks"]["1"]
    run = RunFolder(asked.folder)
    run.write_support({TOKEN_FILE: JOB_TOKEN}, None, [int(asked.changes[Env.AGENT_PORT])])
    assert "where_it_waits" in stacks_of_run(run, 1, ranks_per_pod=2)
    code, of_main = ask(asked, "/v1/stacks?thread=main")
    assert (code, of_main["stacks"]["1"].partition(" ")[0]) == (200, "Current")
    assert "where_it_waits" in of_main["stacks"]["1"]
    assert ask(asked, "/v1/stacks?thread=1")[0] == 400
    pid = status_of(asked).ranks[0].pid or 0
    os.kill(pid, signal.SIGSTOP)
    assert ask(asked, "/v1/stacks")[1]["stacks"]["1"] == STOPPED
    os.kill(pid, signal.SIGCONT)
    let_go(asked)


def test_ranks_that_listen_see_each_request_for_a_checkpoint(asked: Pod) -> None:
    """Red without: the check that the file is there, a time that always grows."""
    code, answer = ask(asked, CHECKPOINT_PATH, method="POST")
    assert (code, "its ranks do not train now" in answer["error"]) == (409, True)
    request = CheckpointRequest(asked.folder / "scratch" / REPORTS_FOLDER)
    peer = CheckpointRequest(asked.folder / "scratch" / REPORTS_FOLDER)
    assert not request.pending
    for _ in range(3):
        assert ask(asked, CHECKPOINT_PATH, method="POST") == (200, {"requested": True})
        assert request.pending
        assert peer.pending, "each rank answers for itself"
        request.answered()
        assert not request.pending
        peer.answered()
    let_go(asked)


def test_the_operators_client_takes_what_an_agent_answers(asked: Pod) -> None:
    agent = Agent("uid-1", "pod", 3, "127.0.0.1", int(asked.changes[Env.AGENT_PORT]))
    status = decode_agent_status(asyncio.run(ask_directly(agent, TOKEN, STATUS_PATH)))
    assert status is not None
    assert [rank.report.step for rank in status.ranks] == [1]
    stacks = decode_stacks(asyncio.run(ask_directly(agent, TOKEN, STACKS_PATH)), range(1, 2))
    assert "where_it_waits" in stacks[1]
    for token, path, code in (("another", STATUS_PATH, 401), (TOKEN, CHECKPOINT_PATH, 409)):
        with pytest.raises(NoAnswer, match=f"it answers {code}"):
            asyncio.run(ask_directly(agent, token, path))
    let_go(asked)


def test_who_does_not_know_the_token_learns_nothing_and_is_counted(asked: Pod) -> None:
    """Red where a begin of the token is enough, where another method than GET is answered, and where a body is read."""
    # No more than are answered at once.
    paths = ("/v1/logs?rank=1", "/v1/metrics?rank=1", "/v1/stacks", CHECKPOINT_PATH, "/v1/none")
    wrong = (None, "", JOB_TOKEN, TOKEN + "x", TOKEN[:-1], "\xe9")
    for token, path in (*((token, "/v1/status") for token in wrong), *((TOKEN[:-1], path) for path in paths)):
        code, answer = ask(asked, path, token)
        assert (code, list(answer)) == (401, ["error"])
    assert ask(asked, "/healthz", None) == (200, {"ok": True})
    assert ask(asked, "/v1/none")[0] == 404
    assert ask(asked, "/v1/status", method="DELETE")[0] == 405
    assert ask(asked, CHECKPOINT_PATH)[0] == 405, "asking for a checkpoint changes something"
    assert ask(asked, "/v1/status", data=b"{}")[0] == 413
    assert status_of(asked).refused["token"] == 11
    let_go(asked)


def test_an_agent_without_token_or_port_answers_nobody_and_trains(pods: Callable[..., Pod]) -> None:
    pod = pods(1, **{Env.AGENT_PORT: str(a_port())}).start(TRAINING).until_ready()
    # Not by asking: whoever runs beside may have taken the port meanwhile.
    connections = psutil.Process(pod.process.pid).net_connections("tcp")
    assert [one.laddr for one in connections if one.status == psutil.CONN_LISTEN] == []
    let_go(pod)


def test_a_port_that_is_taken_costs_the_api_alone(pod: Pod) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        pod.changes[Env.AGENT_PORT] = str(taken.getsockname()[1])
        (pod.folder / "token").write_text(JOB_TOKEN)
        let_go(pod.start(TRAINING))
    assert "cannot listen" in pod.log


def test_hostile_clients_are_refused_and_disturb_nothing(asked: Pod) -> None:
    """Garbage, floods, bodies and headers without end, connections that say nothing or half of it, all with the token.

    Red without the bound on a connection's bytes, without the refusal of bodies, and without the bound on connections.
    """
    address = ("127.0.0.1", int(asked.changes[Env.AGENT_PORT] or 0))
    status_of(asked)

    def send(*parts: bytes, shut: bool = False) -> bytes:
        with socket.create_connection(address, GENEROUS) as connection:
            try:
                for part in parts:
                    connection.sendall(part)
                if shut:
                    connection.shutdown(socket.SHUT_WR)
                return connection.recv(65536)
            except ConnectionError:
                return b""

    head = f"GET /v1/status HTTP/1.1\r\nHost: a\r\n{TOKEN_HEADER}: {TOKEN}\r\n".encode()
    headers = [b"X%d: " % number + b"x" * 2000 + b"\r\n" for number in range(10)]
    assert b"200 OK" in send(head, *headers[:5], b"\r\n"), "so far nothing is wrong"
    assert b"200 OK" not in send(head, *headers, b"\r\n")
    assert status_of(asked).refused == {"size": 1}
    assert b"413" in send(head + b"Transfer-Encoding: chunked\r\n\r\n", b"1000\r\n" + b"x" * 4096 + b"\r\n")
    assert status_of(asked).refused == {"size": 2}
    assert b"400" in send(b"\x00\xff" * 2000)
    assert b"400" in send(head, b"X: ", b"x" * 8000)
    assert send(head, shut=True) == b""
    assert status_of(asked).refused == {"size": 2, "incomplete": 3}
    waiting = [socket.create_connection(address, GENEROUS) for _ in range(30)]
    flood = [socket.create_connection(address, GENEROUS) for _ in range(300)]
    for connection in (*flood, *waiting):
        connection.close()

    refused = status_of_when_let_in(asked).refused
    assert refused["connections"] > 100
    assert "Traceback" not in asked.log
    let_go(asked)


def status_of_when_let_in(pod: Pod) -> AgentStatus:
    found: list[AgentStatus] = []

    def answers() -> bool:
        try:
            found.append(status_of(pod))
        except OSError:
            return False
        return True

    pod.until(answers, "the agent lets one more in")
    return found[-1]


def test_a_connection_ends_with_its_time() -> None:
    """Red without the bound on the seconds of a connection."""
    limits = Limits(seconds=0.05)

    async def refused_of_a_silent_client() -> Counter[str]:
        admission = Admission(limits)
        limiter = ConnectionLimiter(asyncio.Protocol, admission, limits)
        async with await asyncio.get_running_loop().create_server(limiter, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            with contextlib.suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), GENEROUS) == b""
            writer.close()
        return admission.refused

    assert asyncio.run(refused_of_a_silent_client()) == {"time": 1}


def test_a_bucket_gives_its_rate_and_twice_that_at_once() -> None:
    bucket = Bucket(10, now=0.0)
    assert [bucket.take(0.0) for _ in range(21)] == [True] * 20 + [False]
    assert [bucket.take(0.1), bucket.take(0.1)] == [True, False]
    assert sum(bucket.take(100.0) for _ in range(50)) == 20


def test_one_address_does_not_take_all_connections() -> None:
    admission = Admission(Limits(connections=4, connections_of_address=2, connections_per_second=100))
    assert [admission.enter("a", 0) for _ in range(3)] == [True, True, False]
    assert [admission.enter(other, 0) for other in "bcd"] == [True, True, False]
    admission.leave("a")
    assert [admission.enter("a", 0), admission.enter("a", 0)] == [True, False]
    assert admission.refused == {"connections": 3}
