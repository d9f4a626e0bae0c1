"""What the callbacks of communication hooks read on a GPU is in memory that is not given to others before.

A GPU comes to the work of a callback after the host has left it, and in another stream than that in which its tensors
were made. torch keeps, for this stream, the memory of the value of the callback's future: all else that the
callback reads must outlive the step, or its memory is given to the next tensor that is made.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from disttrain_api.parallelism import AllReduce, Compression, DataParallel
from disttrain_trainer.parallel.comm_hooks import base
from disttrain_trainer.parallel.comm_hooks.attach import build_gradient_sum

SETTINGS = {
    "nothing": {"all_reduce": AllReduce.RING},
    "FP16": {"compression": {"name": "FP16"}},
    "Int8": {"compression": {"name": "Int8"}},
    "OneBit": {"compression": {"name": "OneBit"}},
    "TopK": {"compression": {"name": "TopK", "ratio": 0.1}},
    "TopK of everything": {"compression": {"name": "TopK", "ratio": 1}},
    "RandomK": {"compression": {"name": "RandomK", "ratio": 0.1}},
    "RandomK by a ring": {"all_reduce": AllReduce.RING, "compression": {"name": "RandomK", "ratio": 0.1}},
}


def places(values):
    return {value.untyped_storage().data_ptr() for value in tree_leaves(values) if isinstance(value, torch.Tensor)}


class Reads(TorchDispatchMode):
    """Notes which operations read memory that was there before, other than `kept`."""

    def __init__(self, kept):
        super().__init__()
        self._mine, self.found = set(kept), []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if not places((arguments, options)) <= self._mine:
            self.found.append(str(function))
        made = function(*arguments, **(options or {}))
        self._mine |= places(made)
        return made


@pytest.fixture
def as_nccl(mesh, monkeypatch):
    """The group of this process, whose futures have the values that NCCL's have: an all-gather's is no tensor of the
    caller's."""

    def gather(rows, own, group, async_op):
        for row in rows:
            row.copy_(own)
        done = torch.futures.Future()
        done.set_result([torch.stack(rows)])
        return SimpleNamespace(get_future=lambda: done)

    monkeypatch.setattr(base.dist, "all_gather", gather)
    return mesh.get_group()


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_callback_reads_the_value_of_its_future_and_what_outlives_it(as_nccl, monkeypatch, settings):
    compression = settings.get("compression")
    settings = settings | {"compression": compression and Compression.model_validate(compression)}
    gradient = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    bucket = SimpleNamespace(buffer=lambda: gradient, index=lambda: 0)
    then, called = torch._C.Future.then, []

    def watched(future, callback):
        def call(done):
            with Reads(places(done.value()) | places(gradient)) as reads:
                result = callback(done)
            called.append(reads.found)
            return result

        return then(future, call)

    monkeypatch.setattr(torch._C.Future, "then", watched)
    hook = build_gradient_sum(DataParallel(**settings), as_nccl, 0)
    assert hook.reduce(bucket).wait() is not None
    assert called or settings["compression"] is None
    assert [found for found in called if found] == []
