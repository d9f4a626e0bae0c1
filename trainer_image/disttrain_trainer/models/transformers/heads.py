"""The heads of an attention layer, which a tensor group shares whole."""

from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel

from disttrain_trainer.runtime.errors import InvalidConfiguration


@dataclass(frozen=True)
class Heads:
    """Layout of a projection's output."""

    field: str
    """What the library's config calls their number."""
    count: int

    def require_whole(self, ranks: int) -> None:
        """Raises InvalidConfiguration where the ranks would not get whole heads."""
        # torch would cut through a head, and attention would silently compute something else.
        if self.count % ranks:
            raise InvalidConfiguration(
                f"`parallelism.tensorParallelDegree`: {self.field} {self.count} of `training.model.config` must be a "
                f"multiple of {ranks}"
            )


class ColwiseHeads(ColwiseParallel):
    """Cuts a projection between heads."""

    def __init__(self, heads: Heads) -> None:
        super().__init__()
        self._heads = heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        """Raises InvalidConfiguration where the ranks would not get whole heads."""
        self._heads.require_whole(device_mesh.size())
        return super()._apply(module, device_mesh)
