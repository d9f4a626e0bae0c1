"""Random numbers of a test run, which can be had again."""

import os
import random

SEED = "DISTTRAIN_SEED"


def chance() -> random.Random:
    """Random numbers of this test run; the same ones again with the seed that is printed."""
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(10**9))
    print(f"{SEED}={seed}")
    return random.Random(seed)
