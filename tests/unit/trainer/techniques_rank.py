"""A rank that watches itself compute one step by each of some techniques; see test_techniques.py."""

import os
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from disttrain_trainer.build import build_state
from disttrain_trainer.parallel import activations, sharded
from disttrain_trainer.parallel.pipeline.clock import StageClock
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import World, join_world
from disttrain_trainer.step import accumulate_gradients, load_step
from tests.unit.trainer.cases import config_of, in_layout
from tests.unit.trainer.worlds import small, user

GPT = small(
    model=user("double_gpt", double=False),
    data=user("double_tokens"),
    optimizer={"name": "SGD", "learningRate": 0.1},
    globalBatchSize=4,
)
SHARDED = {"dataParallelShardDegree": 2}
TENSOR = {"tensorParallelDegree": 2}
MICROBATCHES = 4

# Changes of the training, parallelism.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "recomputed": ({"activationCheckpointing": "Full"}, {}),
    "recomputed selectively": ({"activationCheckpointing": "Selective"}, {}),
    "activations offloaded": ({"offload": {"activations": True}}, {}),
    "BF16": ({"precision": "BF16"}, {}),
    "static graph": ({}, {"dataParallel": {"staticGraph": True}}),
    "compiled": ({"compile": True}, {}),
    "sharded": ({}, SHARDED),
    "sharded, BF16": ({"precision": "BF16"}, SHARDED),
    "sharded, parameters offloaded": ({"offload": {"parameters": True}}, SHARDED),
    "tensor": ({}, TENSOR),
    "tensor, sequence": ({}, {**TENSOR, "sequenceParallel": True}),
    "tensor, vocabulary": ({}, {**TENSOR, "vocabularyParallel": True}),
    # Its first rank has the loss.
    "pipeline": (
        {},
        {"pipelineParallelDegree": 2, "pipeline": {"schedule": "ZBVZeroBubble", "microbatches": MICROBATCHES}},
    ),
}

OF_FOUR_RANKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    f"pipeline of shards, {count} microbatches": (
        {"globalBatchSize": 2 * count},
        {**SHARDED, "pipelineParallelDegree": 2, "pipeline": {"microbatches": count}},
    )
    for count in (2, 8)
} | {
    f"hybrid shards, {count} microbatches": (
        {"globalBatchSize": 4 * count, "gradientAccumulationSteps": count},
        {**SHARDED, "dataParallelReplicateDegree": 2},
    )
    for count in (1, 4)
}


class Operators(TorchDispatchMode):
    """Counts what runs inside, in the forward and in the backward pass, by operator and format of its first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[tuple[str, torch.dtype | None]] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        formats = [value.dtype for value in tensors_in(arguments)]
        self.counts[str(operator), formats[0] if formats else None] += 1
        return operator(*arguments, **(options or {}))


def tensors_in(arguments: Any) -> list[Tensor]:
    """All tensors of nested arguments, in order."""
    if isinstance(arguments, Tensor):
        return [arguments]
    return [one for inner in arguments for one in tensors_in(inner)] if isinstance(arguments, list | tuple) else []


class Kept(save_on_cpu):
    """Notes what is taken to the host and what comes back."""

    moves: Counter[str] = Counter()

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        pack, unpack = self.pack_hook, self.unpack_hook

        def there(value: Tensor) -> Any:
            self.moves["there"] += 1
            return pack(value)

        def back(value: Any) -> Tensor:
            self.moves["back"] += 1
            return unpack(value)

        self.pack_hook, self.unpack_hook = there, back


def formats_of(values: list[Tensor | None]) -> set[torch.dtype]:
    return {value.dtype for value in values if value is not None}


def compiler(graphs: list[set[str]]) -> Any:
    """Notes what it is given to compile, and leaves it as it is: what compiled code computes, others look at."""

    def graph_of(_: object, graph: torch.fx.GraphModule, __: object) -> torch.fx.GraphModule:
        graphs.append({str(getattr(node.target, "__name__", node.target)) for node in graph.graph.nodes})
        return graph

    return graph_of


def observe(config: Any, world: World) -> dict[str, Any]:
    """What there is to see of one step."""
    sizes: list[tuple[int, ...]] = []
    outputs: list[Tensor] = []
    graphs: list[set[str]] = []

    Kept.moves.clear()
    operators = Operators()
    with (
        mock.patch.object(activations, "save_on_cpu", Kept),
        mock.patch.object(sharded, "fully_shard", wraps=sharded.fully_shard) as shard,
        mock.patch.object(torch._TorchCompileInductorWrapper, "__call__", compiler(graphs)),
        mock.patch.object(StageClock, "prolong_forward", autospec=True, side_effect=StageClock.prolong_forward) as loss,
    ):
        state = build_state(config, world)
        watch(state.module.layers(), sizes, outputs)
        # torch compiles nothing that is watched so.
        with nullcontext() if config.training.compile else operators:
            accumulate_gradients(state, load_step(state, world, state.cursor), 1.0, 1.0, world.replicas)
    return {
        "operators": operators.counts,
        "kept": dict(Kept.moves),
        "sizes": sizes,
        "outputs": outputs[0] if outputs else None,
        "graphs": graphs,
        "timed losses": loss.call_count,
        "static graph": getattr(state.model, "static_graph", None),
        "policies": [type(call.kwargs["offload_policy"]).__name__ for call in shard.call_args_list],
        "parameters": formats_of(state.parameters),
        "gradients": formats_of([parameter.grad for parameter in state.parameters]),
    }


def watch(layers: list[nn.Module], sizes: list[tuple[int, ...]], outputs: list[Tensor]) -> None:
    """Note the sizes of what leaves each layer on this rank, and what leaves the last."""

    def note(layer: nn.Module, _: object, value: Tensor) -> None:
        local = value.to_local() if isinstance(value, DTensor) else value
        sizes.append(tuple(local.shape))
        if layer is layers[-1]:
            outputs.append(local.detach().clone())

    for layer in layers:
        layer.register_forward_hook(note)


def main() -> None:
    folder = Path(os.environ["RESULTS"])
    first = config_of(folder, {"training": small()}, 1)
    world = join_world(first, find_device(first.rank, first.world_size, threads_given=True))
    results = {}
    for name, (changes, parallelism) in (CASES if world.size == 2 else OF_FOUR_RANKS).items():
        config = config_of(folder, {"training": GPT | changes, "parallelism": parallelism}, 1)
        results[name] = observe(config, in_layout(world, config))
    if world.first:
        torch.save(results, folder / "results.pt")
    world.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
