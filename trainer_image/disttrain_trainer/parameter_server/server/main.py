"""A parameter server: `python -m disttrain_trainer.parameter_server.server.main`, the program of a pod of role ps."""

import gc
import os

from disttrain_trainer.runtime.leaving import leave
from disttrain_trainer.runtime.stop import StopRequest

if __name__ == "__main__":
    # First of all: importing torch takes seconds in which SIGTERM may come.
    stop_request = StopRequest.on_sigterm()
    # What is imported stays: to search it for garbage takes a tenth of the start.
    gc.disable()

import sys
import threading
import traceback
from pathlib import Path

import torch

from disttrain_agent.environment import termination_log
from disttrain_agent.reports import TerminationMessage
from disttrain_api.names import Env, ExitCode, exit_reason
from disttrain_api.report import RankFailure, RankReport
from disttrain_trainer.checkpoint.storage import newest_seen
from disttrain_trainer.parameter_server.protocol.settings import resumes_from_snapshots, settings_of, workers_of
from disttrain_trainer.parameter_server.protocol.wire import key_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server
from disttrain_trainer.parameter_server.server.snapshots import Snapshots, claim_incarnation
from disttrain_trainer.runtime.config import Config, read_config
from disttrain_trainer.runtime.errors import InvalidConfiguration, TrainerError, describe, no_room


class TerminationRecord:
    """The pod's termination message, also of a server that is killed: how far the job was, as the volume shows it."""

    def __init__(self) -> None:
        self._message = TerminationMessage(termination_log(os.environ))
        self._progress: RankReport | None = None
        self._lock = threading.Lock()
        self._ended = False

    def add_checkpoint(self, folder: Path) -> None:
        """Write the newest checkpoint down, so that a server's death counts since then."""
        checkpoint = newest_seen(folder)
        with self._lock:
            if checkpoint is not None and not self._ended:
                self._progress = RankReport(rank=0, checkpoint=checkpoint)
                self._message.write(self._progress)

    def end(self, failure: RankFailure) -> None:
        """Write down why this server ends."""
        with self._lock:
            self._ended = True
            self._message.write(self._progress, failure)


def run(stop: StopRequest) -> int:
    """Everything from the environment to the exit code; no exception leaves."""
    record = TerminationRecord()
    try:
        # Its rank is none of the workers': read_config has nothing of a rank to find.
        environment = {name: value for name, value in os.environ.items() if name != Env.RANK}
        config = read_config(environment)
        if config.threads_given:
            torch.set_num_threads(max(1, int(os.environ["OMP_NUM_THREADS"])))
        serve(config, _index(config), stop, record)
    except Exception as error:
        if not isinstance(error, TrainerError) and not no_room(error):
            traceback.print_exception(error)
        failure = describe(error)
        print(f"disttrain: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)
        record.end(
            RankFailure(
                rank=0,
                exit_code=failure.exit_code,
                reason=failure.reason,
                message=failure.message,
                signature=failure.signature,
            )
        )
        return failure.exit_code
    return 0


def serve(config: Config, index: int, stop: StopRequest, record: TerminationRecord) -> None:
    """Run server `index` until it must stop and the work is finished, or no worker is left to finish it."""
    snapshots = None
    key = key_of(config.token, config.job.uid, config.attempt)
    incarnation = 1
    if resumes_from_snapshots(config):
        assert isinstance(config.checkpoint_folder, Path)
        checkpoints = config.checkpoint_folder
        folder = checkpoints / "servers"
        try:
            claim, incarnation = claim_incarnation(folder, index, config.attempt)
            snapshots = Snapshots(
                folder / f"server-{index}.snapshot", key, claim, lambda: record.add_checkpoint(checkpoints)
            )
        except OSError as error:
            print(f"disttrain: no snapshots: {folder} cannot be written: {error.strerror}", file=sys.stderr, flush=True)
    described = ServerConfig(
        index=index,
        workers=workers_of(config),
        training=config.training,
        batch=config.batch,
        settings=settings_of(config),
        snapshots=snapshots is not None,
        incarnation=incarnation,
        compression=config.job.parallelism.data_parallel.compression,
    )
    server = Server(described, lambda sentence: print(sentence, flush=True))
    former = snapshots.read() if snapshots is not None else None
    if former is not None:
        server.restore(former)
        print(
            f"resumes from its snapshot after {former.number('version')} updates, as incarnation {incarnation}",
            flush=True,
        )
    loop = Loop(server, key, config.servers[index], snapshots)
    print(f"parameter server {index} of {len(config.servers)} listens at {config.servers[index]}", flush=True)
    stop.before_exit = lambda message: record.end(_stopped(message))
    stop.loop_started(config.grace_seconds)
    loop.run(lambda: stop.requested)
    loop.close()


def _stopped(message: str) -> RankFailure:
    code = ExitCode.STOPPED
    return RankFailure(rank=0, exit_code=code, reason=exit_reason(code), message=message)


def _index(config: Config) -> int:
    text = os.environ.get(Env.ROLE_INDEX, "")
    if not text.isdigit() or int(text) >= len(config.servers):
        raise InvalidConfiguration(
            f"{Env.ROLE_INDEX} is {text!r}, expected 0 to {len(config.servers) - 1}: {Env.PS_ADDRESSES} has"
            f" {len(config.servers)} servers"
        )
    return int(text)


if __name__ == "__main__":
    gc.freeze()
    gc.enable()
    code = run(stop_request)
    stop_request.work_ended(code)
    leave(code)
