"""The manager dies and comes back, hangs, is replaced and wakes up, between any two messages: what must hold."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import torch
import zmq
from hypothesis import example, given, settings
from hypothesis import strategies as st

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_api.training import Training
from disttrain_trainer.data.sampler import Cursor
from disttrain_trainer.parameter_server.protocol.codec import PlainCodec
from disttrain_trainer.parameter_server.protocol.sockets import connect
from disttrain_trainer.parameter_server.protocol.tasks import Result, Task, Verdict
from disttrain_trainer.parameter_server.protocol.wire import Message, decode, encode, key_of, key_with
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.manager import Manager
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.server.snapshots import Snapshots, claim_incarnation
from disttrain_trainer.parameter_server.server.stragglers import Stragglers
from disttrain_trainer.parameter_server.worker.client import Servers
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from disttrain_trainer.runtime.errors import PeerLost
from tests.builders import TRAINING
from tests.integration.proxy import TcpProxy
from tests.suites import examples
from tests.unit.trainer.manager_simulation import INTERVAL, Simulation
from tests.waiting import GENEROUS, until
from tools.cluster.ports import free_port

KEY = key_of("token", "uid", 1)


class TestTheManagerDies:
    @settings(max_examples=examples(200), deadline=None)
    @given(
        st.integers(0, 10**6),
        st.integers(1, 4),
        st.integers(1, 3),
        st.integers(1, 9),
        st.sampled_from(list(Synchronization)),
        st.integers(0, 3),
    )
    # A step announced to the leader, completed once more by a manager that did not know it and announced again.
    @example(675136, 4, 2, 9, Synchronization.BOUNDED_STALENESS, 3)
    # A step that only a sleeping worker and the manager that died knew to be complete, and was never announced.
    @example(423654, 2, 2, 7, Synchronization.ASYNC, 1)
    # A manager that has no message of anybody who knows whether the work had begun, and knows a task.
    @example(446740, 2, 3, 7, Synchronization.BOUNDED_STALENESS, 0)
    @example(972708, 2, 2, 4, Synchronization.BOUNDED_STALENESS, 2)
    def test_every_task_is_counted_once_or_lost(self, seed, workers, servers, steps, synchronization, staleness):
        simulation = Simulation(seed, workers, servers, steps, synchronization, staleness)
        simulation.run()
        tasks = {Task(step, part) for step in range(steps) for part in range(workers)}
        for holder in simulation.holders:
            assert len(holder.applied) == len(set(holder.applied)), "taken in twice"
            if holder.lives == 1:
                assert set(holder.applied) == tasks
            else:
                assert set(holder.applied) <= tasks
        missing = sum(len(tasks) - len(holder.applied) for holder in simulation.holders)
        assert missing <= simulation.lost <= simulation.deaths * INTERVAL
        if simulation.members[0].life == 1:
            assert list(simulation.reported) == list(range(steps))


class TestLives:
    def test_numbers_are_given_once_and_by_attempt(self, tmp_path):
        assert [claim_incarnation(tmp_path, 0, 1)[1] for _ in range(3)] == [1, 2, 3]
        assert claim_incarnation(tmp_path, 1, 1)[1] == 1
        assert claim_incarnation(tmp_path, 0, 2)[1] == 1
        assert sorted(file.name for file in tmp_path.iterdir()) == [
            "server-0.attempt-000002.life-000001",
            "server-1.attempt-000001.life-000001",
        ]

    def test_a_former_life_writes_no_snapshot(self, tmp_path):
        file, key = tmp_path / "server-0.snapshot", key_of("token", "uid", 1)
        former, _ = claim_incarnation(tmp_path, 0, 1)
        snapshots = Snapshots(file, key, former)
        snapshots.write(Message("snapshot", {"of": "former"}))
        snapshots._writer.join()
        assert snapshots.read().fields["of"] == "former"
        later, _ = claim_incarnation(tmp_path, 0, 1)
        other = Snapshots(file, key, later)
        other.write(Message("snapshot", {"of": "later"}))
        other._writer.join()
        snapshots.write(Message("snapshot", {"of": "former, again"}))
        snapshots._writer.join()
        assert snapshots.read().fields["of"] == "later"


class TestStragglers:
    def test_one_is_named_when_it_begins_and_when_it_is_over(self):
        stragglers = Stragglers()
        for _ in range(9):
            for worker, seconds in enumerate((1.0, 1.1, 3.0, 0.9)):
                stragglers.took(worker, seconds)
        [one], over = stragglers.judge()
        assert (one.worker, one.seconds, one.others, over) == (2, 3.0, 1.0, [])
        assert stragglers.judge() == ([], [])
        assert stragglers.slowest() == one
        for _ in range(31):
            stragglers.took(2, 1.3)
        assert stragglers.judge() == ([], []), "not over yet"
        for _ in range(31):
            stragglers.took(2, 1.1)
        assert stragglers.judge() == ([], [2])

    def test_nobody_is_named_beside_nobody(self):
        stragglers = Stragglers()
        for _ in range(31):
            stragglers.took(0, 5.0)
        assert (stragglers.judge(), stragglers.slowest()) == (([], []), None)
        for _ in range(9):
            stragglers.took(1, 1.0)
        stragglers.forget(1)
        assert (stragglers.judge(), stragglers.slowest()) == (([], []), None)


def configured(index, incarnation=1):
    training = Training.model_validate({**TRAINING, "steps": 5})
    asynchronous = ParameterServer(synchronization=Synchronization.ASYNC, snapshot_interval=1)
    return ServerConfig(
        index, 2, training, Batch(2, 1, 4), asynchronous, heartbeat_timeout=1.0, snapshots=True, incarnation=incarnation
    )


class Asked:
    """A manager of two workers, of whom worker 1 has done its part of the first step and waits for the leader's."""

    def __init__(self):
        self.sentences = []
        self.numbers = count()
        self.manager = Manager(configured(0), self.sentences.append)
        for worker in (0, 1):
            self.say(worker, "hello", samples=50)
        self.say(0, "start", step=0, epoch=0, position=0, hold_at=1, skipped=0)
        for worker in (0, 1):
            self.say(worker, "next")
        self.manager.answers(0.0)
        self.done(1, [0, 1])
        assert self.manager.answers(0.0) == []

    def say(self, worker, kind, now=0.0, **fields):
        sender = (b"%d" % worker, b"%d" % next(self.numbers))
        return self.manager.handlers[kind](sender, Message(kind, {"worker": worker, "instance": "a", **fields}), now)

    def done(self, worker, task, **fields):
        self.say(worker, "next", done=task, clock=1, loss=1.0, weight=1.0, samples=1.0, **fields)

    def answered(self, now):
        return {int(sender[0]): message.kind for sender, message in self.manager.answers(now)}


