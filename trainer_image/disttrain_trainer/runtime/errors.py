"""Errors that end a rank, and their exit codes.

TrainerError                    base; the message is one sentence for the user
├── InvalidConfiguration        a field or variable that cannot work
├── DataNotFound                files that are missing or empty
│   └── DataUnlike              ranks that do not find the same number of samples
├── EntrypointNotImportable     `package.module:function` that does not lead to a function
├── CheckpointMismatch          a checkpoint of another model or optimizer
├── CheckpointBroken            no checkpoint is as it was written
├── EvaluationFailed            an evaluation raised, and the manifest asks that the job fails then
├── StorageNotShared            ranks that do not see the same storage
├── StorageFull                 no room for a checkpoint
├── Fenced                      a newer attempt owns the checkpoints
├── CheckpointsTaken            another job owns them
├── PortInUse                   the master port belongs to another program
├── PeerLost                    a collective failed because another rank is gone: a symptom
├── NetworkFaulty               the preflight check got wrong data from this rank's node
├── NonFiniteLoss               the loss or the gradient is inf or nan
├── DiskFull                    no room for a file that is no checkpoint
├── EvaluationAborted           an evaluation raised on a rank for which others wait in a collective
├── LeftEarly                   code of the user called sys.exit, with no code or one of those below
└── Stopped                     SIGTERM was obeyed
CallbackFailed                  no TrainerError: code of the user raised, with whatever may cause that
"""

# ruff: noqa: N818 - an error is named like its exit code, and so like the reason a user reads

import errno
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException

from disttrain_api.escape import escaped
from disttrain_api.names import ExitCode, Reason, exit_reason
from disttrain_api.program_log import lost_a_peer
from disttrain_api.report import MAX_SENTENCE, RankError, left
from disttrain_api.structural import shorten
from disttrain_trainer.runtime.signature import origin_of, raised_in, signature_of

_OUTAGES = frozenset(
    (
        *(errno.ESTALE, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.ENOTCONN, errno.ESHUTDOWN, errno.EPIPE),
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM),
    )
)
"""Error numbers of a server that is away and of a machine that lacks something. EIO may also mean a lost block."""
_SHOWN_CHARACTERS = 200
_OWN_PACKAGES = ("disttrain_agent", "disttrain_api", "disttrain_session", "disttrain_trainer")


class StoreError(OSError):
    """An object store, or the way to it, failed."""


_NETWORK = (ConnectionError, TimeoutError, socket.gaierror)
_MOST_CAUSES = 10
"""Exceptions of which one is the cause of the other that are looked at."""


def does_not_answer(error: OSError) -> bool:
    """Return whether a storage that does not answer, or a machine without means, is the cause; it may pass."""
    return isinstance(error, StoreError) or error.errno in _OUTAGES


def from_an_outage(error: BaseException) -> bool:
    """Return whether a server that does not answer, or has no address, is the cause; it may pass."""
    last: BaseException | None = error
    for _ in range(_MOST_CAUSES):
        if isinstance(last, _NETWORK) or (isinstance(last, OSError) and does_not_answer(last)):
            return True
        last = None if last is None else last.__cause__ or _met_by_a_library(last)
    return False


def _met_by_a_library(error: BaseException) -> BaseException | None:
    """Return what a library was about to handle when it raised an exception of its own in its place."""
    is_of_python = type(error).__module__.partition(".")[0] in sys.stdlib_module_names
    return None if is_of_python or error.__suppress_context__ else error.__context__


def lost_reader(error: BaseException) -> bool:
    """Return whether a process that reads data was ended from outside, for example since the memory was short."""
    return isinstance(error, RuntimeError) and str(error).startswith("DataLoader worker (pid")


class TrainerError(Exception):
    """Base: ends the rank with `exit_code` and its message as it stands."""

    exit_code: ExitCode
    on_every_rank = False
    """Whether all ranks raise it together, having agreed on it; they then leave together, too."""
    from_outside = False
    """Whether the cause lies outside this program, so that the next attempt may well succeed."""
    repeats = True
    """Whether the next attempt, at the same step, would meet it in the same way."""
    step: int | None = None
    """The step that caused it, where a later step found it; None: the step at which it was raised."""


class InvalidConfiguration(TrainerError):
    exit_code = ExitCode.INVALID_CONFIGURATION


class DataNotFound(TrainerError):
    exit_code = ExitCode.DATA_NOT_FOUND


class DataUnlike(DataNotFound):
    on_every_rank = True


class EntrypointNotImportable(TrainerError):
    exit_code = ExitCode.ENTRYPOINT_NOT_IMPORTABLE


class CheckpointMismatch(TrainerError):
    exit_code = ExitCode.CHECKPOINT_MISMATCH
    on_every_rank = True


class CheckpointBroken(TrainerError):
    exit_code = ExitCode.CHECKPOINT_BROKEN
    on_every_rank = True


class EvaluationFailed(TrainerError):
    exit_code = ExitCode.EVALUATION_FAILED


class StorageNotShared(TrainerError):
    exit_code = ExitCode.STORAGE_NOT_SHARED
    on_every_rank = True


class StorageFull(TrainerError):
    exit_code = ExitCode.STORAGE_FULL
    on_every_rank = True


class Fenced(TrainerError):
    exit_code = ExitCode.FENCED
    on_every_rank = True
    from_outside = True


class CheckpointsTaken(TrainerError):
    exit_code = ExitCode.CHECKPOINTS_TAKEN
    on_every_rank = True


class PortInUse(TrainerError):
    exit_code = ExitCode.PORT_IN_USE
    from_outside = True


class PeerLost(TrainerError):
    exit_code = ExitCode.PEER_LOST
    from_outside = True


