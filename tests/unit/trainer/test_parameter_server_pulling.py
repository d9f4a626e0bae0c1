"""Parameters that come in while the forward pass goes on are there when they are used."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer
from disttrain_api.training import Training
from disttrain_trainer.parameter_server.protocol import buckets
from disttrain_trainer.parameter_server.protocol.placement import place
from disttrain_trainer.parameter_server.protocol.wire import Malformed, Message
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.worker.pulling import Pulling, arriving, can_wait
from tests.builders import TRAINING


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([], [[]]),
        ([3], [[0]]),
        ([8, 8], [[0], [1]]),
        ([3, 3, 3, 1], [[0, 1, 2], [3]]),
        ([1, 20, 1, 1], [[0, 1], [2, 3]]),
        ([7, 1, 8], [[0, 1], [2]]),
    ],
)
def test_buckets_are_as_large_as_they_must_be(monkeypatch, sizes, expected):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 8)
    assert [list(bucket) for bucket in buckets.buckets(sizes)] == expected


def test_a_large_pull_is_not_more_messages_than_a_socket_keeps(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    assert len(buckets.buckets([10] * 10_000)) == 64


SIZES = {"first": 5, "second": 4, "third": 3}


class Scene:
    """Two servers that hold 1, 2, 3, … and what they have sent to a worker whose parameters are not numbers yet."""

    def __init__(self):
        self.placement = place(SIZES, 2)
        self.parameters = {name: nn.Parameter(torch.full((size,), torch.nan)) for name, size in SIZES.items()}
        values = torch.arange(1.0, 13.0).split([segment.size for segments in self.placement for segment in segments])
        self.servers, self.inbox, begin = [], [[], []], 0
        for index, segments in enumerate(self.placement):
            config = ServerConfig(index, 1, Training.model_validate(TRAINING), Batch(1, 1, 1), ParameterServer())
            self.servers.append(Server(config))
            own = [values[begin + place] for place in range(len(segments))]
            begin += len(segments)
            self.ask(index, Message("load", {"states": [[] for _ in segments]}, own))

    def ask(self, server, message):
        message = Message(message.kind, {**message.fields, "worker": 0}, message.tensors)
        return [answer for _, answer in self.servers[server].receive((b"w", b"1"), message, 0.0)]

    def pulling(self, asked, times=1):
        for _ in range(times):
            for server, ranges in enumerate(asked):
                self.inbox[server] += self.ask(server, Message("pull", {"ranges": ranges}))
        return Pulling(self.placement, self.parameters, asked, lambda server: self.inbox[server].pop(0))

    def there(self):
        return {name for name, parameter in self.parameters.items() if not parameter.isnan().any()}


@pytest.fixture
def scene(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 4)
    return Scene()


ALL = [[0, 1], [0, 1]]


def test_the_first_buckets_come_with_the_versions_and_the_others_when_they_are_needed(scene):
    pulling = scene.pulling(ALL)
    assert pulling.pulled.versions == [0, 0]
    assert scene.there() == {"first"}
    assert [len(waiting) for waiting in scene.inbox] == [1, 1]
    pulling.need("second")
    assert scene.there() == {"first", "second"}
    pulling.rest()
    assert scene.there() == {"first", "second", "third"}
    assert torch.cat([parameter.detach() for parameter in scene.parameters.values()]).tolist() == [*range(1, 13)]


def test_ranges_come_in_the_order_in_which_they_are_asked_for(scene):
    scene.pulling([[1, 0], [1, 0]])
    assert scene.there() == {"third"}


def test_what_comes_twice_does_not_change_what_was_used(scene):
    pulling = scene.pulling(ALL, times=2)
    pulling.need("first")
    scene.parameters["first"].data.zero_()
    pulling.rest()
    assert not scene.parameters["first"].any()


@pytest.mark.parametrize("ranges", [[2], [0, 0], "all", [-1]])
def test_a_server_refuses_ranges_that_it_has_not(scene, ranges):
    with pytest.raises(Malformed, match="ranges"):
        scene.ask(0, Message("pull", {"ranges": ranges}))


class Model(nn.Module):
    """Uses parameters by their owners, beside them, tied, within torch's own modules, under recomputation."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.scale = nn.Parameter(torch.rand(4))
        self.borrowed = nn.Linear(4, 4)
        self.recurrent = nn.LSTM(4, 4, batch_first=True)
        self.repeated = nn.Linear(4, 4)
        self.unused = nn.Linear(4, 4)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        hidden, _ = self.attention(hidden, hidden, hidden)
        hidden = torch.cat([hidden * self.scale, functional.linear(hidden, self.borrowed.weight)], 1)
        hidden, _ = self.recurrent(hidden)
        hidden = checkpoint(self.repeated, hidden, use_reentrant=False)
        return hidden @ self.embedding.weight.t()


