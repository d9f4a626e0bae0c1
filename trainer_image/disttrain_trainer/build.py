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

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from disttrain_api.compute import ActivationCheckpointing
from disttrain_api.parallelism import DataParallelMode
from disttrain_trainer.callbacks import Callbacks, build_callbacks
from disttrain_trainer.checks.model_memory import require_memory_to_build, require_memory_to_train
from disttrain_trainer.choices import multiple_of_lengths, require_fit
from disttrain_trainer.data.ahead import ReadAhead, ahead_of
from disttrain_trainer.data.alike import agree_on_data
from disttrain_trainer.data.batches import Datasets, load_microbatch
from disttrain_trainer.data.loading import Loader
from disttrain_trainer.data.packed import Packed
from disttrain_trainer.data.sampler import Cursor, Sampler
from disttrain_trainer.data.stream import Stream, StreamSampler
from disttrain_trainer.losses import WeightedLoss
from disttrain_trainer.metrics.flops import work_of
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.optim.groups import HIDDEN, STACKED, require_matches
from disttrain_trainer.optim.muon import hidden_matrices
from disttrain_trainer.optim.precision import build_precision
from disttrain_trainer.optim.step_guard import StepGuard
from disttrain_trainer.parallel.activations import offload, recompute, require_layers
from disttrain_trainer.parallel.comm_hooks.attach import attach_gradient_sum
from disttrain_trainer.parallel.context.build import compute_parts, keep_documents_apart
from disttrain_trainer.parallel.data_parallel import replicate
from disttrain_trainer.parallel.devices import spread_over_devices
from disttrain_trainer.parallel.expert import expert_layers, spread_experts, watch_routing
from disttrain_trainer.parallel.float8 import multiply_in_float8
from disttrain_trainer.parallel.layer_order import LayerOrder
from disttrain_trainer.parallel.layers import compile_layers, composes, layers_of
from disttrain_trainer.parallel.local_sgd.build import build_replicas
from disttrain_trainer.parallel.meta import build_on_meta, give_values
from disttrain_trainer.parallel.pipeline.build import build_pipeline
from disttrain_trainer.parallel.shardable import average_whole, left_whole
from disttrain_trainer.parallel.sharded import is_sharded, shard
from disttrain_trainer.parallel.share import require_elements_apart
from disttrain_trainer.parallel.sparse_gradients import require_dense, sparse_embeddings, step_singly, what_takes_none
from disttrain_trainer.parallel.sync_batch_norm import synchronise_batch_norm
from disttrain_trainer.parallel.tensor import share_layers
from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import seed_everything
from disttrain_trainer.state import State
from disttrain_trainer.tasks.base import RunnableTask
from disttrain_trainer.tasks.build import build_task
from disttrain_trainer.tasks.supervised import Supervised

Average = Callable[[nn.Module, World], nn.Module]
"""Makes of a module one whose gradients are averaged over the replicas of a world."""


def build_state(config: Config, world: World) -> State:
    """The State before the first step, alike on every rank but for the random stream.

    Raises InvalidConfiguration, EntrypointNotImportable or DataNotFound.
    """
    training = config.training
    world.device.use_attention(training.attention, training.precision)
    # A task of the user's may draw weights of its own (a teacher's), alike on every rank.
    seed_everything(training.seed)
    task = build_task(training)
    callbacks = build_callbacks(training, world)
    # A split that is drawn holds the same samples out on every rank and in every attempt, whatever was drawn before.
    seed_everything(training.seed)
    data = task.data()
    sampler = build_sampler(data, config, world)
    data = agree_on_data(data, world)
    for note in data.notes:
        log_first_rank(world, note)
    _note_small_data(data, config, world)
    require_memory_to_build(config, world)
    seed_everything(training.seed)
    if config.builds_on_meta:
        module = build_on_meta(task.model)
    else:
        module = task.model().to(world.device.torch)
    require_elements_apart(module)
    _require_vocabulary(data, module)
    for note in (offered(module, "notes_for_log") or list)():
        log_first_rank(world, note)
    if not module.training:
        log_first_rank(
            world,
            "the model comes in evaluation mode, in which it is trained: dropout is off, and running statistics stand "
            "still; where that is not meant, call its `train()` where it is made",
        )
    require_memory_to_train(module, config, world)
    if training.float8 is not None:
        log_first_rank(world, multiply_in_float8(module, training.float8, world.device, world.mesh.tensor))
    return assemble(task, data, sampler, module, config, world, callbacks)


