"""A push that is sent in parts while gradients are being computed is the push that is sent at once."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer, Synchronization
from disttrain_api.training import Training
from disttrain_trainer.parameter_server.protocol import buckets
from disttrain_trainer.parameter_server.protocol.codec import PlainCodec
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import Message
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.worker.payload import GradientPayload
from disttrain_trainer.parameter_server.worker.pushing import Pushing, watched
from disttrain_trainer.parameter_server.worker.staging import Staging
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.builders import TRAINING

SIZES = {"a": 5, "b": 2, "c": 6, "d": 1}


class Scene:
    """A worker that pushes to two servers, which take in each part of a step when it comes."""

    def __init__(self):
        training = Training.model_validate({**TRAINING, "optimizer": {"name": "SGD", "learningRate": 1.0}})
        settings = ParameterServer(synchronization=Synchronization.ASYNC)
        self.placement = place(SIZES, 2)
        self.parameters = {name: nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
        self.servers = [Server(ServerConfig(index, 1, training, Batch(16, 1, 16), settings)) for index in range(2)]
        for server, segments in zip(self.servers, self.placement, strict=True):
            values = [torch.zeros(one.size) for one in segments]
            self.ask(server, Message("load", {"states": [[] for _ in segments]}, values))
        self.sent = []

    def ask(self, server, message, sender=b"worker"):
        message = Message(message.kind, {**message.fields, "worker": 0}, message.tensors)
        return [answer.kind for _, answer in server.receive((sender, b"1"), message, 0.0)]

    def pushing(self, step=0):
        payload = GradientPayload(self.placement, self.parameters, PlainCodec())
        payload.begin(Task(step, 0), 1.0)
        fields = {"task": [step, 0], "weight": 1.0, "taken": 0, "floor": step}
        return Pushing(self.placement, payload, [fields, fields], lambda *part: self.sent.append(part))

    def held(self):
        messages = [Message("pull", {"worker": 0, "ranges": [*range(len(segments))]}) for segments in self.placement]
        answers = [
            server.receive((b"w", b"1"), message, 0.0) for server, message in zip(self.servers, messages, strict=True)
        ]
        return torch.cat([tensor for buckets in answers for _, bucket in buckets for tensor in bucket.tensors])


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8)
    scene = Scene()
    for number, parameter in enumerate(scene.parameters.values(), start=1):
        parameter.grad = torch.full_like(parameter, number)
    return scene


EXPECTED = -torch.tensor([1.0] * 5 + [2.0] * 2 + [3.0] * 6 + [4.0])


@pytest.mark.parametrize("early", ["", "d", "dc", "cb", "dcba", "abcd"])
def test_whatever_is_ready_early_is_taken_in_once_and_together(scene, early):
    pushing = scene.pushing()
    for name in early:
        pushing.ready(name)
    assert bool(scene.sent) == (early not in ("", "d"))
    for server, part in scene.sent:
        assert scene.ask(scene.servers[server], part) == []
    assert not scene.held().any(), "nothing is taken in before all of it is there"
    assert [scene.ask(*pair) for pair in zip(scene.servers, pushing.rest(), strict=True)] == [["pushed"]] * 2
    assert torch.equal(scene.held(), EXPECTED)
    assert pushing.bytes == 4 * len(EXPECTED)


class Copy:
    """An event behind copies that are complete when somebody says so, or waits for them."""

    def __init__(self):
        self.past = False

    def query(self):
        return self.past

    def synchronize(self):
        self.past = True


class Copying(Staging):
    """Buffers of a GPU that copies slowly: what it copied is nothing before its event is past."""

    def __init__(self):
        super().__init__()
        self.copy = Copy()

    def record_event(self):
        return self.copy


def test_a_bucket_leaves_when_its_copy_is_complete_and_the_backward_pass_waits_for_none(scene):
    pushing, staging = scene.pushing(), Copying()
    pushing._payload.staging = staging
    pushing.ready("a")
    pushing.ready("b")
    assert scene.sent == []
    staging.copy.synchronize()
    staging.copy = Copy()
    pushing.ready("c")
    assert [(server, part.fields["ranges"]) for server, part in scene.sent] == [(0, [0]), (0, [1])]
    rest = pushing.rest()
    assert [(server, part.fields["ranges"]) for server, part in scene.sent[2:]] == [(1, [0])]
    assert staging.copy.past
    for server, part in scene.sent:
        scene.ask(scene.servers[server], part)
    assert [scene.ask(*pair) for pair in zip(scene.servers, rest, strict=True)] == [["pushed"]] * 2
    assert torch.equal(scene.held(), EXPECTED)


def test_parts_that_are_lost_are_asked_for_again(scene):
    pushing = scene.pushing()
    for name in "abcd":
        pushing.ready(name)
    rest = pushing.rest()
    (first, part), *_ = scene.sent
    scene.ask(scene.servers[first], part, b"another")
    assert scene.ask(scene.servers[first], rest[first]) == ["again"]
    assert not scene.held().any()
    for index, server in enumerate(scene.servers):
        assert scene.ask(server, pushing.whole(index)) == ["pushed"]
    assert torch.equal(scene.held(), EXPECTED)


def test_what_was_begun_for_another_task_is_forgotten(scene):
    given_up, pushing = scene.pushing(0), scene.pushing(1)
    given_up.ready("a")
    for name in "abcd":
        pushing.ready(name)
    for server, part in scene.sent:
        scene.ask(scene.servers[server], part)
    for pair in zip(scene.servers, pushing.rest(), strict=True):
        assert scene.ask(*pair) == ["pushed"]
    assert torch.equal(scene.held(), EXPECTED)
    assert all(not server._reassembly._held for server in scene.servers)


def test_a_gradient_is_ready_with_the_last_microbatch():
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    named = {"first": first.weight, "second": second.weight}
    ready = []
    with watched(named, 2, ready.append):
        second(first(torch.ones(1, 2))).sum().backward()
        assert ready == []
        # A microbatch that does not use one of them.
        first(torch.ones(1, 2)).sum().backward()
    assert ready == ["first"]
    first(torch.ones(1, 2)).sum().backward()
    assert ready == ["first"]


def test_a_gradient_that_grows_after_it_was_ready_is_an_error():
    layer = nn.Linear(2, 2)
    inputs = torch.ones(1, 2, requires_grad=True)

    def backward(reentrant):
        with watched({"weight": layer.weight}, 1, lambda name: None):
            inner = checkpoint(layer, inputs, use_reentrant=reentrant)
            checkpoint(layer, inner, use_reentrant=reentrant).sum().backward()

    backward(reentrant=False)
    with pytest.raises(InvalidConfiguration, match="gradient of weight is accumulated several times"):
        backward(reentrant=True)