class NetworkFaulty(TrainerError):
    exit_code = ExitCode.NETWORK_FAULTY
    on_every_rank = True
    from_outside = True


class NonFiniteLoss(TrainerError):
    exit_code = ExitCode.NON_FINITE_LOSS
    on_every_rank = True

    def __init__(self, message: str, step: int | None = None, *, repeats: bool = True) -> None:
        super().__init__(message)
        self.step, self.repeats = step, repeats
        self.behind: tuple[int, int] | None = None
        """Epoch and position of the data behind the samples of this step. None: of the one that the state is before."""


class DiskFull(TrainerError):
    exit_code = ExitCode.DISK_FULL
    from_outside = True


class EvaluationAborted(TrainerError):
    exit_code = ExitCode.EVALUATION_ABORTED


class LeftEarly(TrainerError):
    exit_code = ExitCode.LEFT_EARLY


class Stopped(TrainerError):
    exit_code = ExitCode.STOPPED
    on_every_rank = True
    from_outside = True


class CallbackFailed(Exception):
    """A callback raised what is its `__cause__`; the message names the callback."""


def peer_lost(error: BaseException) -> bool:
    """Return whether `error` says that another rank is gone or cannot be reached."""
    if isinstance(error, ConnectionError):
        return raised_in(error, ("disttrain_trainer", "torch.distributed"))
    if isinstance(error, DistError):
        return True
    if isinstance(error, CheckpointException):
        return any(peer_lost(cause) for cause, _ in error.failures.values())
    return isinstance(error, RuntimeError) and lost_a_peer(str(error))


def no_room(error: BaseException | None) -> OSError | None:
    """Return the OSError among `error` and its causes that says that a disk is full; None where there is none."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
        error = error.__cause__ or error.__context__
    return None


@contextmanager
def own_errors() -> Iterator[None]:
    """Raise the TrainerError, or the error of a lost peer, instead of what a library has raised from it."""
    try:
        yield
        return
    except Exception as error:
        last: BaseException = error
        cause = error.__cause__
        while cause is not None and not (isinstance(cause, TrainerError) or peer_lost(cause)):
            last, cause = cause, cause.__cause__
        if cause is None:
            raise
        # The library's exception becomes the context of its own cause: who followed both would go in a circle.
        last.__cause__ = last.__context__ = None
    raise cause


def describe(error: BaseException) -> RankError:
    """Return the exit code, reason and message of `error`, for the rank's report."""
    if isinstance(error, TrainerError):
        signature = (
            None if error.from_outside or not error.repeats else signature_of(error.__cause__ or error, error.step)
        )
        reason = exit_reason(error.exit_code)
        message, unquoted = escaped(str(error)), _unquoted(error)
        return RankError(
            exit_code=error.exit_code, reason=reason, message=message, unquoted=unquoted, signature=signature
        )
    if (full := no_room(error)) is not None:
        return describe(DiskFull(f"cannot write {full.filename or 'a file'}: {full.strerror}; make room on its disk"))
    if peer_lost(error):
        lost = PeerLost(f"another rank is gone or cannot be reached: {one_line(error)}")
        lost.__cause__ = error
        return describe(lost)
    unquoted = type(error).__name__
    message = f"{unquoted}: {one_line(error)}"
    if isinstance(error, CallbackFailed):
        message = escaped(str(error))
        unquoted, error = _unquoted(error) or message, error.__cause__ or error
    # What may pass without a change to the program must not end the job when it comes a second time.
    passing = from_an_outage(error) or lost_reader(error)
    signature = None if passing else signature_of(error)
    if passing and (place := origin_of(error).place) is not None:
        # Who reads it wants to know where, whether or not it is compared.
        unquoted = f"{unquoted} at {place}"
    return RankError(exit_code=1, reason=Reason.RANK_FAILED, message=message, unquoted=unquoted, signature=signature)


def _unquoted(error: BaseException) -> str | None:
    """Return the error's sentence without the text of the exception that it was raised from; None if there is none, or
    if disttrain's code raised that."""
    cause, sentence = error.__cause__, str(error)
    if cause is None or raised_in(cause, _OWN_PACKAGES):
        return None
    before, found, after = sentence.rpartition(one_line(cause))
    return escaped(f"{before}…{after}") if found else None


def describe_exit(end: SystemExit, step: int | None, steps: int) -> RankError:
    """Return the same for a sys.exit, which only the user's code calls. step: the last one done, of `steps`."""
    signature = signature_of(end)
    code = (end.code or 0) & 0xFF if isinstance(end.code, int | None) else 1
    given = "" if isinstance(end.code, int | None) else f": {one_line(end)}"
    message, unquoted = (
        left(step, steps, code, f"code in {signature.place} called sys.exit{ending}") for ending in (given, "")
    )
    # The numbers of the trainer's own exit codes keep their meaning.
    exit_code, reason = (
        (LeftEarly.exit_code, exit_reason(LeftEarly.exit_code)) if code in set(ExitCode) else (code, Reason.RANK_FAILED)
    )
    return RankError(exit_code=exit_code, reason=reason, message=message, unquoted=unquoted, signature=signature)


def shown(text: str) -> str:
    """Return at most 200 characters of a text that anybody may have written, none of which controls a terminal."""
    return repr(text[:_SHOWN_CHARACTERS])[1:-1]


def one_line(error: BaseException) -> str:
    """Return the first line of the error's text, and the last one where it is another, as text for any terminal.

    The last line of a GPU's errors is advice, the first one of load_state_dict's is a heading.
    """
    lines = [shorten(line, MAX_SENTENCE) for line in str(error).splitlines() if line.strip()]
    if not lines:
        return "no message"
    first, last = lines[0], lines[-1]
    return first if last == first else f"{first}{'' if first.endswith(':') else ' …'} {last}"