def assemble(
    task: RunnableTask,
    data: Datasets,
    sampler: Sampler,
    module: nn.Module,
    config: Config,
    world: World,
    callbacks: Callbacks | None = None,
    average: Average | None = None,
) -> State:
    """The State of a model that is still whole: what the techniques make of it on this rank, and its optimizer.

    average: see `parallelise`. Raises InvalidConfiguration.
    """
    training = config.training
    if isinstance(task, Supervised) and _needs_one_length(config, world):
        task.fill_up()
    part, documents = None, None
    if world.mesh.context > 1:
        # The rules refuse other tasks (disttrain_api.rules.context).
        assert isinstance(task, Supervised)
        part = compute_parts(module, config, world)
        task.use_context(part)
        for _, sample in _first_samples(data):
            task.collate([sample], [0])
    if data.packed:
        assert isinstance(task, Supervised)
        documents = keep_documents_apart(module, part, config, world)
        task.use_documents(documents)
    if config.job.parallelism.data_parallel.sync_batch_norm:
        module = synchronise_batch_norm(module, world)
    work = work_of(module)
    require_matches(training.optimizer, (name for name, _ in module.named_parameters()))
    hidden = hidden_matrices(module, training.optimizer)
    task.place(world.device.torch, module)
    precision = build_precision(training, world)
    sparse = sparse_embeddings(module)
    loss = task.use_loss_of(module) if isinstance(task, Supervised) else None
    routing = watch_routing(module, world)
    model, pipeline = module, None
    if world.mesh.pipeline > 1:
        # What else a task takes is refused by the rules (disttrain_api.rules.tasks).
        assert loss is not None
        first_inputs = partial(_first_inputs, task, data, sampler, world)
        pipeline = build_pipeline(module, config, world, loss, precision, routing, first_inputs, documents)
    else:
        model = parallelise(module, config, world, loss, average)
        if isinstance(task, Supervised) and compiles_whole(config):
            task.compile_with_model()
    # A model that cannot be cut along the sequence has said so.
    if config.job.parallelism.sequence_parallel:
        _require_even_sequences(data, world.mesh.tensor * world.mesh.context)
    optimizer = task.optimizer(_trained(module, hidden))
    takes_no_sparse = what_takes_none(config, world, optimizer)
    require_dense(sparse, takes_no_sparse)
    if sparse:
        step_singly(optimizer)
    input_multiple = multiple_of_lengths(part, config, world)
    for field, inputs in data.evaluated_inputs:
        assert isinstance(task, Supervised)
        require_fit(field, inputs, module, input_multiple, task.longest_input(field, data))
    # From here on each replica draws its own dropout, and each part of a sequence and of a pipeline.
    seed_everything(training.seed, 1 + world.part + world.parts * world.at["pipeline"])
    return State(
        module=module,
        model=model,
        optimizer=optimizer,
        precision=precision,
        task=task,
        data=data,
        routing=routing,
        sampler=sampler,
        loader=_loader_of(task, data, sampler, config, world),
        average_whole=partial(average_whole, left_whole([model]), world),
        layer_order=LayerOrder.of(model, world),
        gradient_sum=attach_gradient_sum(model, config, world),
        replicas=build_replicas(module, optimizer, config, world),
        work=work,
        offload_activations=training.offload.activations,
        takes_no_sparse_gradient=takes_no_sparse,
        pipeline=pipeline,
        guard=None if training.skip_steps is None else StepGuard(training.skip_steps),
        callbacks=callbacks or Callbacks(),
        input_multiple=input_multiple,
    )


