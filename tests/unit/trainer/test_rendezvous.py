"""Where ranks meet: who has the attempt's key gets through to the store; nobody else does, or keeps others out."""

import os
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.attempt_key import attempt_key
from disttrain_api.handshake import NONCE_BYTES, Refused, answer_to, check_proof, hello_of, proof_for, read_hello
from disttrain_api.pod_address import is_loopback
from disttrain_api.unproven import Waiting, source_of
from disttrain_trainer.runtime.rendezvous.forwarder import Forwarder, Place, dial, next_pause
from disttrain_trainer.runtime.rendezvous.gateway import Gateway
from disttrain_trainer.runtime.rendezvous.loop import Loop
from disttrain_trainer.runtime.rendezvous.store import _log as log
from disttrain_trainer.runtime.rendezvous.store import open_store
from tests.hostile_peer import Outcome, Peer, churn, garbage, half_open, handshake, store, stream
from tests.suites import examples
from tests.waiting import GENEROUS, until
from tools.cluster.ports import free_port

KEY = attempt_key("a token", "rendezvous", "uid", 2)
OLDER = attempt_key("a token", "rendezvous", "uid", 1)


def tries(seconds: float, world_size: int) -> list[float]:
    """When a rank tries in so many seconds, of which the tries themselves take none; the last one is after them."""
    found, pause = [0.0], 0.005
    while found[-1] < seconds:
        found.append(found[-1] + pause)
        pause = next_pause(pause, found[-1], world_size)
    return found


@pytest.mark.parametrize("seconds", [0.1, 1.0, 3.0, 19.0])
def test_a_rank_waits_hardly_longer_than_until_rank_0_is_there(seconds: float) -> None:
    assert tries(seconds, 2)[-1] - seconds <= 0.06 * seconds + 0.005
    assert len(tries(seconds, 2)) < 150, "each may ask a name server"


@pytest.mark.parametrize("world_size", [100, 1000, 10_000])
def test_many_ranks_do_not_flood_rank_0(world_size: int) -> None:
    assert sum(time > 2 for time in tries(60.0, world_size)) / 58 * world_size <= max(1100, 1.1 * world_size)


class TestHandshake:
    HELLO = hello_of(1, 2, b"r" * NONCE_BYTES)
    NONCE = b"g" * NONCE_BYTES

    def test_who_has_the_key_is_let_in(self) -> None:
        assert read_hello(self.HELLO, 2).rank == 1
        proof = proof_for(self.HELLO, answer_to(self.HELLO, self.NONCE, KEY), KEY)
        check_proof(proof, self.HELLO, self.NONCE, KEY)

    def test_a_rank_proves_nothing_to_who_lacks_the_key(self) -> None:
        with pytest.raises(Refused, match="does not know the token of this attempt"):
            proof_for(self.HELLO, answer_to(self.HELLO, self.NONCE, OLDER), KEY)

    def test_an_older_attempt_is_refused(self) -> None:
        proof = proof_for(self.HELLO, answer_to(self.HELLO, self.NONCE, OLDER), OLDER)
        with pytest.raises(Refused, match="does not know the token of this attempt"):
            check_proof(proof, self.HELLO, self.NONCE, KEY)

    @given(st.integers(0, 32 * 8 - 1), st.integers(0, len(HELLO) * 8 - 1), st.integers(0, 32 * 8 - 1))
    def test_no_bit_of_it_may_differ(self, in_proof: int, in_hello: int, in_nonce: int) -> None:
        proof = proof_for(self.HELLO, answer_to(self.HELLO, self.NONCE, KEY), KEY)
        for other in (
            (flipped(proof, in_proof), self.HELLO, self.NONCE),
            (proof, flipped(self.HELLO, in_hello), self.NONCE),
            (proof, self.HELLO, flipped(self.NONCE, in_nonce)),
        ):
            with pytest.raises(Refused, match="does not know the token of this attempt"):
                check_proof(*other, KEY)

    def test_the_answer_is_no_proof(self) -> None:
        """Else a stranger could send back what the gateway has answered to another connection of its own."""
        answer = answer_to(self.HELLO, self.NONCE, KEY)
        with pytest.raises(Refused, match="does not know the token of this attempt"):
            check_proof(answer[NONCE_BYTES:], self.HELLO, self.NONCE, KEY)

    @pytest.mark.parametrize(("rank", "size"), [(1, 3), (2, 2), (2**32 - 1, 2)])
    def test_a_rank_of_another_world_is_refused(self, rank: int, size: int) -> None:
        with pytest.raises(Refused, match=f"it is rank {rank} of {size}, this world has 2"):
            read_hello(hello_of(rank, size, self.NONCE), 2)

    @given(st.binary(max_size=100))
    def test_what_is_no_hello_is_refused_from_its_first_wrong_byte(self, data: bytes) -> None:
        start = self.HELLO[:23]
        same = next((index for index, (one, two) in enumerate(zip(data, start, strict=False)) if one != two), None)
        if same is not None:
            with pytest.raises(Refused, match="another protocol"):
                read_hello(data[: same + 1], 2)


