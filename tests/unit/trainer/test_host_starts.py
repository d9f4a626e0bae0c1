"""Where documents begin is looked at in the host's memory: no step waits for a GPU because of it."""

from types import SimpleNamespace

import pytest
import torch

from disttrain_trainer.data.batches import Microbatch, on_device
from disttrain_trainer.data.packed import Packed
from disttrain_trainer.parallel.context.documents import Documents
from disttrain_trainer.parallel.pipeline.schedule import RankStage
from disttrain_trainer.tasks.supervised import Supervised


def test_lengths_of_documents_are_those_that_the_host_knows():
    """A GPU would be waited for, which "meta" stands for here: nothing on it has a value."""
    batch = Packed(torch.zeros(1, 5, dtype=torch.int64), torch.zeros(1, 5), torch.tensor([[0, 0, 2, 2, 2]]))
    microbatch = on_device(Microbatch(batch, torch.ones(1), 5.0, 1), torch.device("meta"))
    assert microbatch.starts.device.type == "meta"
    apart, seen = Documents(None), []
    apart.use(microbatch.starts, microbatch.host_starts)
    query = torch.randn(1, 1, 5, 2)
    apart.attend(query, query, query, lambda query, key, value: seen.append(query.shape[2]) or query)
    assert seen == [2, 3]


@pytest.mark.parametrize("model", ["whole", "in a pipeline"])
def test_who_computes_a_microbatch_hands_over_what_the_host_knows(model):
    used = []
    documents = SimpleNamespace(use=lambda *starts: used.append(starts))
    starts = torch.tensor([[0, 0, 2]])
    batch = on_device(Microbatch(Packed(starts, starts, starts), torch.ones(1), 3.0, 1), torch.device("meta"))
    if model == "whole":
        task = Supervised.__new__(Supervised)
        task.use_documents(documents)
        task._begin(batch)
    else:
        stage = SimpleNamespace(documents=documents, microbatch_of=lambda number: batch)
        RankStage._use_documents(stage, 0)
    ((there, here),) = used
    assert (there.device.type, here is starts) == ("meta", True)