def _trained(module: nn.Module, hidden: frozenset[str]) -> dict[str, nn.Parameter]:
    """The trained parameters by name; marked for the optimizer are stacked experts and the matrices named `hidden`."""
    for layer in expert_layers(module):
        for parameter in layer.experts.parameters():
            setattr(parameter, STACKED, True)
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    for name in hidden & trained.keys():
        setattr(trained[name], HIDDEN, True)
    return trained


def build_sampler(data: Datasets, config: Config, world: World) -> Sampler:
    """The sampler of the data; where they are iterated, this rank's part is opened. Raises InvalidConfiguration."""
    stream = data.training
    if not isinstance(stream, Stream):
        return Sampler(len(stream), config.training.seed, config.batch, world.replicas, data.draws)
    servers = config.job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER
    if servers or world.mesh.pipeline > 1:
        raise InvalidConfiguration(
            f"{stream.place} returned training samples that are iterated, which "
            f"{'parameter servers assign' if servers else 'the stages of a pipeline read'} by their number: use "
            "replicas, shards or tensor groups, or give the samples numbers (__len__ and __getitem__)"
        )
    if world.replicas > 1 and not stream.shards:
        raise InvalidConfiguration(
            f"{stream.place} returned training samples that are iterated, without shard(index, count): the "
            f"{world.replicas} replicas would all train on the same ones"
        )
    sampler = StreamSampler.of(config.batch, world.replicas, config.training.seed)
    stream.open(world.replica, world.replicas, sampler.per_step)
    return sampler


def parallelise(
    module: nn.Module, config: Config, world: World, loss: WeightedLoss | None, average: Average | None = None
) -> nn.Module:
    """The module as it is called in a step: cut, wrapped and copied as the manifest says.

    loss: of the model's outputs; None: a task's own. average: what averages gradients over the replicas where FSDP2
    does not; None: DDP.
    """
    training = config.training
    share_layers(module, config.job.parallelism, world)
    experts = spread_experts(module, config.job.parallelism, world)
    if loss is not None:
        loss.take_over(at_once=True)
    layers = layers_of(module)
    require_layers(module, layers, training.activation_checkpointing)
    # Where the layers are the whole model, the last one's backward pass comes at once: no use in computing it anew.
    recompute(layers[:-1] if composes(module) and len(layers) > 1 else layers, training.activation_checkpointing)
    if training.compile:
        compile_layers(layers or [module])
    if is_sharded(training, world):
        model = shard(module, layers, training, world, experts, in_turn=composes(module))
        give_values(module, config, world)
        return model
    give_values(module, config, world)
    # Hooks on what is kept are a thread's, and each device has its own.
    around = partial(offload, world.device.torch, training.offload.activations)
    spread = spread_over_devices(module, config.job.parallelism, world, around)
    if computes_whole(config, world):
        (offered(module, "join_products") or list)()
    settings = config.job.parallelism.data_parallel
    # Replicas that train alone send no gradients.
    if settings.relaxed is not None:
        return spread
    return replicate(spread, world, settings.static_graph) if average is None else average(spread, world)


def computes_whole(config: Config, world: World) -> bool:
    """Whether the CPU of this rank computes all layers, with weights that are as the model has made them.

    One product of several weights side by side, which are copied for it, is there faster than several products. Where
    weights are gathered for a layer alone, the copy would last until its backward pass.
    """
    parallelism = config.job.parallelism
    return (
        world.device.computes_on_host
        and world.mesh.tensor == 1
        and (parallelism.devices_per_process or 1) == 1
        and parallelism.data_parallel.mode is DataParallelMode.ALL_REDUCE
        and config.training.float8 is None
    )


