"""How a session ends: together with the other ranks, with a sentence on the cause and the trainer's exit code."""

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from disttrain_api.names import Env, ExitCode
from disttrain_session.progress import SessionProgress
from disttrain_trainer.runtime.errors import Stopped, TrainerError, describe, describe_exit, no_room, peer_lost
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.stop import StopRequest

_MAX_TAIL = 4096


class Ending:
    """Listens for SIGTERM from now on, and ends the session. opens_group: the process group is the session's own."""

    def __init__(self, progress: SessionProgress, *, opens_group: bool) -> None:
        self._progress, self._opens_group = progress, opens_group
        self.world: World | None = None
        self._stop: StopRequest | None = None
        self._former: Any = None
        # Python hands signals to the main thread alone.
        if threading.current_thread() is threading.main_thread():
            self._former = signal.getsignal(signal.SIGTERM)
            self._stop = StopRequest.on_sigterm()
            self._stop.before_exit = lambda message: progress.failed(describe(Stopped(message)), "")

    @property
    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._stop is not None and self._stop.requested

    def loop_starts(self) -> None:
        """From now on SIGTERM is obeyed between two steps; until now it ends the process at once."""
        if self._stop is not None:
            grace = os.environ.get(Env.GRACE_SECONDS, "")
            self._stop.loop_started(float(grace) if grace.isdecimal() else None)

    @contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """End the process with a sentence and the trainer's exit code where the work inside ends in a TrainerError."""
        try:
            yield
        # CheckpointException derives from BaseException.
        except (TrainerError, CheckpointException) as error:
            self._report_and_leave(error)
        except (RuntimeError, OSError) as error:
            if not peer_lost(error) and not no_room(error):
                raise
            self._report_and_leave(error)

    def well(self) -> None:
        """Leave when all ranks are done."""
        self._progress.ended()
        self._part()
        if self._opens_group and dist.is_initialized():
            dist.destroy_process_group()
        self._restore_signals()

    def badly(self, error: BaseException) -> None:
        """Note why the loop has ended by an exception, which goes on."""
        if isinstance(error, SystemExit) and error.code == ExitCode.STOPPED:
            self._part()
        elif not isinstance(error, _Reported):
            if isinstance(error, SystemExit):
                failure = describe_exit(error, self._progress.report.step, self._progress.report.total_steps)
            else:
                failure = describe(error)
            self._progress.failed(failure, "".join(traceback.format_exception(error))[-_MAX_TAIL:])
            if failure.exit_code == ExitCode.PEER_LOST:
                # A symptom: its exit code lets nobody take it for the cause.
                print(f"disttrain: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)
                raise _Reported(int(failure.exit_code)) from error
        self._restore_signals()

    def _report_and_leave(self, error: BaseException) -> None:
        failure = describe(error)
        print(f"disttrain: {failure.reason}: {failure.message}", file=sys.stderr, flush=True)
        self._progress.failed(failure, "")
        if isinstance(error, TrainerError) and error.on_every_rank:
            self._part()
        raise _Reported(int(failure.exit_code)) from error

    def _part(self) -> None:
        # gloo may abort a rank whose peer leaves before it.
        if self.world is not None and self.world.size > 1:
            with suppress(RuntimeError):
                self.world.leave()

    def _restore_signals(self) -> None:
        if self._stop is not None:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, self._former or signal.SIG_DFL)


class _Reported(SystemExit):
    """End of a process that has reported the cause."""
