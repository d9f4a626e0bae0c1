"""The trainer's program: from the environment to the exit code.

Comes in: job.json and the environment (config.py). Goes out: checkpoints on the storage, a report file per rank, a log,
and an exit code (disttrain_api.names.ExitCode).
"""

import sys
import traceback
from contextlib import suppress

from torch.distributed.checkpoint.api import CheckpointException

from disttrain_agent.stacks import answer_for_stacks
from disttrain_trainer.metrics.report import Reporter, log_first_rank
from disttrain_trainer.runtime.config import Config, read_config, report_place
from disttrain_trainer.runtime.device import find_device
from disttrain_trainer.runtime.errors import Stopped, TrainerError, describe, describe_exit, no_room
from disttrain_trainer.runtime.mesh import World, join_world
from disttrain_trainer.runtime.stop import StopRequest
from disttrain_trainer.state import State
from disttrain_trainer.strategies.choose import has_servers
from disttrain_trainer.train import train


def run(stop: StopRequest) -> int:
    """Everything from the environment to the exit code; no exception leaves."""
    rank, folder = report_place()
    answer_for_stacks(rank, folder)
    reporter = Reporter(rank, folder)
    stop.before_exit = lambda message: reporter.fail(describe(Stopped(message)))
    world: World | None = None
    try:
        config = read_config()
        devices = config.job.parallelism.devices_per_process or 1
        device = find_device(config.local_rank, config.local_world_size, config.threads_given, devices)
        world = join_world(world_config(config), device)
        if device.shares_gpu and not has_servers(config):
            log_first_rank(
                world, "ranks share a GPU: what they send goes through gloo and the host's memory, which is slow"
            )
        take_part(config, world, reporter, stop)
        reporter.update(done=True)
    # CheckpointException derives from BaseException; SystemExit is code of the user that leaves.
    except (Exception, CheckpointException, SystemExit) as error:
        return failed(error, reporter, world)
    world.leave()
    return 0


def world_config(config: Config) -> Config:
    """The config of the ranks that take steps together: with parameter servers those of a pod, else all."""
    if not has_servers(config):
        return config
    # Not above: only such a job needs ZeroMQ.
    from disttrain_trainer.parameter_server.worker.group import in_group

    return in_group(config)


def take_part(config: Config, world: World, reporter: Reporter, stop: StopRequest) -> State:
    """Do this rank's work until the job is done. config: of the job; world: of `world_config`. Raises TrainerError."""
    if has_servers(config):
        from disttrain_trainer.parameter_server.protocol.settings import worker_of
        from disttrain_trainer.parameter_server.protocol.tasks import LEADER
        from disttrain_trainer.strategies.parameter_server import follow

        if worker_of(config) != LEADER:
            return follow(config, world, reporter, stop)
    return train(config, world, reporter, stop)


def failed(error: BaseException, reporter: Reporter, world: World | None) -> int:
    """Say why this rank ends: on stderr, in the report, by the exit code."""
    if isinstance(error, SystemExit):
        failure = describe_exit(error, reporter.step, reporter.report.total_steps)
    else:
        failure = describe(error)
    if not isinstance(error, TrainerError) and not no_room(error):
        traceback.print_exception(error)
    print(f"disttrain: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)
    with suppress(OSError):
        reporter.fail(failure)
    if world is not None and isinstance(error, TrainerError) and error.on_every_rank:
        world.leave()
    return failure.exit_code
