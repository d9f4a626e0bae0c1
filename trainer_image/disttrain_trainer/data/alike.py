"""Whether all ranks have found the same data. Ranks with others would train on other samples than the order says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.data.sketch import Sketch, first_unlike, places_of, sketches_of
from disttrain_trainer.data.stream import Stream
from disttrain_trainer.runtime.errors import DataUnlike
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import keeping_random_state

_LOOKS = 8
"""A sample that is drawn at random is another one in one of so many looks, or in one of another sample's."""
Sketches = Sequence[Sketch | None]


def agree_on_data(data: Datasets, world: World) -> Datasets:
    """The data with sketches of some samples, which are alike on all ranks. Raises DataUnlike. A collective call."""
    fingerprints = [data.fingerprint or "", *(inputs.fingerprint for _, inputs in data.evaluated_inputs)]
    own = (data.size or 0, 0 if data.held_out is None else len(data.held_out), fingerprints)
    sizes = world.gather(own, tuple[int, int, list[str]])
    for rank, size in enumerate(sizes):
        if size[:2] == sizes[0][:2] and size != sizes[0]:
            raise DataUnlike(f"rank {rank} finds other data than rank 0: they must be alike in every pod")
        if size != sizes[0]:
            raise DataUnlike(
                f"rank {rank} finds {size[0]} training and {size[1]} held-out samples, rank 0 finds {sizes[0][0]} and "
                f"{sizes[0][1]}: the data must be alike in every pod"
            )
    if isinstance(data.training, Stream):
        return data
    with keeping_random_state():
        sketches = sketches_of(data.training)
    everyone = world.gather(sketches, list[Sketch | None])
    unlike = [(rank, at) for rank, other in enumerate(everyone) if (at := first_unlike(other, everyone[0])) is not None]
    if unlike and not any(world.gather(are_drawn(data), bool)):
        (rank, at), place = unlike[0], places_of(len(data.training))[unlike[0][1]]
        raise DataUnlike(
            f"sample {place} of the {data.size} training samples is another one on rank {rank} than on rank 0: the "
            "data must be alike in every pod; what draws from a generator of its own needs a seed"
        )
    return data if unlike else replace(data, sketches=sketches)


def are_drawn(data: Datasets) -> bool:
    """Whether one of the samples is another one each time, as where augmentation draws from a generator of its own."""
    assert not isinstance(data.training, Stream)
    with keeping_random_state():
        first = sketches_of(data.training)
        return any(first_unlike(sketches_of(data.training), first) is not None for _ in range(_LOOKS))