class Sender:
    """Gives parameters their numbers when they are asked for; until then they have none."""

    def __init__(self, model):
        self.model, self.asked = model, []
        self.numbers = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        for parameter in model.parameters():
            parameter.data.fill_(torch.nan)

    def give(self, name):
        self.asked.append(name)
        self.model.get_parameter(name).data.copy_(self.numbers[name])


TOKENS = torch.arange(6).view(2, 3)


def test_every_parameter_is_there_before_it_is_used():
    model = Model()
    expected = model(TOKENS)
    sender = Sender(model)
    with arriving(model, sender.numbers, sender.give):
        assert torch.equal(model(TOKENS), expected)
        assert sorted(sender.asked) == sorted(sender.numbers)
        model(TOKENS).sum().backward()
    assert len(sender.asked) == len(sender.numbers)
    order = dict.fromkeys(name.split(".")[0] for name in sender.asked)
    assert list(order) == ["scale", "embedding", "attention", "borrowed", "recurrent", "repeated", "unused"]


def test_hooks_of_others_see_what_has_come():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4))
    model.register_forward_pre_hook(lambda one, inputs: (inputs[0] + one[1].weight.sum(),))
    model.eval()
    expected = model(torch.ones(1, 4))
    sender = Sender(model)
    with arriving(model, sender.numbers, sender.give):
        assert torch.equal(model(torch.ones(1, 4)), expected)


class Layers(nn.Sequential):
    def forward(self, inputs):
        for layer in self:
            self.seen.append(list(self.sender.asked))
            inputs = layer(inputs)
        return inputs


def test_a_layer_is_computed_before_the_next_one_is_there():
    model = Layers(nn.Linear(2, 2), nn.Linear(2, 2))
    model.seen, model.sender = [], Sender(model)
    with arriving(model, model.sender.numbers, model.sender.give):
        model(torch.ones(1, 2))
    assert model.seen == [[], ["0.weight", "0.bias"]]


def test_compiled_functions_and_plain_passes_work_beside_it():
    compiled = torch.compile(lambda inputs, weight: inputs @ weight.t() + 1, backend="eager")

    class Inner(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.rand(2, 2))

        def forward(self, inputs):
            return compiled(inputs, self.weight)

    model = Inner()
    expected = model(torch.ones(1, 2))
    sender = Sender(model)
    with arriving(model, sender.numbers, sender.give):
        assert torch.equal(model(torch.ones(1, 2)), expected)


def test_a_pass_that_fails_leaves_nothing_behind():
    model = Model()
    sender = Sender(model)
    with pytest.raises(IndexError, match="out of range"), arriving(model, sender.numbers, sender.give):
        model(TOKENS + 100)
    assert _get_current_function_mode() is None
    assert len(sender.asked) < len(sender.numbers)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_compiled_modules_cannot_wait():
    model = nn.Sequential(nn.Linear(2, 2))
    assert can_wait(model)
    model[0].compile(backend="eager")
    assert not can_wait(model)
    assert not can_wait(torch.compile(nn.Linear(2, 2), backend="eager"))
    assert not can_wait(torch.jit.script(nn.Linear(2, 2)))