class TestWhoIsSilent:
    def test_a_request_of_a_worker_that_was_taken_for_dead_is_answered_when_it_is_back(self):
        asked = Asked()
        for half_seconds in range(4):
            asked.say(0, "alive", half_seconds / 2)
            asked.manager.tick(half_seconds / 2)
        assert asked.sentences == ["worker 1 has been silent for 1 s: its tasks are assigned to others"]
        asked.done(0, [0, 0])
        assert asked.answered(2.0) == {0: "hold"}
        asked.say(0, "next", hold_at=5)
        assert asked.answered(2.0) == {0: "task"}
        asked.say(1, "alive", 2.0)
        assert asked.answered(2.0) == {1: "task"}

    def test_a_machine_that_stands_still_takes_nobody_for_dead(self):
        asked = Asked()
        asked.manager.tick(0.0)
        asked.manager.tick(60.0)
        asked.manager.tick(60.5)
        assert asked.sentences == []
        for half_seconds in range(4):
            asked.manager.tick(61.0 + half_seconds / 2)
        assert len(asked.sentences) == 2, "after that, silence counts"

    def test_a_manager_that_is_always_busy_finds_the_dead_all_the_same(self):
        asked = Asked()
        for time_of in range(0, 10, 2):
            asked.manager.tick(time_of * 1.25)
            asked.say(0, "alive", time_of * 1.25)
        assert asked.sentences == ["worker 1 has been silent for 1 s: its tasks are assigned to others"]


