"""A trainer on a node of its own whose rank 1 is wrong in what WRONG names: its "transfers", its "sums", its "pace"; or
that swallows what it is to send, after SOUND exchanges: "silence"."""

import os
import runpy
import time
from itertools import count

import torch
import torch.distributed as dist

from disttrain_trainer.checks.preflight import check
from disttrain_trainer.checks.preflight import pairs as pairs_check


def corrupt(tensor: torch.Tensor) -> None:
    tensor.view(-1)[3] += 1


def main() -> None:
    if os.environ["WRONG"] == "silence":
        check.ANSWER_SECONDS = pairs_check.ANSWER_SECONDS = 10.0
    os.environ["DISTTRAIN_NODE_NAME"] = f"node-{os.environ['RANK']}"
    if os.environ["RANK"] == "1":
        pairs, everybody, sums = dist.batch_isend_irecv, dist.all_to_all_single, dist.all_reduce

        def batch_isend_irecv(transfers: list[dist.P2POp]) -> list[dist.Work]:
            for transfer in transfers:
                if transfer.op is dist.isend:
                    corrupt(transfer.tensor)
            return pairs(transfers)

        def all_to_all_single(output: torch.Tensor, input_: torch.Tensor, **options: object) -> object:
            # In the block that goes to rank 0.
            corrupt(input_)
            return everybody(output, input_, **options)

        def all_reduce(tensor: torch.Tensor, *arguments: object, **options: object) -> object:
            done = sums(tensor, *arguments, **options)
            if tensor.numel() > 1000:
                corrupt(tensor)
            return done

        def late(transfers: list[dist.P2POp]) -> list[dist.Work]:
            time.sleep(0.5)
            return pairs(transfers)

        exchanges = count()

        def swallowed(transfers: list[dist.P2POp]) -> list[dist.Work]:
            if next(exchanges) < int(os.environ.get("SOUND", "0")):
                return pairs(transfers)
            return pairs([transfer for transfer in transfers if transfer.op is not dist.isend])

        if os.environ["WRONG"] == "silence":
            dist.batch_isend_irecv = swallowed
        elif os.environ["WRONG"] == "pace":
            dist.batch_isend_irecv = late
        elif os.environ["WRONG"] == "transfers":
            dist.batch_isend_irecv, dist.all_to_all_single = batch_isend_irecv, all_to_all_single
        elif os.environ["WRONG"] == "sums":
            dist.all_reduce = all_reduce
    runpy.run_module("disttrain_trainer", run_name="__main__")


if __name__ == "__main__":
    main()
