"""A rank whose functional collectives of tensors on the CPU are ours, as they are on a GPU that ranks share.

With CASES it then runs those (cases.py); else it compares every operation with torch's own. See
test_host_collectives.py.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from disttrain_trainer.runtime import host_collectives
from tests.unit.trainer import cases


def torchs_own(name: str) -> Any:
    """torch's kernel itself: to call the operation would end in ours again, as both are for the CPU here."""
    operation = host_collectives.operation(name)

    def call(*arguments: Any, **options: Any) -> Any:
        called.add(name)
        return operation._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *arguments, **options)

    return call


called: set[str] = set()


def own(rank: int, number: int = 0) -> torch.Tensor:
    """What a rank brings along: [4, 3], different from rank to rank."""
    return torch.arange(12.0).view(4, 3) * (rank + 1) + number


def given(name: str, rank: int, ranks: int, group: str) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of an operation, new ones in each call."""
    several = "coalesced" in name
    tensors = [own(rank), own(rank, 5)] if several else own(rank)
    kind = name.rstrip("_").removesuffix("_out").removesuffix("_coalesced")
    if kind == "all_reduce":
        return [tensors, "sum", group], {}
    if kind == "broadcast":
        return [tensors, 1, group], {}
    if kind == "all_to_all_single":
        # Rank 0 keeps one row and gives three, rank 1 gives two and keeps two.
        sent = [1, 3] if rank == 0 else [2, 2]
        received = [1, 2] if rank == 0 else [3, 2]
        return [tensors, received, sent, group], {}
    into = {"out": torch.zeros(8, 3)} if "gather" in kind else {"out": torch.zeros(2, 3)}
    arguments = [tensors, ranks, group] if "gather" in kind else [tensors, "sum", ranks, group]
    return arguments, into if name.endswith("_out") else {}


def listed(values: Any) -> list[torch.Tensor]:
    return [values] if isinstance(values, torch.Tensor) else list(values)


def compare() -> dict[str, Any]:
    """For each operation: what torch's own and ours give, and whether ours gave back what it was to write into."""
    group = dist.group.WORLD
    assert group is not None
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = {}
    for name in host_collectives.OPERATIONS:
        results = []
        for call in (torchs_own(name), host_collectives.operation(name)):
            arguments, options = given(name, rank, ranks, group.group_name)
            result = host_collectives.wait(call(*arguments, **options))
            places = listed(options["out"] if options else arguments[0])
            same = [one is other for one, other in zip(listed(result), places, strict=False)]
            results.append((listed(result), listed(arguments[0]), same))
        found[name] = results
    return found


def main() -> None:
    host_collectives.use_host_for_collectives("CPU", torchs_own)
    if "CASES" in os.environ:
        exiting = os._exit

        def leave(code: int) -> None:
            (Path(os.environ["CASES"]) / f"called-{os.environ['RANK']}.json").write_text(json.dumps(sorted(called)))
            exiting(code)

        os._exit = leave  # type: ignore[assignment]
        cases.main()
    dist.init_process_group("gloo")
    torch.save(compare(), Path(os.environ["RESULTS"], f"{dist.get_rank()}.pt"))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
