"""Few numbers of each gradient: the largest of each replica, or the same random ones of all."""

from abc import abstractmethod

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_api.parallelism import AllReduce, Compression
from disttrain_trainer.compression.packing import pack, shapes_of, unpack
from disttrain_trainer.compression.sparse import (
    DEFAULT_RATIO,
    kept_count,
    largest,
    random_indices,
    ratio_at,
    with_momentum,
    without,
)
from disttrain_trainer.parallel.comm_hooks.base import Future, after
from disttrain_trainer.parallel.comm_hooks.kept import KeepingSum


class SparseSum(KeepingSum):
    """Sends `ratio` of the numbers; keeps the others, with momentum correction also the velocity of all of them."""

    def __init__(self, group: dist.ProcessGroup, settings: Compression) -> None:
        super().__init__(group, settings.name)
        self._ratio = DEFAULT_RATIO if settings.ratio is None else settings.ratio
        self._warmup_steps = settings.warmup_steps or 0
        self._momentum = settings.momentum_correction or 0.0

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        mean, index = self.mean_part(bucket), bucket.index()
        velocity_name, residual_name = f"velocity/{index}", f"residual/{index}"
        velocity = self.recall(velocity_name, mean) if self._momentum else None
        update = with_momentum(mean, velocity, self._momentum)
        values = self.recall(residual_name, mean) + update
        count = kept_count(values.numel(), ratio_at(self.step, self._ratio, self._warmup_steps))
        indices = self._choose(values, count, index)
        self.keep(residual_name, without(values, indices))
        if velocity is not None:
            self.keep(velocity_name, without(update, indices))
        sent = values[indices]
        if self.undoable:
            # The next steps must not find in what was kept a number that these never show.
            sent = torch.where(values.isfinite().all(), sent, torch.nan)
        return self._exchange(mean, sent, indices)

    @abstractmethod
    def _choose(self, values: Tensor, count: int, bucket: int) -> Tensor:
        """Indices [count] of the numbers that are sent."""

    @abstractmethod
    def _exchange(self, mean: Tensor, values: Tensor, indices: Tensor) -> Future[Tensor]:
        """`mean`, filled with the sum of what all replicas send, zero elsewhere."""


class TopKSum(SparseSum):
    """The largest magnitudes of each replica (Stich et al. 2018). Replicas choose differently, so indices go along."""

    def _choose(self, values: Tensor, count: int, bucket: int) -> Tensor:
        return largest(values, count)

    def _exchange(self, mean: Tensor, values: Tensor, indices: Tensor) -> Future[Tensor]:
        everything = values.numel() == mean.numel()
        # Where everything is sent, in order, places need not be told.
        payload = [values] if everything else [values, indices.to(torch.int32)]
        shapes = shapes_of(payload)

        def add_up(rows: Tensor) -> Tensor:
            mean.zero_()
            for row in rows:
                numbers, *places = unpack(row, shapes)
                mean.index_add_(0, places[0] if places else indices, numbers)
            return mean

        return self.gather(pack(payload), add_up, indices)


class RandomKSum(SparseSum):
    """Random numbers, the same of all replicas, so that their values can be summed on the way."""

    def __init__(self, group: dist.ProcessGroup, settings: Compression, algorithm: AllReduce, seed: int) -> None:
        super().__init__(group, settings)
        self._algorithm, self._seed = algorithm, seed

    def _choose(self, values: Tensor, count: int, bucket: int) -> Tensor:
        return random_indices(values.numel(), count, (self._seed, self.step, bucket), values.device)

    def _exchange(self, mean: Tensor, values: Tensor, indices: Tensor) -> Future[Tensor]:
        summed = self.sum_up(values, self._algorithm)
        return after(summed, lambda: mean.zero_().index_copy_(0, indices, values), indices)