def flipped(data: bytes, bit: int) -> bytes:
    found = bytearray(data)
    found[bit // 8] ^= 1 << bit % 8
    return bytes(found)


def test_each_purpose_attempt_and_generation_has_a_key_of_its_own() -> None:
    keys = {
        attempt_key(token, purpose, uid, attempt, generation)
        for token in "ab"
        for purpose in ("rendezvous", "parameter server")
        for uid in "uv"
        for attempt in (1, 2)
        for generation in (0, 1, 2)
    }
    assert len(keys) == 48
    with pytest.raises(ValueError, match="empty"):
        attempt_key(" \n", "rendezvous", "u", 1)


class TestWaiting:
    def test_the_source_with_most_loses_its_oldest(self) -> None:
        waiting: Waiting[str] = Waiting(most=3)
        assert waiting.add("a1", "a", 0) is None
        assert waiting.add("b1", "b", 1) is None
        assert waiting.add("a2", "a", 2) is None
        assert waiting.add("c1", "c", 3) == "a1"
        assert waiting.add("a3", "a", 4) == "a2"

    def test_time_ends_what_waits_for_nothing(self) -> None:
        waiting: Waiting[str] = Waiting(seconds=10)
        for at, name in enumerate("abc"):
            waiting.add(name, name, at)
        waiting.remove("b")
        assert waiting.next_expiry() == 10
        assert waiting.expired(11) == ["a"]
        assert waiting.expired(12) == ["c"]
        assert waiting.next_expiry() is None

    @given(st.lists(st.tuples(st.sampled_from("ABCD"), st.booleans()), max_size=80))
    @settings(max_examples=examples(200))
    def test_a_source_with_few_is_never_pushed_out(self, events: list[tuple[str, bool]]) -> None:
        """Few: no more than its part of the places if all sources had as many."""
        waiting: Waiting[int] = Waiting(most=8)
        held: dict[int, str] = {}
        for number, (source, leaves) in enumerate(events):
            counts = {one: list(held.values()).count(one) for one in "ABCD"}
            pushed_out = waiting.add(number, source, number)
            held[number] = source
            if pushed_out is not None:
                assert counts[held[pushed_out]] + (held[pushed_out] == source) > 2
                del held[pushed_out]
            if leaves and held:
                gone = next(iter(held))
                waiting.remove(gone)
                del held[gone]
            assert len(waiting) == len(held) <= 8

    @pytest.mark.parametrize(
        ("address", "source"),
        [
            ("10.0.0.7", "10.0.0.7"),
            ("::ffff:10.0.0.7", "10.0.0.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
            ("fe80::1%eth0", "fe80::/64"),
        ],
    )
    def test_a_subnet_is_one_source(self, address: str, source: str) -> None:
        assert source_of(address) == source


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("10.0.0.1", False), ("job-0", False)],
)
def test_a_loopback_address_is_known(host: str, alone: bool) -> None:
    assert is_loopback(host) is alone


