"""Small collectives over the world before training: an all-reduce, an all-to-all, and pairs that exchange in rounds."""

import time

import torch
import torch.distributed as dist
from torch import Tensor

from disttrain_api.collectives import Operation
from disttrain_trainer.checks.collectives.expected import expected
from disttrain_trainer.checks.collectives.operations import Call
from disttrain_trainer.checks.collectives.results import ranges
from disttrain_trainer.checks.preflight.judge import SLOW_FACTOR, SlowNode, Transfer, faulty_nodes, slow_nodes
from disttrain_trainer.checks.preflight.pairs import ANSWER_SECONDS, exchange_in_rounds
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.errors import NetworkFaulty, PeerLost, TrainerError
from disttrain_trainer.runtime.mesh import World

_GB = 1e9
_SHOWN = 3


def check_network(node: str, world: World) -> None:
    """Look at the world's network; `node` is the name of this rank's machine. All ranks call it together.

    Raises NetworkFaulty on the ranks of nodes that give or take wrong data or none, PeerLost, which names those, on the
    others.
    """
    if world.size == 1:
        log_first_rank(world, "preflight: one rank has no network to check")
        return
    nodes = world.gather(node, str)
    begin = time.monotonic()
    # Pairs first, which tell a link that swallows everything from one that is slow: what follows would hang on it.
    pairs, silent = exchange_in_rounds(world, _numbers(world))
    refuse_silent(silent, nodes, world.rank)
    sums_wrong = world.gather(_all_reduce(world), int)
    found = world.gather([*_all_to_all(world), *pairs], list[Transfer])
    transfers = [one for of_rank in found for one in of_rank]
    refuse_wrong(transfers, sums_wrong, nodes, world.rank)
    for slow in slow_nodes(transfers, nodes):
        log_first_rank(world, slow_node_message(slow))
    seconds, count = time.monotonic() - begin, len(set(nodes))
    places = "1 node" if count == 1 else f"{count} nodes"
    log_first_rank(world, f"preflight: data are right between {world.size} ranks on {places} ({seconds:.1f} s)")


def refuse_wrong(transfers: list[Transfer], sums_wrong: list[int], nodes: list[str], rank: int) -> None:
    """Raises as `check_network`. sums_wrong: elements of each rank's all-reduce that are wrong; nodes: of each rank."""
    wrong = [one for one in transfers if one.wrong]
    if not wrong and not any(sums_wrong):
        return
    # A wrong sum reaches everybody: only where all transfers are right does it say something about who holds it.
    named = faulty_nodes(wrong, nodes) or sorted({nodes[at] for at, count in enumerate(sums_wrong) if count})
    raise _fault(named, _evidence(wrong, sums_wrong), nodes, rank)


def refuse_silent(silent: list[Transfer], nodes: list[str], rank: int) -> None:
    """Raises as `check_network`. silent: transfers that did not arrive in time; nodes: of each rank."""
    if silent:
        evidence = f"nothing arrives within {ANSWER_SECONDS:g} s ({_links(silent)})"
        raise _fault(faulty_nodes(silent, nodes), evidence, nodes, rank)


def _fault(named: list[str], evidence: str, nodes: list[str], rank: int) -> TrainerError:
    """Return the error of this rank; every rank computes the same verdict."""
    text = (
        f"preflight: {' and '.join(_with_ranks(node, nodes) for node in named)}: {evidence}; "
        f"keep the job off {'this node' if len(named) == 1 else 'these nodes'} and have the network checked"
    )
    error = NetworkFaulty(text) if nodes[rank] in named else PeerLost(text)
    error.on_every_rank = True
    return error


def slow_node_message(slow: SlowNode) -> str:
    """The log line of a slow node."""
    return (
        f"preflight: node {slow.name} is slow: {slow.bandwidth / _GB:.3f} GB/s with other nodes, less than "
        f"1/{SLOW_FACTOR:g} of the others' {slow.others / _GB:.3f} GB/s; every step will wait for it"
    )


def _with_ranks(node: str, nodes: list[str]) -> str:
    return f"node {node} ({_ranks([rank for rank, name in enumerate(nodes) if name == node])})"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}"


def _evidence(wrong: list[Transfer], sums_wrong: list[int]) -> str:
    if not wrong:
        ranks = _ranks([rank for rank, count in enumerate(sums_wrong) if count])
        return f"all-reduce gives wrong sums on {ranks}, although data arrive as they were sent"
    return f"data do not arrive as they were sent ({_links(wrong)})"


def _links(transfers: list[Transfer]) -> str:
    # A pair may have met twice: in the all-to-all and in a round.
    links = list(dict.fromkeys(f"rank {one.sender} to {one.receiver}" for one in transfers))
    more = f" and {len(links) - _SHOWN} more" if len(links) > _SHOWN else ""
    return f"{', '.join(links[:_SHOWN])}{more}"


def _all_reduce(world: World) -> int:
    """Elements of this rank's sum that are wrong."""
    call, must = _call(Operation.ALL_REDUCE, world)
    call()
    return int((call.received.cpu() != must).sum())


def _all_to_all(world: World) -> list[Transfer]:
    """Return only the wrong transfers: with thousands of ranks the correct ones are too many to report."""
    call, must = _call(Operation.ALL_TO_ALL, world)
    call()
    wrong = (call.received.cpu() != must).view(world.size, -1).sum(1).tolist()
    return [Transfer(sender, world.rank, count) for sender, count in enumerate(wrong) if count]


def _call(operation: Operation, world: World) -> tuple[Call, Tensor]:
    """The operation over the world, and what this rank must then hold."""
    assert dist.group.WORLD is not None
    numbers = max(_numbers(world) // world.size, 1) * world.size
    must = expected(operation, world.rank, world.size, numbers, torch.float32)
    assert must is not None
    return Call(operation, dist.group.WORLD, numbers, torch.float32, world.device.torch), must


def _numbers(world: World) -> int:
    """Return how many numbers the largest message has."""
    return world.device.message_bytes // torch.float32.itemsize
