"""From the manifest to a State: what is built, and the order in which techniques wrap the model.

The order and its reasons:
1. seed, then model: parameters depend on `seed` alone, so that every rank and every layout starts from the same;
2. model to its device: the optimizer must hold the parameters that the device computes with;
3. a pipeline's stages before anything else, on the whole model; what follows then happens to this rank's layers;
4. tensor and expert parallelism first: they replace parameters, and what follows wraps those that compute;
5. recomputation inside compilation inside sharding: a layer is gathered once, then computed, and computed anew;
6. data parallelism outermost: it must see the gradients that everything inside it has produced;
7. optimizer last, on the module's own parameters, whole or cut: a checkpoint names them as the user's module does.
"""

from functools import partial
from importlib import import_module

from torch import Tensor, nn

from disttrain_api.builtin import data_config, model_config
from disttrain_api.training import Training
from disttrain_trainer.config import Config
from disttrain_trainer.data.batches import Datasets, load_microbatch
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.entrypoint import call_entrypoint
from disttrain_trainer.errors import DataNotFound, DataUnlike, InvalidConfiguration
from disttrain_trainer.flops import work_of
from disttrain_trainer.losses import build_loss
from disttrain_trainer.mesh import World
from disttrain_trainer.model_memory import require_memory_to_build, require_memory_to_train
from disttrain_trainer.optimizers import build_optimizer
from disttrain_trainer.parallel.activations import offload, recompute, require_layers
from disttrain_trainer.parallel.data_parallel import replicate
from disttrain_trainer.parallel.devices import spread_over_devices
from disttrain_trainer.parallel.expert import spread_experts, watch_routing
from disttrain_trainer.parallel.hooks.attach import attach_gradient_sum
from disttrain_trainer.parallel.local_sgd.build import build_replicas
from disttrain_trainer.parallel.meta import build_on_meta, give_values
from disttrain_trainer.parallel.pipeline.build import build_pipeline
from disttrain_trainer.parallel.sharded import is_sharded, shard
from disttrain_trainer.parallel.sync_batch_norm import synchronise_batch_norm
from disttrain_trainer.parallel.tensor import share_layers
from disttrain_trainer.parallel.units import composes, layers_of
from disttrain_trainer.precision import build_precision
from disttrain_trainer.randomness import seed_everything
from disttrain_trainer.state import State


def build_state(config: Config, world: World) -> State:
    """The State before the first step, alike on every rank but for the random stream.

    Raises InvalidConfiguration, EntrypointNotImportable or DataNotFound.
    """
    training = config.training
    data = load_data(training)
    _agree_on_sizes(data, world)
    require_memory_to_build(config, world)
    seed_everything(training.seed)
    if training.model.meta_device:
        module = build_on_meta(lambda: build_model(training))
    else:
        module = build_model(training).to(world.device.torch)
    require_memory_to_train(module, config, world)
    if config.job.parallelism.data_parallel.sync_batch_norm:
        module = synchronise_batch_norm(module, world)
    work = work_of(module)
    precision, loss = build_precision(training, world), build_loss(training.loss, module, training.compile)
    sampler = Sampler(len(data.training), training.seed, config.batch, world.replicas)
    routing = watch_routing(module, world)
    model, pipeline = module, None
    if world.mesh.pipeline > 1:
        first_inputs = partial(_first_inputs, data, sampler, world)
        pipeline = build_pipeline(module, config, world, loss, precision, routing, first_inputs)
    else:
        model = parallelise(module, config, world)
    # A model that cannot be cut along the sequence has said so.
    if config.job.parallelism.sequence_parallel:
        _require_even_sequences(data, world.mesh.tensor)
    optimizer = build_optimizer(training.optimizer, module.parameters())
    # From here on each replica draws its own dropout, and each part of a pipeline.
    seed_everything(training.seed, 1 + world.replica + world.replicas * world.mesh.coordinates(world.rank)["pipeline"])
    return State(
        module=module,
        model=model,
        optimizer=optimizer,
        precision=precision,
        loss=loss,
        data=data,
        routing=routing,
        sampler=sampler,
        gradient_sum=attach_gradient_sum(model, config, world),
        replicas=build_replicas(module, optimizer, config, world),
        work=work,
        offload_activations=training.offload.activations,
        pipeline=pipeline,
    )


