"""DDP's buckets with the trainer's communication hook: it sums each as in a job, on tensors that have no memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from disttrain_trainer.estimate.counter import WorkCounter
from disttrain_trainer.estimate.imagined import BUCKET_BYTES, FIRST_BUCKET_BYTES, Buckets, all_at_first
from disttrain_trainer.parallel.comm_hooks.attach import build_gradient_sum
from disttrain_trainer.parallel.comm_hooks.base import HookedSum
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World


class Bucket:
    """What a hook is given, as dist.GradBucket is."""

    def __init__(self, index: int, parameters: Sequence[nn.Parameter], *, last: bool) -> None:
        self._index, self._last = index, last
        self._buffer = parameters[0].detach().new_empty(sum(parameter.numel() for parameter in parameters))
        parts = self._buffer.split([parameter.numel() for parameter in parameters])
        self.parts = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
        self.missing = len(parameters)

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last

    def buffer(self) -> Tensor:
        return self._buffer

    def gradients(self) -> list[Tensor]:
        return self.parts


class HookedBuckets(Buckets):
    """Buckets in the order of registration, which a hook keeps from the first step on."""

    def __init__(self, counter: WorkCounter, config: Config) -> None:
        super().__init__(counter)
        self._config = config
        self._hook: HookedSum | None = None
        self._buckets: list[Bucket] = []
        self._next = 0

    def _prepare(self, parameters: Sequence[nn.Parameter], world: World) -> None:
        settings, seed = self._config.job.parallelism.data_parallel, self._config.training.seed
        self._hook = build_gradient_sum(settings, world.device_mesh.get_group("replicate"), seed)
        limits = [FIRST_BUCKET_BYTES, BUCKET_BYTES]
        found, _ = dist._compute_bucket_assignment_by_size(list(parameters), limits, [False] * len(parameters))
        for index, places in enumerate(reversed(found)):
            bucket = Bucket(index, [parameters[place] for place in places], last=index == len(found) - 1)
            self._buckets.append(bucket)
            self._tensors.append(bucket.buffer())
            for place, part in zip(places, bucket.parts, strict=True):
                parameters[place].register_post_accumulate_grad_hook(self._put(bucket, part))

    def begin(self) -> None:
        """Sum as the step before has done, so that what the hook keeps is there."""
        for bucket in self._buckets:
            self._sum(bucket, self._config.training.steps)
        if self._hook is not None:
            self._hook.begin(self._config.training.steps, undoable=self._config.training.skip_steps is not None)

    def held(self) -> Iterator[Tensor]:
        yield from super().held()
        yield from ((self._hook.kept if self._hook is not None else None) or {}).values()

    def _put(self, bucket: Bucket, part: Tensor) -> Callable[[Tensor], None]:
        def put(found: Tensor) -> None:
            if self.averaging:
                found.grad = part
                bucket.missing -= 1
                self._sum_full()

        return put

    def _sum_full(self) -> None:
        """As DDP does: in order."""
        while self._next < len(self._buckets) and self._buckets[self._next].missing == 0:
            self._sum_next()

    def _sum_next(self) -> None:
        bucket = self._buckets[self._next]
        if all_at_first(self._config):
            # That step holds the most; what is sent is counted after the warm-up.
            with self._counter.paused():
                self._sum(bucket, 0)
        self._sum(bucket, self._config.training.steps)
        self._next += 1

    def _sum(self, bucket: Bucket, step: int) -> None:
        assert self._hook is not None
        self._hook.step = step
        with _summing():
            self._hook.reduce(bucket)  # type: ignore[arg-type]

    def _finish(self) -> None:
        while self.averaging and self._next < len(self._buckets):
            self._sum_next()
        # DDP searches for parameters that no rank has used, beside a hook.
        if self.averaging:
            self._counter.add("all-reduce", self._ranks, 4 * sum(len(bucket.parts) for bucket in self._buckets))


class _Done:
    """A collective that is complete, with its result."""

    def __init__(self, tensor: Tensor) -> None:
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self._future.set_result([tensor])

    def get_future(self) -> "torch.futures.Future[list[Tensor]]":
        return self._future


@contextmanager
def _summing() -> Iterator[None]:
    """Hooks get the results of their sums inside; those of a group that sends nothing are None."""
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> _Done:
        original(tensor, *args, **kwargs)
        return _Done(tensor)

    dist.all_reduce = all_reduce
    try:
        with torch.no_grad():
            yield
    finally:
        dist.all_reduce = original
