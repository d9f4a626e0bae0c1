"""Pairs of ranks that exchange in rounds, each with a deadline: a link that swallows what it is given says nothing.

Small messages often pass such a link, whose large ones are lost somewhere between. So ranks meet after each turn, and
tell of silence, through the store.
"""

from __future__ import annotations

import math
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_trainer.checks.collectives.expected import source
from disttrain_trainer.checks.preflight.judge import Transfer, rounds
from disttrain_trainer.runtime.mesh import World

_TRIES = 3
ANSWER_SECONDS = 60.0
"""For one exchange; the first one on a GPU makes the connection, too."""
_SILENT = "disttrain/preflight/silent"


def exchange_in_rounds(world: World, numbers: int) -> tuple[list[Transfer], list[Transfer]]:
    """Return what this rank received from its partner of each round, FP32 [numbers] each; and, on every rank, what no
    rank received in time.

    The first silence ends it, and no later call may rely on the process group: gloo and NCCL give all transfers up with
    one.
    """
    own = source(world.rank, numbers, torch.float32).to(world.device.channel)
    found: list[Transfer] = []
    for number, partners in enumerate(rounds(world.size)):
        partner, times = partners[world.rank], []
        received = torch.full_like(own, -1)
        # All meet after each try: nobody waits for who is still at another, nor for who has given up.
        for turn in range(1 + _TRIES):
            if partner is not None:
                times.append(_exchange(own, received, partner, world))
            _meet(world, f"round {number}, turn {turn}")
            if silent := _silent(world):
                return found, silent
        if partner is not None:
            wrong = int((received.cpu() != source(partner, numbers, torch.float32)).sum())
            # The first one makes the connection.
            found.append(Transfer(partner, world.rank, wrong, own.nbytes / min(times[1:])))
    return found, []


def _exchange(own: Tensor, received: Tensor, partner: int, world: World) -> float:
    """Seconds for both directions at once; inf where nothing comes in time, of which it tells."""
    transfers = [dist.P2POp(dist.isend, own, partner), dist.P2POp(dist.irecv, received, partner)]
    begin = time.perf_counter()
    try:
        for work in dist.batch_isend_irecv(transfers):
            work.wait(timedelta(seconds=ANSWER_SECONDS))
        world.device.synchronize()
    except (dist.DistError, RuntimeError):
        world.store.set(f"{_SILENT}/{world.store.add(_SILENT, 1)}", f"{partner} {world.rank}")
        return math.inf
    return time.perf_counter() - begin


def _meet(world: World, where: str) -> None:
    """Wait until all ranks are there, through the store alone."""
    arrived = f"disttrain/preflight/{where}"
    if world.store.add(arrived, 1) == world.size:
        world.store.set(f"{arrived}/all", "")
    # Others may need all their time, in each direction.
    world.store.wait([f"{arrived}/all"], timedelta(seconds=3 * ANSWER_SECONDS))


def _silent(world: World) -> list[Transfer]:
    count = world.store.add(_SILENT, 0)
    entries = [world.store.get(f"{_SILENT}/{number}").split() for number in range(1, count + 1)]
    return sorted((Transfer(int(sender), int(receiver), wrong=1) for sender, receiver in entries), key=_ends)


def _ends(transfer: Transfer) -> tuple[int, int]:
    return transfer.sender, transfer.receiver
