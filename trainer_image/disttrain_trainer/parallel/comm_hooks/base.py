"""How the gradients of replicas become one: communication hooks of DDP, which count what they send.

A hook gets each bucket of gradients as soon as it is full, and gives back a future of its mean over the replicas. With
a hook DDP does not divide by their number: we do, before anything else, so that what follows is a sum.

Not `from __future__ import annotations` here: DDP looks at the annotations of a hook itself.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_api.parallelism import AllReduce
from disttrain_trainer.collectives.exchange import all_reduce
from disttrain_trainer.collectives.schedules import SCHEDULES, ring_bytes
from disttrain_trainer.runtime.device import gpus_of

Future = torch.futures.Future


class GradientSum:
    """A way to sum gradients, which counts the bytes that this rank sends for it."""

    def __init__(self, group: dist.ProcessGroup, name: str) -> None:
        self.group = group
        self.ranks = group.size()
        self.name = f"{name} over {self.ranks} replicas"
        """What is kept belongs to: another compression, or another number of replicas, cannot use it."""
        self.step = 0
        self.bytes = 0
        """Bytes that this rank has sent for gradients in the present step."""
        self._before: Mapping[str, Tensor] | None = None

    def begin(self, step: int, *, undoable: bool = False) -> None:
        """A step begins; `step` is the number of those before. undoable: whether `undo` may follow, for which what was
        kept before is held on to."""
        self.step = step
        self.bytes = 0
        self._before = self.copy_of_kept() if undoable else None

    def undo(self) -> None:
        """Forget what this step has kept: no update is made of its gradient."""
        if self._before is not None:
            self.restore(self._before)

    @property
    def undoable(self) -> bool:
        """Whether the present step keeps something and may be undone."""
        return self._before is not None

    @property
    def kept(self) -> Mapping[str, Tensor] | None:
        """Return this rank's errors for the next step, by name and bucket; None for compressions that keep nothing."""
        return None

    def copy_of_kept(self) -> Mapping[str, Tensor] | None:
        """Return the same as it is now, whatever becomes of it."""
        return self.kept

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        """Go on with what was `kept` once; nothing to do for ways that keep nothing."""


class BackendSum(GradientSum):
    """DDP's own way, without a hook: the backend's all-reduce. Its bytes are computed, as those of a ring."""

    def __init__(self, group: dist.ProcessGroup, gradient_bytes: int) -> None:
        super().__init__(group, "Backend")
        self._bytes = ring_bytes(self.ranks, gradient_bytes)

    def begin(self, step: int, *, undoable: bool = False) -> None:
        super().begin(step, undoable=undoable)
        self.bytes = self._bytes


class HookedSum(GradientSum, ABC):
    """A way that DDP calls for each bucket."""

    @abstractmethod
    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        """The mean of the bucket over the replicas: the same bits on every rank, in the bucket's own memory."""

    def mean_part(self, bucket: dist.GradBucket) -> Tensor:
        """[n] this rank's part of the mean, in the bucket's memory."""
        return bucket.buffer().div_(self.ranks)

    def sum_up(self, values: Tensor, algorithm: AllReduce = AllReduce.BACKEND) -> Future[Tensor]:
        """`values` summed over the replicas in place. Our own algorithms have done so when this returns."""
        if algorithm is AllReduce.BACKEND:
            self.bytes += ring_bytes(self.ranks, values.nbytes)
            work = dist.all_reduce(values, group=self.group, async_op=True)
            return after(work.get_future(), lambda: values)
        self.bytes += all_reduce(values, SCHEDULES[algorithm](self.ranks), self.group)
        done: Future[Tensor] = Future(devices=gpus_of(values.device))
        done.set_result(values)
        return done

    def gather(self, packed: Tensor, use: Callable[[Tensor], Tensor], *read: Tensor) -> Future[Tensor]:
        """`use` of the bytes [n] of every replica, as [replicas, n], once they are there. read: as `after` has it.

        Counted as a ring sends them: each rank's bytes pass N - 1 links.
        """
        self.bytes += (self.ranks - 1) * packed.nbytes
        rows = packed.new_empty(self.ranks, packed.numel())
        work = dist.all_gather(list(rows), packed, group=self.group, async_op=True)
        return after(work.get_future(), lambda: use(rows), rows, *read)


def after(future: Future[object], use: Callable[[], Tensor], *read: Tensor) -> Future[Tensor]:
    """Return a future with the result of `use` once the future is done, or its error.

    read: what `use` reads, beside the future's own value and what outlives the step. A GPU comes to the work of `use`
    later, in a stream of its own, and of what the host has let go of by then torch keeps for it only the value.
    """
    if read:
        future = future.then(lambda done: (done.value(), *read))

    def then(done: Future[object]) -> Tensor:
        done.value()
        return use()

    return future.then(then)


class DenseSum(HookedSum):
    """Every number is sent, in the bucket's format or a shorter one, in which it is then also summed.

    torch's fp16_compress_hook and bf16_compress_hook give two ranks the same bits, but know the backend's all-reduce
    alone, count no bytes, and divide after they have shortened, where a number may have become inf.
    """

    def __init__(
        self, group: dist.ProcessGroup, name: str, algorithm: AllReduce, number_format: torch.dtype | None
    ) -> None:
        super().__init__(group, name)
        self._algorithm, self._format = algorithm, number_format

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        mean = self.mean_part(bucket)
        if self._format is None:
            return self.sum_up(mean, self._algorithm)
        short = mean.to(self._format)
        return after(self.sum_up(short, self._algorithm), lambda: mean.copy_(short))


def reduce_bucket(state: HookedSum, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """The hook, as DDP calls it."""
    return state.reduce(bucket)