def compiles_whole(config: Config) -> bool:
    """Whether a step's model and loss are compiled as one, and not layer by layer.

    What a layer writes for the next one, and the logits for the loss, then need not be kept. Not where something
    happens between layers: recomputation, offloading, ranks that send gradients or fetch parameters meanwhile, several
    devices.
    """
    training, parallelism = config.training, config.job.parallelism
    between = (
        training.activation_checkpointing is not ActivationCheckpointing.NONE
        or training.offload.activations
        or training.offload.parameters
        or (parallelism.devices_per_process or 1) > 1
        or parallelism.data_parallel.mode is not DataParallelMode.ALL_REDUCE
    )
    return training.compile and config.world_size == 1 and not between


def _loader_of(
    task: RunnableTask, data: Datasets, sampler: Sampler, config: Config, world: World
) -> Loader | ReadAhead | None:
    """Return what reads ahead: processes, where the manifest asks for them. Raises InvalidConfiguration."""
    workers = config.training.data_workers
    if not workers:
        return ahead_of(task, data.training, sampler, world.replica)
    if isinstance(data.training, Stream):
        raise InvalidConfiguration(
            f"`training.dataWorkers`: {data.training.place} returned training samples that are iterated, whose "
            "position is this rank's: remove it, or give the samples numbers (__len__ and __getitem__)"
        )
    return Loader(task, data.training, sampler, world.replica, workers)


def _first_inputs(task: RunnableTask, data: Datasets, sampler: Sampler, world: World) -> Tensor:
    """Inputs of the first microbatch."""
    slots = sampler.microbatches(Cursor(), world.replica)[0]
    return load_microbatch(task, data.training, slots, world.device.torch).inputs


def _require_vocabulary(data: Datasets, model: nn.Module) -> None:
    """Raise InvalidConfiguration where the corpus has tokens that the model does not take, as far as it says which.

    They would end a GPU's process without a word.
    """
    size_of = offered(model, "vocabulary_size")
    if data.vocabulary is None or size_of is None:
        return
    if (size := size_of()) < data.vocabulary:
        raise InvalidConfiguration(
            f"`training.model`: its vocabulary of {size} must be greater than or equal to that of the corpus, which "
            f"is {data.vocabulary}"
        )


def _note_small_data(data: Datasets, config: Config, world: World) -> None:
    """Say where a global batch holds more samples than there are: each step is then a whole epoch."""
    if data.size is not None and config.batch.world > data.size:
        log_first_rank(
            world,
            f"globalBatchSize {config.batch.world} is larger than the data, which has {data.size} training"
            " samples: each step uses all of them once, and ranks may be without work",
        )


def _needs_one_length(config: Config, world: World) -> bool:
    """Whether all batches must be of one length: stages of a pipeline pass tensors of one size on, and parts of
    sequences are of one size."""
    cut = world.mesh.pipeline > 1 or world.mesh.context > 1
    return cut or bool(config.job.parallelism.sequence_parallel)


def _require_even_sequences(data: Datasets, degree: int) -> None:
    """Parts of unlike lengths: ranks would wait for different numbers of bytes, and the backend ends the process."""
    for kind, (inputs, _) in _first_samples(data):
        length = data.longest or (len(inputs) if isinstance(inputs, Tensor) and inputs.ndim else 0)
        if length % degree:
            raise InvalidConfiguration(
                f"`parallelism.sequenceParallel`: the {kind} sequences of `training.data` are {length} long, which must"
                f" be a multiple of `tensorParallelDegree` x `contextParallelDegree`, which is {degree}"
            )


def _first_samples(data: Datasets) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield a sample of each kind of data; what is no pair, the first batch says."""
    held_out = data.held_out[0] if data.held_out is not None and len(data.held_out) else None
    for kind, first in (("training", data.first_sample), ("held-out", held_out)):
        if isinstance(first, Packed) or (isinstance(first, tuple | list) and len(first) == 2):
            yield kind, (first[0], first[1])
