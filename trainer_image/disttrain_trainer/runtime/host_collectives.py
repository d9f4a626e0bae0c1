"""Functional collectives of tensors on GPUs whose ranks talk through gloo: by way of the host's memory.

torch.distributed.tensor, and so tensor parallelism, sequences that are cut, and norms of cut gradients, call the
operations of `_c10d_functional`. Some of them end in gloo's all-gather of several tensors, which has no form for GPUs:
it reads their addresses on the host and crashes. So here each of them has a kernel of ours for tensors on GPUs: it
copies down, lets torch do the same on the CPU, waits, and copies up. What a compiled model calls from Python comes
here, too; code of Inductor's C++ wrapper (`cpp_wrapper`, which the trainer never sets) would not.

The plain collectives of torch.distributed (all_reduce, all_gather, all_gather_into_tensor, reduce_scatter_tensor,
all_to_all_single, broadcast, reduce, gather, scatter) need nothing: gloo copies for these by itself. Its messages from
rank to rank do not; see Device.channel.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

_NAMESPACE = "_c10d_functional"
_Call = Callable[..., Any]

NEW = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_gather_into_tensor",
    "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
    "all_to_all_single",
    "broadcast",
)
"""Operations whose results are tensors of their own."""
IN_PLACE = ("all_reduce_", "all_reduce_coalesced_", "broadcast_")
"""Operations whose results lie where their first argument, a tensor or several, was."""
INTO = ("all_gather_into_tensor_out", "reduce_scatter_tensor_out")
"""Operations whose result is written into their argument `out`."""
OPERATIONS = (*NEW, *IN_PLACE, *INTO)

_installed: dict[str, torch.library.Library] = {}
"""By dispatch key: torch forgets kernels whose library is gone."""


def use_host_for_collectives(key: str, call: Callable[[str], _Call] | None = None) -> None:
    """Have the functional collectives of tensors with this dispatch key go through the host's memory.

    Holds for the whole process, once. call: gives, by an operation's name, what does it on the CPU; by default torch's
    own.
    """
    if key in _installed:
        return
    _installed[key] = library = torch.library.Library(_NAMESPACE, "IMPL")
    for name in OPERATIONS:
        # Not every release of torch has all of them.
        if hasattr(getattr(torch.ops, _NAMESPACE), name):
            library.impl(name, kernel_of(name, (call or operation)(name)), key)


def operation(name: str) -> _Call:
    """torch's functional collective of this name."""
    found: _Call = getattr(getattr(torch.ops, _NAMESPACE), name).default
    return found


def kernel_of(name: str, call: _Call) -> _Call:
    """The operation `name` for tensors that are not in the host's memory. call: does it for those that are."""

    # Autograd's part lies above a kernel: what is computed here is none of its business.
    @torch.no_grad()
    def kernel(*arguments: Any, **options: Any) -> Any:
        given, named = _to_host((arguments, options))
        results = wait(call(*given, **named))
        if name in NEW:
            return tree_map_only(Tensor, _sender_to(_device_of(arguments)), results)
        places = arguments[0] if name in IN_PLACE else options["out"]
        for place, result in zip(_listed(places), _listed(results), strict=True):
            place.copy_(result)
        return places

    return kernel


def wait(results: Any) -> Any:
    """The same tensors, which are complete."""
    return tree_map_only(Tensor, torch.ops._c10d_functional.wait_tensor, results)


def _to_host(values: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The same with copies of all tensors in the host's memory; back when these are complete."""
    copied: tuple[Sequence[Any], Mapping[str, Any]] = tree_map_only(
        Tensor, lambda value: value.detach().to("cpu", memory_format=torch.contiguous_format, copy=True), values
    )
    return copied


def _sender_to(device: torch.device) -> Callable[[Tensor], Tensor]:
    return lambda value: value.to(device)


def _device_of(arguments: Sequence[Any]) -> torch.device:
    device: torch.device = _listed(arguments[0])[0].device
    return device


def _listed(values: Any) -> Sequence[Tensor]:
    return [values] if isinstance(values, Tensor) else values
