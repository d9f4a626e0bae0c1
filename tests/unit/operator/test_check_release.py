"""What `helm test` finds: one replica leads and all are ready, or a sentence that says what is wrong."""

import asyncio
import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from disttrain_operator.check_release import Replica, ask, check, problem
from disttrain_operator.health import Health
from disttrain_operator.lag import LoopLag
from disttrain_operator.metrics import Figures, Metrics


def replica(*, ready: bool = True, leads: bool = False, state: str = "stands by") -> Replica:
    return Replica("10.0.0.1", ready, leads, state)


@pytest.mark.parametrize(
    ("replicas", "sentence"),
    [
        ([replica(leads=True)], None),
        ([replica(), replica(leads=True)], None),
        ([], "no replica is ready"),
        ([replica(), replica(leads=True, ready=False)], "not every replica is ready"),
        ([replica(state="stands by for release ops/one")], "0 of 1 replicas lead, not one: 10.0.0.1 stands by for"),
        ([replica(leads=True), replica(leads=True)], "2 of 2 replicas lead"),
    ],
)
def test_what_is_wrong_is_a_sentence(replicas: list[Replica], sentence: str | None) -> None:
    found = problem(replicas)
    assert found is None if sentence is None else sentence in (found or "")


@pytest.mark.parametrize("leads", [True, False])
async def test_a_replica_is_asked_whether_it_leads(leads: bool) -> None:
    metrics = Metrics()
    metrics.registry.register(Figures(lambda: {"leader": float(leads)}, dict))
    health = Health([], LoopLag(), metrics, lambda: "leads as a" if leads else "stands by as a")
    await health.serve("127.0.0.1", 0)
    assert health.address is not None
    try:
        _, port = health.address
        asked = await asyncio.to_thread(ask, "127.0.0.1", port)
        assert (asked.ready, asked.leads, asked.state) == (True, leads, "leads as a" if leads else "stands by as a")
        found = await asyncio.to_thread(check, "127.0.0.1", port, 0)
        assert found is None if leads else "0 of 1 replicas lead" in (found or "")
    finally:
        await health.close()
    assert not (await asyncio.to_thread(ask, "127.0.0.1", port)).ready


class Odd(BaseHTTPRequestHandler):
    """Somebody else who answers at a replica's address."""

    body, begin = b"", b""

    def do_GET(self) -> None:
        if self.begin:
            self.wfile.write(self.begin)
            return
        self.send_response(200)
        self.end_headers()
        with contextlib.suppress(OSError):
            self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        return None


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ({"body": b"a\nleads \x1b[2J\x1b]0;x\x07\xff \xe2\x80\xae"}, r"leads \x1b[2J\x1b]0;x\x07� \u202e"),
        ({"body": b"x" * 100_000}, "x" * 900),
        ({"begin": b"\x1b[2J no HTTP\r\n"}, r"does not answer: \x1b[2J no HTTP"),
    ],
    ids=["control characters", "a long line", "no HTTP"],
)
def test_what_a_stranger_says_is_a_line_of_text(answer, state, capsys):
    """Red where the answer is shown as it came."""
    handler = type("Handler", (Odd,), answer)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        try:
            found = check("127.0.0.1", server.server_port, 0)
        finally:
            server.shutdown()
    assert f"127.0.0.1 {state}" in found
    assert found.isprintable()
    assert len(found) < 2000


def test_a_host_that_nobody_knows_is_no_replica() -> None:
    assert check("no-such-host.invalid", 1, 0) == "no replica is ready"
