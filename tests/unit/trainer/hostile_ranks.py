"""Two ranks of which the last sends what runs code where it is unpickled, or is no value at all; see
test_json_collectives.py. Rank 0 prints how what it called has ended.
"""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from disttrain_trainer.checkpoint import plans as checkpoint_plans
from disttrain_trainer.checkpoint.step_manifest import StepManifest
from disttrain_trainer.checkpoint.step_writer import StepWriter
from disttrain_trainer.runtime import json_collectives
from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.json_collectives import MAX_BYTES
from disttrain_trainer.runtime.mesh import World, join_world

FOLDER = Path(os.environ["DISTTRAIN_CONFIG"]).parent


class Evil:
    """Unpickled, it makes a file."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch {FOLDER}/code-has-run",)


def send_bytes(data: bytes, size: int | None = None) -> None:
    """What a rank sends in an all-gather of values, by hand."""
    ranks = dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(data) if size is None else size]))
    longest = max(int(one) for one in sizes)
    if longest <= MAX_BYTES:
        own = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(own) for _ in range(ranks)], own)


def gather_little(world: World) -> None:
    """What a rank does that has room for a thousand bytes of all ranks together."""
    json_collectives.MAX_BYTES_OF_ALL = 1000
    world.gather(1, int)


def gather_little_here(world: World) -> None:
    """What the first rank does that has room for a thousand bytes that others send to it alone."""
    json_collectives.MAX_BYTES_OF_ALL = 1000
    json_collectives.gather(1, int)


def send_plan(data: bytes) -> None:
    """What a rank sends where rank 0 gathers the plans of a checkpoint."""
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(data)]))
    dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), 0)


def save() -> None:
    """Write a checkpoint, as the trainer does."""
    manifest = StepManifest(step=1, attempt=1, world_size=dist.get_world_size(), mesh={})
    checkpoint_plans.save({"model": {"w": torch.ones(3)}}, StepWriter(FOLDER / "step-1", manifest), None)


ATTACKS: dict[str, tuple[Callable[[World], object], Callable[[], object]]] = {
    "an object": (
        lambda world: dist.all_gather_object([None] * world.size, 1),
        lambda: dist.all_gather_object([None] * dist.get_world_size(), Evil()),
    ),
    "a pickle": (lambda world: world.gather(1, int), lambda: send_bytes(pickle.dumps(Evil()))),
    "another type": (lambda world: world.gather(1, int), lambda: send_bytes(b'{"a": [1, 2]}')),
    "a deep value": (lambda world: world.gather([], list), lambda: send_bytes(b"[" * 100_000)),
    "a length": (lambda world: world.gather(1, int), lambda: send_bytes(b"1", 2**40)),
    "a large share": (gather_little, lambda: send_bytes(b"1".ljust(600))),
    "a large share for the first": (gather_little_here, lambda: send_plan(b"1".ljust(1001))),
    "a negative length": (lambda world: world.gather(1, int), lambda: send_bytes(b"1", -1)),
    "a plan": (lambda world: save(), lambda: send_plan(pickle.dumps((None, Evil())))),
}


def main() -> None:
    config = read_config()
    world = join_world(config, find_device(config.local_rank, config.local_world_size, threads_given=True))
    victim, attack = ATTACKS[os.environ["ATTACK"]]
    try:
        victim(world) if world.first else attack()
        found = "nothing"
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
    if world.first:
        print(found, flush=True)
    world.leave()
    os._exit(0)


if __name__ == "__main__":
    main()
