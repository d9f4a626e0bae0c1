"""How a projection with an adapter is cut over a tensor group: the adapter goes along with the projection."""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from disttrain_trainer.models.transformers.heads import Heads
from disttrain_trainer.models.transformers.lora import Down, Up


class LoraCut(ParallelStyle):
    """Cuts a LoraLinear by output (B with it, A whole) or by input (A with it, B whole)."""

    def __init__(self, *, by_output: bool, inputs: Placement, outputs: Placement, heads: Heads | None = None) -> None:
        """inputs, outputs: how the tensors lie before and behind; heads: what the output consists of."""
        super().__init__()
        self._by_output, self._inputs, self._outputs, self._heads = by_output, inputs, outputs, heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self._heads is not None:
            self._heads.require_whole(device_mesh.size())
        return distribute_module(module, device_mesh, self._place, self._take, self._give)

    def _place(self, _: str, part: nn.Module, mesh: DeviceMesh) -> None:
        for name, parameter in list(part.named_parameters(recurse=False)):
            placed = distribute_tensor(parameter.detach(), mesh, [self._placement(part, name)])
            part.register_parameter(name, nn.Parameter(placed, requires_grad=parameter.requires_grad))

    def _placement(self, part: nn.Module, name: str) -> Placement:
        if self._by_output:
            return Replicate() if isinstance(part, Down) else Shard(0)
        return Replicate() if isinstance(part, Up) or name == "bias" else Shard(1)

    def _take(self, _: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> DTensor:
        (given,) = inputs
        if not isinstance(given, DTensor):
            given = DTensor.from_local(given, mesh, [self._inputs], run_check=False)
        return given.redistribute(placements=[Replicate() if self._by_output else Shard(-1)])

    def _give(self, _: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        assert isinstance(output, DTensor)
        return output.redistribute(placements=[self._outputs]).to_local()
