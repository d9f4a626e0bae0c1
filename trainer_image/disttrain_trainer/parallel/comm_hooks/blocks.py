"""Few bits per number: each replica's payload goes to all others, which decode and add all of them."""

import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.compression.blocks import Codec
from disttrain_trainer.compression.packing import pack, shapes_of, unpack
from disttrain_trainer.parallel.comm_hooks.base import Future
from disttrain_trainer.parallel.comm_hooks.kept import KeepingSum


class BlockSum(KeepingSum):
    """Gradients by a codec. With `feedback` its error goes into the next gradient (Seide et al. 2014, section 2.2)."""

    def __init__(
        self, group: dist.ProcessGroup, name: str, codec: Codec, *, feedback: bool, warmup_steps: int = 0
    ) -> None:
        super().__init__(group, name)
        self._codec, self._feedback, self._warmup_steps = codec, feedback, warmup_steps

    @property
    def kept(self) -> dict[str, Tensor] | None:
        return super().kept if self._feedback else None

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        mean = self.mean_part(bucket)
        if self.step < self._warmup_steps:
            return self.sum_up(mean)
        size = mean.numel()
        name = f"residual/{bucket.index()}"
        values = mean + self.recall(name, mean) if self._feedback else mean
        payload = self._codec.encode(values)
        if self._feedback:
            self.keep(name, values - self._codec.decode(payload, size))
        shapes = shapes_of(payload)

        def add_up(rows: Tensor) -> Tensor:
            mean.zero_()
            for row in rows:
                mean.add_(self._codec.decode(unpack(row, shapes), size))
            return mean

        return self.gather(pack(payload), add_up)
