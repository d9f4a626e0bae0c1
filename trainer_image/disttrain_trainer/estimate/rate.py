"""`python -m disttrain_trainer.estimate.rate RESULT`: FLOP/s of this machine's processor, as JSON in a file."""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

SIZE, REPEATS = 768, 9


def matmul_flops(dtype: torch.dtype) -> float:
    """Return the median FLOP/s of products of two square matrices, with as many threads as torch has."""
    one, other = (torch.randn(SIZE, SIZE).to(dtype) for _ in range(2))
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        torch.mm(one, other)
        seconds.append(time.perf_counter() - begin)
    return 2 * SIZE**3 / statistics.median(seconds)


def main() -> int:
    """Measure, and write the number."""
    parser = argparse.ArgumentParser()
    parser.add_argument("result", type=Path)
    parser.add_argument("--format", default="float32")
    parser.add_argument("--threads", type=int, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    given.result.write_text(json.dumps(matmul_flops(getattr(torch, given.format))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
