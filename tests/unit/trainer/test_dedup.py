"""Who writes what of a checkpoint where ranks hold the same: every tensor one of them, and all about as much."""

from itertools import chain

import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.mesh import Mesh
from disttrain_trainer.checkpoint.dedup import without_others, writers
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import World

names = st.tuples(st.sampled_from("ab"), st.text("xyz", min_size=1, max_size=3))
sizes = st.dictionaries(names, st.integers(0, 100), max_size=12)


@given(sizes, st.integers(1, 5), st.randoms())
def test_every_tensor_has_one_writer_whoever_asks_and_no_rank_has_much_more_than_others(sizes, ranks, chance):
    found = writers(sizes, ranks)
    assert found.keys() == sizes.keys()
    loads = [sum(size for name, size in sizes.items() if found[name] == rank) for rank in range(ranks)]
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    shuffled = list(sizes.items())
    chance.shuffle(shuffled)
    assert writers(dict(shuffled), ranks) == found


def world(rank, **degrees):
    mesh = Mesh(**degrees)
    return World(rank, mesh.world_size, find_device(0, 1, True, 1), mesh, None, None)


def flat(part, above=""):
    return chain.from_iterable(
        flat(value, f"{above}/{name}") if isinstance(value, dict) else [(f"{above}/{name}", value)]
        for name, value in part.items()
    )


STATE = {
    "a": {"mean": torch.ones(4), "step": torch.tensor(1.0), "flag": True},
    "b": {"mean": torch.ones(3), "step": torch.tensor(1.0)},
    "c": torch.ones(2),
    "d": {},
}


def test_replicas_share_the_tensors_and_all_keep_what_is_no_tensor():
    parts = [dict(flat(without_others(STATE, world(rank, replicate=3)))) for rank in range(3)]
    tensors = [{name for name, value in part.items() if isinstance(value, torch.Tensor)} for part in parts]
    assert sorted(chain.from_iterable(tensors)) == sorted(
        name for name, value in flat(STATE) if isinstance(value, torch.Tensor)
    )
    assert all(tensors)
    assert all(part["/a/flag"] for part in parts)
    kept = without_others(STATE, world(0, replicate=3))
    assert kept["d"] == {}
    assert {} not in (kept.get("a"), kept.get("b"))


def test_only_ranks_with_the_same_stages_share():
    """Ranks 0 and 1 have one stage, 2 and 3 the other."""
    parts = [dict(flat(without_others(STATE, world(rank, pipeline=2, replicate=2)))) for rank in range(4)]
    assert [part.keys() for part in parts[:2]] == [part.keys() for part in parts[2:]]
    assert parts[0].keys() != parts[1].keys()
    alone = without_others(STATE, world(1, pipeline=2))
    assert dict(flat(alone)).keys() == dict(flat(STATE)).keys()
