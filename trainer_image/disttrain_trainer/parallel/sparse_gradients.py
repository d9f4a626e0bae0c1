"""Sparse gradients: that of an embedding with sparse=True holds the rows that a batch has used, and no others.

One process and replicas over gloo train with them where the optimizer takes them; for all else there are parameter
servers.
"""

import re
from collections.abc import Iterable

import torch
from torch import nn

from disttrain_api.parallelism import AllReduce, DataParallelMode
from disttrain_api.relaxed import LocalSgd
from disttrain_trainer.optim.muon import Muon
from disttrain_trainer.parallel.sharded import is_sharded
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World

# torch has no class for it; these are the words of DDP's reducer and of an operation without such a kernel.
_ABOUT_SPARSE = re.compile(r"Expected (variable to have )?sparse gradient|'Sparse\w+' backend")


def sparse_embeddings(module: nn.Module) -> dict[str, nn.Module]:
    """Return the trained embeddings with sparse=True, by the name of their weight."""
    return {
        f"{prefix}.weight" if prefix else "weight": one
        for prefix, one in module.named_modules(remove_duplicate=False)
        if isinstance(one, nn.Embedding | nn.EmbeddingBag) and one.sparse and one.weight.requires_grad
    }


def what_takes_none(config: Config, world: World, optimizer: torch.optim.Optimizer) -> str | None:
    """Return what of the job does not take sparse gradients; None where all does."""
    parallelism, mesh = config.job.parallelism, world.mesh
    settings = parallelism.data_parallel
    if settings.mode is DataParallelMode.PARAMETER_SERVER:
        # A worker pushes rows, or makes its gradients dense.
        return None
    relaxed = settings.relaxed
    summed = world.parts > 1 and relaxed is None
    takes_none = {
        "shards": is_sharded(config.training, world),
        "tensor groups": mesh.tensor > 1,
        "a pipeline": mesh.pipeline > 1,
        "`devicesPerProcess`": (parallelism.devices_per_process or 1) > 1,
        "`staticGraph`": summed and settings.static_graph,
        "`compression`": settings.compression is not None,
        "`localSGD.warmupSteps`": isinstance(relaxed, LocalSgd) and relaxed.warmup_steps > 0,
        "`allReduce`": settings.all_reduce is not AllReduce.BACKEND,
        "NCCL": summed and not world.device.sums_sparse,
    }
    layout = next((name for name, is_given in takes_none.items() if is_given), None)
    return layout or _optimizer_that_takes_none(optimizer)


def _optimizer_that_takes_none(optimizer: torch.optim.Optimizer) -> str | None:
    """Return the name of one of the manifest's optimizers that does not; others say so themselves.

    A momentum of rows would do, but no checkpoint could hold it.
    """
    if isinstance(optimizer, torch.optim.Adam | torch.optim.Adafactor | Muon):
        return type(optimizer).__name__
    if type(optimizer) is torch.optim.SGD:
        for name in ("momentum", "weight_decay"):
            if any(group[name] for group in optimizer.param_groups):
                return f"the {name.replace('_', ' ')} of SGD"
    return None


def step_singly(optimizer: torch.optim.Optimizer) -> None:
    """Have the optimizer step each parameter by itself: torch's fused loops take no sparse gradients."""
    for group in optimizer.param_groups:
        group.update({name: None for name in ("fused", "foreach") if name in group})


def require_dense(names: Iterable[str], taker: str | None) -> None:
    """Raises InvalidConfiguration where parameters of these names have sparse gradients and `taker` takes none."""
    for name in names if taker is not None else ():
        raise InvalidConfiguration(
            f"`training.model`: the gradient of `{name}` is sparse, which conflicts with {taker}: use "
            "`parallelism.dataParallel.mode` ParameterServer, or sparse=False"
        )


def settle_sparse_gradients(
    parameters: Iterable[nn.Parameter], module: nn.Module, optimizer: torch.optim.Optimizer, taker: str | None
) -> None:
    """Add up what sparse gradients have of each row; the optimizer steps singly from then on.

    Raises what `require_dense` does where there are some.
    """
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.is_sparse:
            require_dense([name for name, one in module.named_parameters() if one is parameter], taker)
            parameter.grad = parameter.grad.coalesce()
            # No module has told of it before.
            step_singly(optimizer)


def require_summed(error: BaseException, module: nn.Module) -> None:
    """Raises InvalidConfiguration for an error that torch raises of sparse gradients that it cannot sum."""
    if _ABOUT_SPARSE.search(str(error)):
        names = ", ".join(f"`{name}`" for name in sparse_embeddings(module)) or "a parameter"
        raise InvalidConfiguration(
            f"`training.model`: the gradient of {names} is sparse; replicas sum it where each uses the embedding in "
            "every step, and nothing else uses its weight, and shards never do: use `parallelism.dataParallel.mode` "
            "ParameterServer, or sparse=False"
        ) from error
