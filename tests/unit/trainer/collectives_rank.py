"""A rank that checks collectives; the one in CORRUPT sends another number in place 3 of whatever it gives, the one in
FAILING fails before it gives anything."""

import os
from pathlib import Path

import torch

from disttrain_trainer.checks.collectives import __main__ as program
from disttrain_trainer.checks.collectives import operations
from disttrain_trainer.checks.collectives.plan import NumberFormat, Plan

PLAN = Plan(
    sizes=(64, 4096), groups=("world", "::2", "3+1+2"), number_format=NumberFormat.INT32, iterations=2, warmup=1
)


def main() -> None:
    if os.environ["RANK"] == os.environ.get("CORRUPT"):
        right = operations.given

        def wrong(*arguments: object) -> torch.Tensor | None:
            own = right(*arguments)
            if own is not None:
                own[3] += 1
            return own

        operations.given = wrong
    if os.environ["RANK"] == os.environ.get("FAILING"):

        def fails(*arguments: object) -> torch.Tensor | None:
            raise RuntimeError("no memory is left")

        operations.given = fails
    if "LOGS" in os.environ:
        os.environ["DISTTRAIN_TERMINATION_LOG"] = os.environ["LOGS"].format(os.environ["RANK"])
    code = program.main(PLAN, os.environ["RESULTS"])
    Path(os.environ["RESULTS"] + os.environ["RANK"]).touch()
    os._exit(code)


if __name__ == "__main__":
    main()
