"""Asynchronous tensor parallelism: compiled layers multiply part by part while other parts travel.

torch's compiler puts one operation in the place of a gathering and the products after it, and of a product and the
scattering of its sums after it, where both are along the sequence (torch._inductor.fx_passes.micro_pipeline_tp; Wang
et al., "Overlap communication with dependent computation via decomposition", ASPLOS 2023). These operations read the
memory of the other GPUs. On a CPU they do one after the other, so that a job can be tried there.
"""

import logging
import warnings
from functools import cache

import torch
import torch._inductor.config
from torch.distributed import _symmetric_memory

from disttrain_trainer.runtime.mesh import World

_PASS = "torch._inductor.fx_passes.micro_pipeline_tp"


def overlap_products(world: World, *, wanted: bool) -> None:
    """Have layers that are compiled from now on in this process overlap, or not. A call of the whole tensor group.

    Raises InvalidConfiguration where a GPU of the group does not reach the memory of another one.
    """
    torch._inductor.config._micro_pipeline_tp = wanted  # type: ignore[attr-defined] # it is not declared
    if not wanted:
        return
    # It warns of each graph in which nothing is sent, such as that of a loss.
    logging.getLogger(_PASS).setLevel(logging.ERROR)
    if world.device.emulates_overlap(world.at["tensor"], world.mesh.tensor):
        _emulate(world.device.kind)
    with warnings.catch_warnings():
        # torch 2.13 says that it need not be called, and overlaps nothing where it was not.
        warnings.simplefilter("ignore", FutureWarning)
        _symmetric_memory.enable_symm_mem_for_group(world.device_mesh["tensor"].get_group().group_name)


@cache
def _emulate(kind: str) -> torch.library.Library:
    """Register torch's own definitions of the operations for a kind of device, while what is returned lives."""
    library = torch.library.Library("symm_mem", "IMPL")
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        library.impl(name, getattr(_symmetric_memory, f"_{name}_fallback"), kind.upper())
    return library
