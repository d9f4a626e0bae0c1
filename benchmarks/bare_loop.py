"""A bare PyTorch loop: the same model and the same torch calls as the trainer's, and nothing else."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks import bare_experts
from disttrain_api.jobconfig import JobConfig
from disttrain_api.training import ModelName, Training
from disttrain_trainer.tasks.supervised import build_model, load_data


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Logits [B, T, V], targets [B, T]."""
    return cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipeline_step(module: nn.Module, microbatches: int) -> tuple[nn.Module, Callable[[Tensor, Tensor], object]]:
    """This rank's half of the layers, and its step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    layers = module.layers()
    each = len(layers) // world
    stage = nn.Sequential(*layers[rank * each : (rank + 1) * each])
    schedule = Schedule1F1B(
        PipelineStage(stage, rank, world, torch.device("cpu")), microbatches, loss_fn=mean_loss, scale_grads=True
    )

    def step(inputs: Tensor, targets: Tensor) -> object:
        given = (inputs,) if rank == 0 else ()
        return schedule.step(*given, target=targets if rank == world - 1 else None, return_outputs=False)

    return stage, step


def whole_step(model: nn.Module) -> Callable[[Tensor, Tensor], object]:
    """Forward and backward pass of the whole model."""
    if bare_experts.experts_of(model):
        return lambda inputs, targets: bare_experts.backward(model, mean_loss(model(inputs), targets))
    return lambda inputs, targets: mean_loss(model(inputs), targets).backward()


class Library(nn.Module):
    """The model of the library transformers as the library has it, with its logits as the output."""

    def __init__(self, training: Training) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        described = dict(training.model.config["config"])
        self.model = AutoModelForCausalLM.from_config(AutoConfig.for_model(described.pop("model_type"), **described))

    def layers(self) -> list[Any]:
        """What FSDP2 cuts as units of their own, as torchtitan does: embedding, decoder layers, norm with head."""
        inner = self.model.model
        return [inner.embed_tokens, *inner.layers, [inner.norm, self.model.lm_head]]

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [B, T, V] of tokens [B, T]."""
        logits: Tensor = self.model(inputs, use_cache=False).logits
        return logits


def bare_model(training: Training) -> nn.Module:
    """The model of the job, as one would build it without the trainer."""
    return Library(training) if training.model.name is ModelName.TRANSFORMERS else build_model(training)


def wrap(module: nn.Module, job: JobConfig, world: int) -> nn.Module:
    """DDP, FSDP2, expert or tensor parallelism, as one would write it down."""
    if job.parallelism.expert_parallel_degree:
        return bare_experts.spread(module, init_device_mesh("cpu", (world,)))
    if job.parallelism.data_parallel_shard_degree:
        mesh = init_device_mesh("cpu", (world,))
        for layer in module.layers():
            fully_shard(layer, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    if job.parallelism.tensor_parallel_degree:
        return parallelize_module(module, init_device_mesh("cpu", (world,)), module.tensor_plan())
    static = job.parallelism.data_parallel.static_graph
    return DistributedDataParallel(module, gradient_as_bucket_view=True, static_graph=static)


class BareLoop:
    """Within a world that has begun; all ranks call `step` together."""

    def __init__(self, job: JobConfig) -> None:
        world = dist.get_world_size()
        torch.manual_seed(job.training.seed)
        cut = job.parallelism.tensor_parallel_degree or job.parallelism.pipeline_parallel_degree
        replicas = 1 if cut else world
        model = bare_model(job.training)
        microbatches = 1
        if job.parallelism.pipeline is not None:
            microbatches = job.parallelism.pipeline.microbatches or 1
            model, self._compute = pipeline_step(model, microbatches)
        else:
            model = wrap(model, job, world)
            self._compute = whole_step(model)
        # FSDP2's parameters are DTensors, which an optimizer's group does not mix with others.
        own = bare_experts.own_parameters(model)
        others = [parameter for parameter in model.parameters() if all(parameter is not expert for expert in own)]
        groups = [{"params": group} for group in (others, own) if group]
        # torch's one kernel takes no mixture of whole parameters and parts of some, as tensor groups have.
        fused = not job.parallelism.tensor_parallel_degree
        self._optimizer = torch.optim.AdamW(groups, lr=job.training.optimizer.learning_rate, fused=fused)
        dataset = load_data(job.training).training
        sampler = DistributedSampler(dataset, replicas, dist.get_rank() % replicas)
        loader = DataLoader(dataset, job.training.micro_batch_size * microbatches, sampler=sampler, drop_last=True)
        self._batches = (batch for _ in iter(int, 1) for batch in loader)

    def step(self) -> None:
        """One optimizer step."""
        self._compute(*next(self._batches))
        self._optimizer.step()
        self._optimizer.zero_grad()