def parallelise(module: nn.Module, config: Config, world: World) -> nn.Module:
    """The module as it is called in a step: cut, wrapped and copied as the manifest says."""
    training = config.training
    share_layers(module, config.job.parallelism, world)
    experts = spread_experts(module, config.job.parallelism, world)
    layers = layers_of(module)
    require_layers(module, layers, training.activation_checkpointing)
    # Where the layers are the whole model, the last one's backward pass comes at once: no use in computing it anew.
    recompute(layers[:-1] if composes(module) and len(layers) > 1 else layers, training.activation_checkpointing)
    if training.compile:
        for layer in layers or [module]:
            layer.compile()
    if is_sharded(training, world):
        model = shard(module, layers, training, world, experts)
        give_values(module, training, world)
        return model
    give_values(module, training, world)
    # Hooks on what is kept are a thread's, and each device has its own.
    around = partial(offload, world.device.torch, training.offload.activations)
    spread = spread_over_devices(module, config.job.parallelism, world, around)
    settings = config.job.parallelism.data_parallel
    # Replicas that train alone send no gradients.
    return replicate(spread, world, settings.static_graph) if settings.relaxed is None else spread


def _first_inputs(data: Datasets, sampler: Sampler, world: World) -> Tensor:
    """Inputs of the first microbatch."""
    slots = sampler.microbatches(Cursor(), world.replica)[0]
    return load_microbatch(data.training, slots, world.device.torch).inputs


def build_model(training: Training) -> nn.Module:
    """The built-in model, or the one that the entry point returns."""
    if training.model.name is not None:
        return import_module(f"disttrain_trainer.models.{training.model.name}.model").build(model_config(training))
    assert training.model.entrypoint is not None
    model = call_entrypoint("training.model", training.model.entrypoint, training.model.config)
    if not isinstance(model, nn.Module):
        raise InvalidConfiguration(
            f"`training.model.entrypoint`: {training.model.entrypoint} returned a {type(model).__name__}, "
            "expected a torch.nn.Module"
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InvalidConfiguration("`training.model`: the model has no parameter to train")
    return model


def load_data(training: Training) -> Datasets:
    """The built-in data, or what the entry point returns."""
    if training.data.name is not None:
        return import_module(f"disttrain_trainer.data.{training.data.name}").load(data_config(training.data))
    entrypoint = training.data.entrypoint
    assert entrypoint is not None
    returned = call_entrypoint("training.data", entrypoint, training.data.config)
    pair = tuple(returned) if isinstance(returned, tuple | list) else ()
    if len(pair) != 2 or not _is_dataset(pair[0]) or not (pair[1] is None or _is_dataset(pair[1])):
        raise InvalidConfiguration(
            f"`training.data.entrypoint`: {entrypoint} returned a {type(returned).__name__}, expected "
            "(training, held-out) with __len__ and __getitem__ each; None for the second where nothing is held out"
        )
    if len(pair[0]) == 0:
        raise DataNotFound(f"`training.data.entrypoint`: {entrypoint} returned no training samples")
    return Datasets(*pair)


def _is_dataset(value: object) -> bool:
    return hasattr(value, "__len__") and hasattr(value, "__getitem__")


def _agree_on_sizes(data: Datasets, world: World) -> None:
    """Ranks with other files would silently train on other samples than the order says."""
    own = (len(data.training), 0 if data.held_out is None else len(data.held_out))
    sizes = world.gather(own, tuple[int, int])
    for rank, size in enumerate(sizes):
        if size != sizes[0]:
            raise DataUnlike(
                f"rank {rank} finds {size[0]} training and {size[1]} held-out samples, rank 0 finds {sizes[0][0]} and "
                f"{sizes[0][1]}: the data must be alike in every pod"
            )


def _require_even_sequences(data: Datasets, degree: int) -> None:
    """Parts of unlike lengths: ranks would wait for different numbers of bytes, and the backend ends the process."""
    for kind, samples in (("training", data.training), ("held-out", data.held_out)):
        first = samples[0] if samples is not None and len(samples) else None
        length = len(first[0]) if first and isinstance(first[0], Tensor) and first[0].ndim else 0
        if length % degree:
            raise InvalidConfiguration(
                f"`parallelism.sequenceParallel`: the {kind} sequences of `training.data` are {length} long, which must"
                f" be a multiple of `tensorParallelDegree`, which is {degree}"
            )