class Serving:
    """A server in a thread."""

    def __init__(self, config, address, snapshot=None):
        self.server = Server(config)
        if snapshot is not None:
            self.server.restore(snapshot)
        self.loop = Loop(self.server, KEY, address)
        self.error = None
        self.announced = threading.Event()
        # A test that fails leaves it alone, and pytest would wait for it for ever.
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self):
        try:
            self.loop.run(self.announced.is_set)
        except PeerLost as error:
            self.error = error
        self.loop.close()

    def end(self):
        self.server.finished = True
        self.announced.set()
        self.thread.join(GENEROUS)


class TestFencing:
    def test_a_manager_that_was_replaced_ends_and_its_successor_knows_what_was_done(self):
        addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        former, other = (Serving(configured(index), address) for index, address in enumerate(addresses))
        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        client = Servers(addresses, KEY, 0, {"only": parameter}, lambda: False, 60.0, replaceable=True)
        try:
            client.hello(50)
            client.load({})
            snapshot = former.server.snapshot()
            client.start(0, Cursor(3, 4), 5)
            answer = client.next()
            assert (answer.task, answer.cursor, client._heartbeat.incarnations) == (Task(0, 0), Cursor(3, 4), [1, 1])
            payload = GradientPayload(client.placement, {"only": parameter}, PlainCodec())
            client.push(answer.task, 1.0, client.pull(answer.complete), answer.floor, payload)
            # The other worker knows the manager's second incarnation, and informs the other server.
            other.server.receive((b"worker 1", b"1"), Message("alive", {"worker": 1, "incarnations": [2, 1]}), 0.0)
            former.thread.join(GENEROUS)
            assert "a newer incarnation" in str(former.error)
            successor = Serving(configured(0, incarnation=2), addresses[0], snapshot)
            answer = client.next((answer.task, Result(1.0, 2.0, 3.0)))
            assert (answer.task, answer.complete, client._heartbeat.incarnations) == (Task(0, 1), 1, [2, 1])
            client.pull(answer.complete)
            assert client.lost == [1, 0]
            client.finish()
        finally:
            client.close()
            other.end()
        successor.end()
        assert (successor.error, other.error) == (None, None)

    def test_what_was_lost_with_a_connection_is_asked_for_again_and_taken_in_once(self):
        config = replace(configured(0), heartbeat_timeout=600.0)
        address = f"127.0.0.1:{free_port()}"
        serving = Serving(config, address)
        parameters = {"only": torch.nn.Parameter(torch.ones(4))}
        parameters["only"].grad = torch.ones(4)
        with TcpProxy("127.0.0.1", int(address.rpartition(":")[2])) as proxy, ThreadPoolExecutor(1) as background:
            leader = Servers([address], KEY, 0, parameters, lambda: False, 60.0, replaceable=True)
            other = Servers([f"127.0.0.1:{proxy.port}"], KEY, 1, parameters, lambda: False, 60.0, replaceable=True)
            payload = GradientPayload(leader.placement, parameters, PlainCodec())

            def push(servers, answer):
                return servers.push(answer.task, 1.0, servers.pull(answer.complete), answer.floor, payload)

            try:
                for servers in (leader, other):
                    servers.hello(50)
                leader.load({})
                leader.start(0, Cursor(), 1)
                answers = [servers.next() for servers in (leader, other)]
                push(other, answers[1])
                waits = background.submit(other.next, (answers[1].task, Result(1.0, 1.0, 1.0)))
                until(lambda: serving.server._manager._waiting)
                # Both connections: that of the questions, and that of the heartbeat.
                proxy.reset()
                push(leader, answers[0])
                assert leader.next((answers[0].task, Result(1.0, 1.0, 1.0))).verdict is Verdict.HOLD
                leader.next(hold_at=5)
                assert waits.result(120).task.step == 1
                figures = leader.figures()[0].fields
                assert (figures["version"], figures["late"]) == (2, 0)
            finally:
                for servers in (leader, other):
                    servers.close()
                serving.end()

    def test_a_push_that_is_sent_once_more_is_answered_as_the_first_time(self):
        server = Server(configured(0))
        server.receive((b"a", b"1"), Message("load", {"worker": 0, "states": [[]]}, [torch.ones(4)]), 0.0)
        fields = {"worker": 0, "task": [0, 0], "weight": 1.0, "taken": 0, "floor": 0, "ranges": [0], "counts": [1]}

        def pushed(connection, number, instance):
            message = Message("push", {**fields, "instance": instance}, [torch.ones(4)])
            [(_, answer)] = server.receive((connection, number), message, 0.0)
            return answer.fields["fresh"]

        assert [pushed(b"a", b"2", "first"), pushed(b"b", b"2", "first")] == [True, True]
        assert [pushed(b"b", b"3", "first"), pushed(b"c", b"2", "second")] == [False, False]

    def test_a_load_that_comes_late_once_more_changes_nothing(self):
        server = Server(configured(0))
        load = Message("load", {"worker": 0, "instance": "a", "states": [[]]}, [torch.ones(4)])
        fields = {"worker": 0, "instance": "a", "task": [0, 0], "weight": 1.0, "taken": 0, "floor": 0}
        push = Message("push", {**fields, "ranges": [0], "counts": [1]}, [torch.ones(4)])
        kinds = []
        for connection, number, message in ((b"a", b"1", load), (b"a", b"2", push), (b"b", b"1", load)):
            [(_, answer)] = server.receive((connection, number), message, 0.0)
            kinds.append(answer.kind)
        assert (kinds, server.snapshot().fields["version"]) == (["loaded", "pushed", "loaded"], 1)

    def test_a_server_does_not_listen_to_what_is_meant_for_another_one(self):
        """Pods change addresses, and a name may still lead to where another server is by now."""
        address = f"127.0.0.1:{free_port()}"
        serving = Serving(configured(1), address)
        context = zmq.Context()
        socket = connect(context, address, key_with(1, KEY))
        try:
            for number, meant in enumerate([0, 1]):
                message = Message("alive", {"worker": 0, "instance": "a", "incarnations": [1, 1]})
                socket.send_multipart([b"%d" % number, *encode(message, key_with(meant, KEY))])
            assert socket.poll(30_000)
            answer = socket.recv_multipart()
            assert (answer[0], serving.loop.dropped) == (b"1", 1)
            assert decode(answer[1:], key_with(1, KEY)).kind == "alive"
        finally:
            socket.close()
            context.term()
            serving.end()

    def test_a_start_that_comes_twice_counts_once(self):
        manager = Manager(configured(0))
        asker = (b"worker", b"1")
        manager.handlers["hello"](asker, Message("hello", {"worker": 0, "instance": "a", "samples": 50}), 0.0)
        begin = Message("start", {"worker": 0, "step": 0, "epoch": 0, "position": 0, "hold_at": 5, "skipped": 0})
        for _ in range(2):
            [(_, answer)] = manager.handlers["start"](asker, begin, 0.0)
            assert answer.kind == "started"
            fields = {"worker": 0, "done": [0, 0], "clock": 1, "loss": 1.0, "weight": 1.0, "samples": 1.0}
            manager.handlers["next"](asker, Message("next", fields), 0.0)
        assert manager.table()["done"] == [[0, 0, 1.0, 1.0, 1.0, 0, 0]]
