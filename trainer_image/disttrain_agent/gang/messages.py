"""What agents of a gang send each other, as JSON. Pure."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from disttrain_api.base import ApiModel
from disttrain_api.bounds import cut
from disttrain_api.report import MAX_SENTENCE, FailureSignature, RankFailure

MAX_BODY_BYTES = 32 * 1024
"""More than a failure with its longest texts takes."""


class Kind(StrEnum):
    """What a message says."""

    JOINS = "joins"
    FAILED = "failed"
    ENDED = "ended"
    DEPARTS = "departs"
    LEAVES = "leaves"
    STOP = "stop"
    START = "start"
    ALIVE = "alive"
    KILL = "kill"


class _Part(ApiModel):
    model_config = {**ApiModel.model_config, "extra": "ignore"}


class PodFailure(_Part):
    """How the ranks of a pod have ended, of which at least one has failed."""

    cause: RankFailure
    signaled: bool = False
    """Its agent had sent it a signal before."""
    checkpoint: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Step of the newest checkpoint that its ranks have reported. None: of none."""
    began: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """The step after which they went on. None: they have not said so."""


class History(_Part):
    """What a leader must know of the restarts before a generation."""

    since_checkpoint: Annotated[int, Field(ge=0, le=2**31)] = 0
    """Restarts without a new checkpoint between them."""
    checkpoint: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """Step of the newest checkpoint at the last restart."""
    began: Annotated[int, Field(ge=0, le=2**53)] | None = None
    """The step after which a life of the ranks went on, the last time that the count began anew."""
    signature: FailureSignature | None = None
    """The last failure since that checkpoint with a signature had this one."""
    out_of_memory: bool = False
    """A rank has run out of memory since that checkpoint."""


class Message(_Part):
    """One message."""

    kind: Kind
    generation: Annotated[int, Field(ge=0, le=2**31)]
    master_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """With `start`: on which the ranks of a command of the user's own meet; 0: on that of their pods."""
    replacement: Annotated[int, Field(ge=0, le=2**31)] = 0
    """With `joins` and `start`: which replacement of its worker's pod the sender's is; 0: none, it began with the
    attempt."""
    leader: Annotated[int, Field(ge=0, le=2**31)] = 0
    """With `joins`: which replacement of worker 0's pod has ordered the last start of the sender's ranks; 0: none."""
    rank: Annotated[int, Field(ge=0, le=2**31)] | None = None
    """With `kill`: the rank that is to be killed, since the gang hangs; None: all."""
    history: History | None = None
    """With `start`, and with `joins` as the pod was told at its last start."""
    failure: PodFailure | None = None
    """With `ended`."""
    ago: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 0.0
    """With `failed` and `ended`: seconds since the first rank of the pod failed."""
    why: Annotated[str, Field(max_length=MAX_SENTENCE)] = ""
    """With `leaves`."""
    repeated: FailureSignature | None = None
    """With `leaves`: of a failure that has come again."""


def leaves(generation: int, why: str, repeated: FailureSignature | None = None) -> Message:
    """Return the message that no rank starts again."""
    return Message(kind=Kind.LEAVES, generation=generation, why=cut(why, MAX_SENTENCE), repeated=repeated)


def encode(message: Message) -> bytes:
    """Return one line of JSON, without its end."""
    return message.model_dump_json(by_alias=True, exclude_none=True).encode()


def decode(body: bytes) -> Message | None:
    """Return the message in a line; None where it holds none."""
    try:
        return Message.model_validate_json(body)
    except ValueError:
        return None
