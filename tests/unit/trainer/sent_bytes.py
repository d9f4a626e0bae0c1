"""A real rank that counts what its sockets send in a few steps, into a file beside its report."""

import json
import os
import socket
import stat
import struct
from collections.abc import Callable
from pathlib import Path

from disttrain_trainer.runtime.config import read_config
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.mesh import join_world
from disttrain_trainer.strategies.base import Surroundings
from disttrain_trainer.strategies.choose import build_job_state, open_strategy

WARM, STEPS = 4, 4
BYTES_SENT, BYTES_AGAIN = 200, 208
"""Where Linux' struct tcp_info has the bytes of a connection's data, and those of them that were sent again."""


def sent() -> int:
    """Bytes that this process has sent over all its TCP connections."""
    total = 0
    for found in Path("/proc/self/fd").iterdir():
        try:
            descriptor = os.dup(int(found.name))
        except OSError:
            continue
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            continue
        with socket.socket(fileno=descriptor) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                values = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                (data,), (again,) = (struct.unpack_from("Q", values, at) for at in (BYTES_SENT, BYTES_AGAIN))
                total += data - again
    return total


def main() -> None:
    config = read_config()
    device = find_device(config.local_rank, config.local_world_size, config.threads_given, 1)
    world = join_world(config, device)
    state = build_job_state(config, world)
    never: Callable[[], bool] = lambda: False  # noqa: E731
    with open_strategy(Surroundings(config, world, state, never, never, lambda: None)) as strategy:
        list(strategy.run(WARM))
        before = sent()
        list(strategy.run(WARM + STEPS))
        # What a thread of the backend still sends is gone when the others have it.
        world.sum(0.0)
        found = (sent() - before) / STEPS
    Path(os.environ["SENT_BYTES"], f"rank-{config.rank}.json").write_text(json.dumps(found))
    world.leave()


if __name__ == "__main__":
    main()
