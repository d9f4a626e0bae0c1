"""All arithmetic between degrees, world size, ranks and coordinates. Nothing else in the project computes a rank.

Order of the axes, outermost first: pipeline, replicate, shard, context, tensor (torchtitan's order), so that the ranks
that talk most are neighbours. Experts are carved out of shard x context x tensor and are no axis of their own.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from disttrain_api.errors import LayoutError
from disttrain_api.parallelism import GroupReduce, Parallelism

AXES = ("pipeline", "replicate", "shard", "context", "tensor")
_SHORT = {"pipeline": "pp", "replicate": "dp", "shard": "fsdp", "context": "cp", "tensor": "tp", "expert": "ep"}


@dataclass(frozen=True)
class Mesh:
    """Degrees along each axis; their product is the world size."""

    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1
    """Ranks that the experts are spread over; no axis, but a part of shard x context x tensor."""

    @classmethod
    def of(cls, parallelism: Parallelism, world_size: int) -> "Mesh":
        """The mesh of `parallelism` over `world_size` ranks.

        An absent replicate degree is what the other degrees leave of the world size.
        Raises LayoutError, with the numbers, where the product cannot equal the world size.
        """
        others = {
            "pipeline": parallelism.pipeline_parallel_degree or 1,
            "shard": parallelism.data_parallel_shard_degree or 1,
            "context": parallelism.context_parallel_degree or 1,
            "tensor": parallelism.tensor_parallel_degree or 1,
        }
        rest = prod(others.values())
        replicate = parallelism.data_parallel_replicate_degree
        if replicate is None:
            if world_size % rest:
                raise LayoutError(
                    f"world size {world_size} must be a multiple of the product of the degrees, which is {rest}"
                )
            replicate = world_size // rest
        if replicate * rest != world_size:
            raise LayoutError(
                f"world size {world_size} must equal the product of the degrees, which is {replicate * rest}"
            )
        expert = parallelism.expert_parallel_degree or 1
        if others["shard"] * others["context"] * others["tensor"] % expert:
            raise LayoutError(f"the expert degree {expert} must divide shard x context x tensor")
        return cls(replicate=replicate, expert=expert, **others)

    @classmethod
    def of_group(cls, parallelism: Parallelism, ranks_per_pod: int) -> "Mesh":
        """The mesh of the ranks that are one worker of parameter servers together: those of a pod, or one alone.

        Raises LayoutError where the ranks that share a model reach beyond a pod.
        """
        settings = parallelism.data_parallel.parameter_server
        if settings is None or settings.group_reduce is not GroupReduce.WITHIN_GROUP:
            return cls()
        return cls.of(parallelism.model_copy(update={"data_parallel_replicate_degree": None}), ranks_per_pod)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees in the order of AXES."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.degrees)

    @property
    def data_parallel(self) -> int:
        """Number of different parts that a global batch is cut into."""
        return self.replicate * self.shard

    @property
    def parts(self) -> int:
        """Number of ranks with different tokens of a global batch, whose gradients are averaged."""
        return self.data_parallel * self.context

    @property
    def of_parameters(self) -> "Mesh":
        """The same ranks as parameters and gradients see them: those of a context group are shards as others are, or
        replicas where nothing is sharded."""
        axis = "shard" if self.shard > 1 else "replicate"
        return replace(self, context=1, **{axis: getattr(self, axis) * self.context})

    @property
    def expert_shard(self) -> int:
        """Ranks of a shard x context x tensor block that hold the same experts, and so can cut them up further."""
        return self.shard * self.context * self.tensor // self.expert

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index along each axis of a global rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not in a world of {self.world_size} ranks")
        indices: dict[str, int] = {}
        for axis in reversed(AXES):
            rank, indices[axis] = divmod(rank, getattr(self, axis))
        return {axis: indices[axis] for axis in AXES}

    def rank(self, **indices: int) -> int:
        """Global rank at the given index of each axis; an axis left out has index 0."""
        rank = 0
        for axis in AXES:
            rank = rank * getattr(self, axis) + indices.get(axis, 0)
        return rank

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """The groups of ranks that differ along `axis` only."""
        grouped: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            key = tuple(index for name, index in self.coordinates(rank).items() if name != axis)
            grouped.setdefault(key, []).append(rank)
        return tuple(tuple(ranks) for ranks in grouped.values())

    def part(self, rank: int) -> tuple[tuple[str, int], ...]:
        """The part of the model's state that a rank holds: its index along each axis that cuts the model. Ranks with
        the same part are replicas of each other; () is the whole model."""
        cuts = {"pipeline", "shard", "tensor"}
        if self.shard > 1 or self.expert > 1:
            cuts.add("context")
        return tuple(
            (axis, index) for axis, index in self.coordinates(rank).items() if axis in cuts and getattr(self, axis) > 1
        )

    def pods_together(self, ranks_per_pod: int) -> tuple[int, ...]:
        """A number for each pod: pods that share a tensor, context or pipeline group have the same one, the first is 0.

        Where no such group reaches beyond a pod, all pods have number 0: the whole job is one group.
        """
        return _pods_together(self, ranks_per_pod)

    def describe(self) -> str:
        """For the MESH column: "pp2 x dp8"; "dp1" for a single rank."""
        parts = [f"{_SHORT[axis]}{getattr(self, axis)}" for axis in _SHORT if getattr(self, axis) > 1]
        return " x ".join(parts) or "dp1"


@lru_cache(maxsize=128)
def _pods_together(mesh: Mesh, ranks_per_pod: int) -> tuple[int, ...]:
    pods = mesh.world_size // ranks_per_pod
    leader = list(range(pods))

    def leader_of(pod: int) -> int:
        while leader[pod] != pod:
            leader[pod] = pod = leader[leader[pod]]
        return pod

    for axis in ("tensor", "context", "pipeline"):
        for ranks in mesh.groups(axis) if getattr(mesh, axis) > 1 else ():
            first, *others = sorted({leader_of(rank // ranks_per_pod) for rank in ranks})
            for pod in others:
                leader[pod] = first
    leaders = [leader_of(pod) for pod in range(pods)]
    if len(set(leaders)) == pods:
        return (0,) * pods
    numbers = {pod: number for number, pod in enumerate(dict.fromkeys(leaders))}
    return tuple(numbers[pod] for pod in leaders)
