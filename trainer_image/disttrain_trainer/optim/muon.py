"""Muon for the matrices of hidden layers and AdamW for all other parameters, as one optimizer.

Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) steps by a matrix that is near the closest orthogonal one
to the momentum; it needs whole matrices. Where ranks hold parts of one, each gathers it, computes all of the step and
keeps its part of it (Liu et al. 2025, "Muon is Scalable for LLM Training", section 2.3).
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from disttrain_api.training import Optimizer, OptimizerName
from disttrain_trainer.optim.groups import HIDDEN
from disttrain_trainer.runtime.errors import InvalidConfiguration


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon of the groups with the key HIDDEN, torch.optim.AdamW of the others."""

    def __init__(self, groups: list[dict[str, Any]], muon: Mapping[str, Any], adamw: Mapping[str, Any]) -> None:
        """muon, adamw: arguments of the two."""
        kinds: dict[type[torch.optim.Optimizer], list[dict[str, Any]]] = {}
        for group in groups:
            kinds.setdefault(_kind_of(group), []).append(group)
        self._parts = [
            kind(own, **(adamw if kind is torch.optim.AdamW else muon))  # type: ignore[arg-type]
            for kind, own in kinds.items()
        ]
        super().__init__([group for part in self._parts for group in part.param_groups], {})
        self._join()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._join()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self._parts:
            part.step()
        return loss

    def _join(self) -> None:
        """Have the parts work on this optimizer's groups and state; a state that is loaded replaces both."""
        groups = iter(self.param_groups)
        for part in self._parts:
            part.param_groups = [next(groups) for _ in part.param_groups]
            part.state = self.state


class _CutMuon(torch.optim.Muon):
    """The same of matrices that ranks hold parts of: DTensors. They step together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            momentum, decay = group["momentum"], group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(gradient)
                buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
                update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
                # Muon rounds it so anyway: half of what is sent.
                change = self._change_by(update.bfloat16().full_tensor().to(update.dtype), group)
                parameter.mul_(1 - decay)
                parameter.add_(distribute_tensor(change, update.device_mesh, update.placements, src_data_rank=None))

    @staticmethod
    def _change_by(update: Tensor, group: Mapping[str, Any]) -> Tensor:
        """What torch.optim.Muon adds to a whole matrix, but for its decay."""
        change = nn.Parameter(torch.zeros_like(update))
        change.grad = update
        given = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        torch.optim.Muon([change], weight_decay=0.0, momentum=0.0, nesterov=False, **given).step()
        return change.detach()


def _kind_of(group: Mapping[str, Any]) -> type[torch.optim.Optimizer]:
    if HIDDEN not in group:
        return torch.optim.AdamW
    return _CutMuon if isinstance(group["params"][0], DTensor) else torch.optim.Muon


def hidden_matrices(module: nn.Module, settings: Optimizer) -> frozenset[str]:
    """Names of the parameters of the whole model that Muon updates; none for other optimizers.

    They are its matrices, but for the tables of embeddings and those of the head, which is the last module that has a
    matrix of its own. Raises InvalidConfiguration where none of them is trained.
    """
    if settings.name is not OptimizerName.MUON:
        return frozenset()
    owners = [one for one in module.modules() if any(True for _ in _matrices(one))]
    aside = [one for one in owners if isinstance(one, nn.Embedding | nn.EmbeddingBag)] + owners[-1:]
    spared = {id(matrix) for one in aside for matrix in _matrices(one)}
    found = {
        name: parameter
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.dim() == 2 and id(parameter) not in spared
    }
    if not any(parameter.requires_grad for parameter in found.values()):
        raise InvalidConfiguration(
            "`training.optimizer.name`: Muon is for the matrices between embeddings and the last layer, and the model "
            "trains none there: use AdamW"
        )
    return frozenset(found)


def _matrices(module: nn.Module) -> Iterator[nn.Parameter]:
    return (parameter for parameter in module.parameters(recurse=False) if parameter.dim() == 2)