class Echo:
    """In the store's place: sends back what it gets, and remembers how much that was."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while data := connection.recv(65536):
                connection.sendall(data)


class World:
    """A gateway before an Echo."""

    def __init__(self) -> None:
        self.refusals: list[str] = []
        self.echo = Echo()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port = listener.getsockname()[1]
        self.gateway = Gateway(listener, self.echo.listener.getsockname(), KEY, 2, self.refusals.append)

    def place(self, key: bytes = KEY, rank: int = 1, size: int = 2) -> Place:
        return Place("127.0.0.1", self.port, rank, size, key)


@pytest.fixture
def world() -> Iterator[World]:
    found = World()
    yield found
    found.gateway.close()
    found.echo.listener.close()


@contextmanager
def forwarder(place: Place) -> Iterator[Forwarder]:
    found = Forwarder(place, dial(place, GENEROUS), GENEROUS)
    yield found
    found.close()


def echoes(connection: socket.socket, message: bytes) -> bool:
    """Whether a message comes back whole, sent while it comes back."""
    connection.settimeout(GENEROUS)
    sender = threading.Thread(target=connection.sendall, args=(message,))
    sender.start()
    received = bytearray()
    while len(received) < len(message) and (data := connection.recv(2**20)):
        received += data
    sender.join()
    return bytes(received) == message


class TestLoop:
    def test_ends_where_it_was_awake_when_it_was_closed(self) -> None:
        # Its tick asks for the next turn at once: it sees that it has to end before the closer has woken it.
        for _ in range(200):
            loop = Loop("busy", lambda now: now)
            loop.start()
            loop.close()
            loop.close()

    def test_does_what_was_left_before_its_end_and_takes_nothing_after(self) -> None:
        done: list[int] = []
        loop = Loop("idle")
        assert loop.call(lambda: done.append(1))
        loop.start()
        loop.close()
        assert not loop.call(lambda: done.append(2))
        assert done == [1]


class TestGateway:
    def test_every_byte_goes_both_ways(self, world: World) -> None:
        with dial(world.place(), GENEROUS) as connection:
            assert echoes(connection, os.urandom(2**24))

    def test_through_a_forwarder_too_and_with_several_connections(self, world: World) -> None:
        with forwarder(world.place()) as found:
            connections = [socket.create_connection(("127.0.0.1", found.port)) for _ in range(5)]
            for connection in connections:
                assert echoes(connection, os.urandom(2**20))
            for connection in connections:
                connection.close()
        assert world.echo.connections == 5
        assert world.refusals == []

    def test_who_does_not_read_holds_no_memory_and_nobody_up(self, world: World) -> None:
        with dial(world.place(), GENEROUS) as stuck, dial(world.place(), GENEROUS) as other:
            stuck.setblocking(False)
            sent = turns = 0
            while sent < 2**28 and turns < 20:
                try:
                    sent += stuck.send(bytes(2**20))
                    turns = 0
                except BlockingIOError:
                    # Whoever takes more of it had a turn when the answer is here.
                    assert echoes(other, b"hello")
                    turns += 1
            assert sent < 2**28, "all of it was taken in, although nobody reads what comes back"

    def test_one_end_gone_is_both_ends_gone(self, world: World) -> None:
        with forwarder(world.place()) as found:
            connection = socket.create_connection(("127.0.0.1", found.port), GENEROUS)
            assert echoes(connection, b"hello")
            world.gateway.close()
            with suppress(ConnectionError):
                assert connection.recv(1) == b""
            connection.close()

    def test_another_token_is_refused_and_logged(self, world: World) -> None:
        with pytest.raises(Refused, match="what listens there does not know the token of this attempt"):
            dial(world.place(OLDER), 0.0)
        with dial(world.place(), GENEROUS) as connection:
            assert echoes(connection, b"hello")
        assert world.echo.connections == 1
        (refusal,) = world.refusals
        assert refusal.startswith(
            "rendezvous: refused a connection from 127.0.0.1: it left before it proved that it knows"
        )

    def test_another_world_is_refused_and_logged(self, world: World) -> None:
        with pytest.raises(Refused, match="closed the connection"):
            dial(world.place(size=3), 0.0)
        with dial(world.place(), GENEROUS) as connection:
            assert echoes(connection, b"hello")
        assert world.refusals[0].endswith("it is rank 1 of 3, this world has 2")

    @pytest.mark.parametrize(
        ("attack", "why"),
        [
            (garbage, "it speaks another protocol"),
            (store, "it speaks another protocol"),
            (handshake, "it is rank 0 of 1, this world has 2"),
            (churn, "it left before it proved that it knows the token of this attempt"),
        ],
        ids=lambda value: getattr(value, "__name__", ""),
    )
    def test_nothing_of_a_stranger_reaches_the_store_and_nothing_of_it_comes_back(self, world, attack, why):
        """But to who begins a handshake a nonce and a code. Red without the proof, and where bytes of another protocol
        are taken in before they are refused."""
        outcome = Outcome("")
        attack(Peer("127.0.0.1", world.port), outcome)
        assert outcome.connections > 0
        assert outcome.received <= (64 * outcome.connections if attack is handshake else 0)
        with dial(world.place(), GENEROUS) as connection:
            assert echoes(connection, b"hello")
        assert world.echo.connections == 1
        assert why in world.refusals[0]

    def test_who_was_refused_in_the_same_moment_is_refused_once(self, world: World) -> None:
        """To make room for another one, after the selector had found it ready."""
        done = threading.Event()

        def refuse_and_read() -> None:
            (caller,) = world.gateway._waiting._all
            world.gateway._refuse(caller, "it held one of many connections that prove nothing")
            world.gateway._read(caller)
            done.set()

        with socket.create_connection(("127.0.0.1", world.port)):
            until(lambda: len(world.gateway._waiting) == 1, "the connection waits")
            world.gateway._loop.call(refuse_and_read)
            assert done.wait(GENEROUS)
        assert world.gateway.refused == 1

    def test_a_gigabyte_is_refused_at_its_first_bytes(self, world: World) -> None:
        outcome = Outcome("")
        stream(Peer("127.0.0.1", world.port), outcome)
        assert outcome.closed == outcome.connections == 3
        # What the kernels of both ends hold.
        assert outcome.sent < 2**26
        with dial(world.place(), GENEROUS) as connection:
            assert echoes(connection, b"hello")

    def test_many_half_open_connections_keep_nobody_out(self, world: World) -> None:
        """Red without the bound on those that wait: then they are refused, too, when their time is over."""
        peer = Peer("127.0.0.1", world.port)
        half_open(peer, Outcome(""))
        assert len(peer.held) == 500
        with dial(world.place(), GENEROUS) as connection:
            assert echoes(connection, b"hello")
            half_open(peer, Outcome(""))
            assert echoes(connection, b"hello again")
        # The last of them may still wait to be accepted when the connection that lasts has its answer.
        until(lambda: world.gateway.refused >= 1000 - 256, lambda: world.gateway.refused)
        assert len(world.refusals) <= 11, "a flood of refusals is a few lines"
        assert "it held one of many connections that prove nothing" in world.refusals[0]
        for held in peer.held:
            held.close()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.0.0.2", "::1", "[::1]"])
def test_ranks_without_a_token_meet_at_every_loopback_address(host: str) -> None:
    port = free_port()
    timeout = timedelta(seconds=GENEROUS)
    with ThreadPoolExecutor(2) as ranks:
        opened = [ranks.submit(open_store, Place(host, port, rank, 2, None), timeout) for rank in range(2)]
        stores = [one.result(GENEROUS) for one in opened]
    stores[0].set("key", "hello")
    assert stores[1].get("key") == b"hello"


def test_a_log_that_cannot_be_written_ends_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def write(self, text: str) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    log("refused a connection")
