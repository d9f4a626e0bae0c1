"""PowerSGD (Vogels et al. 2019), torch's hook: a matrix [n, m] travels as two of [n, rank] and [m, rank]."""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from disttrain_api.parallelism import Compression
from disttrain_trainer.collectives.schedules import ring_bytes
from disttrain_trainer.parallel.comm_hooks.base import Future, HookedSum
from disttrain_trainer.runtime.device import gpus_of

DEFAULT_RANK = 4
# torch wants to let DDP form its buckets anew in two steps before; ours never does.
_FIRST_STEP = 2


class LowRankSum(HookedSum):
    """Matrices that get smaller by it are sent so; what they miss is kept. The rest is summed as it is."""

    def __init__(self, group: dist.ProcessGroup, settings: Compression, seed: int) -> None:
        super().__init__(group, settings.name)
        self._seed = seed
        self._warmup_steps = settings.warmup_steps or 0
        self._state = PowerSGDState(
            group, settings.rank or DEFAULT_RANK, start_powerSGD_iter=_FIRST_STEP, random_seed=seed
        )
        # Its own warm-up is over; ours follows the number of the step, which a resumed run knows.
        self._state.iter = _FIRST_STEP

    def reduce(self, bucket: dist.GradBucket) -> Future[Tensor]:
        if self.step < self._warmup_steps:
            return self.sum_up(self.mean_part(bucket))
        state, buffer = self._state, bucket.buffer()
        for _, by_bucket in self._dicts():
            if bucket.index() in by_bucket:
                # A checkpoint gives them back on the CPU.
                by_bucket[bucket.index()] = by_bucket[bucket.index()].to(buffer.device)
        before = state.total_numel_after_compression
        self._move(bucket.index(), buffer.device)
        # It draws its first matrices from the global stream, alike on all ranks; dropout must not go on from there.
        with torch.random.fork_rng(gpus_of(buffer.device), enabled=bucket.index() not in state.q_memory_dict):
            future = powerSGD_hook(state, bucket)
        sent = state.total_numel_after_compression - before
        self.bytes += ring_bytes(self.ranks, sent * buffer.itemsize)
        # Its callbacks start all-reduces of their own: with two buckets on the way, ranks would start them in different
        # orders, and the backend would mix them up.
        future.wait()
        return future

    @property
    def kept(self) -> dict[str, Tensor]:
        return {f"{kind}/{bucket}": values for kind, by_bucket in self._dicts() for bucket, values in by_bucket.items()}

    def copy_of_kept(self) -> dict[str, Tensor]:
        # torch writes into its factors, and not into the residual.
        return {name: values if name.startswith("residual/") else values.clone() for name, values in self.kept.items()}

    def restore(self, kept: Mapping[str, Tensor]) -> None:
        if not kept:
            # The first factors are drawn again.
            self._state.rng.seed(self._seed)
        for kind, by_bucket in self._dicts():
            by_bucket.clear()
            for name, values in kept.items():
                if name.startswith(f"{kind}/"):
                    by_bucket[int(name.rpartition("/")[2])] = values

    def _move(self, bucket: int, device: torch.device) -> None:
        """Move the state of a bucket to the device: a checkpoint restores it on the CPU."""
        for _, by_bucket in self._dicts():
            if bucket in by_bucket:
                by_bucket[bucket] = by_bucket[bucket].to(device)

    def _dicts(self) -> list[tuple[str, dict[int, Tensor]]]:
        state = self._state
        return [("residual", state.error_dict), ("p", state.p_memory_dict), ("q", state.q_memory_dict)]
