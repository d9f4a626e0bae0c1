"""The agent's HTTP API: what it answers where, and the same as an OpenAPI document.

    python -m disttrain_api.agent_api > docs/agent-api.json

The agent serves the operations of this table. `make generate` writes the document; tests/unit/test_house.py fails when
it is not what this module says.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue, models_json_schema
from pydantic_core import core_schema

from disttrain_api.base import ApiModel
from disttrain_api.leader_address import MAX_PROOF_LETTERS
from disttrain_api.names import AGENT_PORT, CHECKPOINT_PATH, LEADER_PATH, RESTART_PATH, TOKEN_HEADER
from disttrain_api.pod_address import MAX_LETTERS
from disttrain_api.report import AgentStatus, Figures
from disttrain_api.stacks import Stacks

Schema = dict[str, Any]

DEFAULT_TAIL, MAX_LOG_LINES = 100, 400
THREADS = ("all", "main")
"""Values of the parameter `thread`: which threads of a rank are returned. The first is the default."""
MAX_DIGITS = 10
"""The most digits of a number in a query."""


class _Answer(ApiModel):
    model_config = {**ApiModel.model_config, "extra": "ignore"}


class Health(_Answer):
    """The agent runs."""

    ok: Literal[True]


class Log(_Answer):
    """The last lines that a rank printed."""

    rank: Annotated[int, Field(ge=0)]
    lines: Annotated[list[str], Field(max_length=MAX_LOG_LINES)]
    """The oldest first; long ones are cut."""


class CheckpointRequested(_Answer):
    """The ranks write a checkpoint after one of their next steps."""

    requested: Literal[True]


class RestartOrdered(_Answer):
    """Whether ranks that hang are killed, so that all start again in their pods."""

    restarts: bool
    """False: since the order was given these ranks have ended, or taken a step."""


class LeaderKnown(_Answer):
    """The agent starts its ranks with this address, or looks there for worker 0's agent as soon as it has no connection
    to it."""

    known: Literal[True]


class Refusal(_Answer):
    """A request that is not served."""

    error: str
    """The reason, in one sentence."""


@dataclass(frozen=True)
class Operation:
    """A request that the agent answers."""

    name: str
    method: str
    path: str
    summary: str
    answer: type[ApiModel]
    refusals: tuple[int, ...] = ()
    """Codes beside those that every request can get."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    """Schemas of the parameters. Those without a default are required."""
    with_token: bool = True
    or_proof: bool = False
    """Whether a proof in the query stands for the token."""
    before_start: bool = False
    """Whether the agent answers it while it has not started its ranks."""


_NUMBER = {"type": "integer", "minimum": 0, "maximum": 10**MAX_DIGITS - 1}
_RANK = _NUMBER | {"description": "A rank of this pod."}

HEALTH = Operation("healthz", "GET", "/healthz", "Whether the agent runs.", Health, with_token=False)
STATUS = Operation("status", "GET", "/v1/status", "The state of the pod's ranks.", AgentStatus)
LOGS = Operation(
    "logs",
    "GET",
    "/v1/logs",
    "The last lines that a rank printed.",
    Log,
    (400, 404),
    {
        "rank": _RANK,
        "tail": _NUMBER | {"description": f"Lines, {MAX_LOG_LINES} at most.", "default": DEFAULT_TAIL},
    },
)
METRICS = Operation(
    "metrics",
    "GET",
    "/v1/metrics",
    "The figures of the last step that a rank has logged.",
    Figures,
    (400, 404),
    {"rank": _RANK},
)
STACKS = Operation(
    "stacks",
    "GET",
    "/v1/stacks",
    "The stacks of each rank; Linux only.",
    Stacks,
    (400,),
    {
        "thread": {
            "description": "All threads, or the innermost calls of the main thread alone.",
            "type": "string",
            "enum": list(THREADS),
            "default": THREADS[0],
        }
    },
)
CHECKPOINT = Operation(
    "checkpoint", "POST", CHECKPOINT_PATH, "Ask the ranks for a checkpoint.", CheckpointRequested, (409,)
)
RESTART = Operation(
    "restart",
    "POST",
    RESTART_PATH,
    "Restart the ranks of a gang that hangs in their pods; worker 0's agent alone, with `restartStrategy: InPlace`.",
    RestartOrdered,
    (400, 409),
    {
        "attempt": _NUMBER | {"description": "The attempt that hangs."},
        "generation": _NUMBER | {"description": "How often its ranks had restarted in place."},
        "step": _NUMBER | {"description": "The last step that the pod's lowest rank had reported."},
        "rank": {
            "description": "The rank to kill. Empty: all ranks are killed, so that none leaves its state in memory.",
            "type": "string",
            "pattern": f"^[0-9]{{0,{MAX_DIGITS}}}$",
            "default": "",
        },
    },
)
LEADER = Operation(
    "leader",
    "POST",
    LEADER_PATH,
    "Say at which address worker 0's pod is: before its name has one, or when it has taken the place of a lost pod.",
    LeaderKnown,
    (400, 409),
    {
        "address": {
            "description": "The address of the pod, as a literal. Ranks that have started restart there once "
            "who is there has proved the key of the attempt.",
            "type": "string",
            "maxLength": MAX_LETTERS,
        },
        "replacement": _NUMBER
        | {
            "description": "Which replacement it is (`DISTTRAIN_REPLACEMENT` of the pod); 0: none, it is the first pod."
        },
        "proof": {
            "description": "HMAC-SHA256 of the address and the replacement, a space between them, under the key of "
            "the attempt's addresses, as hexadecimal digits. With it the token is not needed.",
            "type": "string",
            "maxLength": MAX_PROOF_LETTERS,
        },
    },
    or_proof=True,
    before_start=True,
)
OPERATIONS = (HEALTH, STATUS, LOGS, METRICS, STACKS, CHECKPOINT, RESTART, LEADER)

_OF_ALL, _WITH_TOKEN, _BEFORE_START = (413,), (401, 405, 429), (503,)
REFUSALS: Mapping[int, str] = {
    400: "A parameter is absent, or has none of its values.",
    401: f"The header `{TOKEN_HEADER}` does not hold the token of the job's agents; `/v1/leader` also takes a valid "
    "proof in its place.",
    404: "The pod has no such rank. A path that this document does not have gets the same code.",
    405: "The path is served, but not with this method.",
    409: "A checkpoint: the ranks would write none, as they do not train now, or the job has no storage, or it has "
    "parameter servers. A restart: the restarts in place are used up, an agent is not connected, or this is not worker "
    "0's. An address of worker 0: the agent follows none, or the pod there is none that it waits for.",
    413: "The request has a body.",
    429: "The agent gets more requests in a second than it answers.",
    503: "The agent waits for the address of worker 0, and has started no rank.",
}

_DESCRIPTION = f"""The agent, the first process of each worker of a DistTrainingJob, serves this API (see agent.md).

The port is {AGENT_PORT}, with the host's network a port of the job's own. Each connection serves one request. A field \
whose description says what None means is absent then, never null. Clients ignore fields that they do not know."""


def codes(operation: Operation) -> list[int]:
    """Return the codes that a request with the method of this operation can get."""
    general = _OF_ALL + (_WITH_TOKEN if operation.with_token else ())
    general += () if operation.before_start or not operation.with_token else _BEFORE_START
    return [200, *sorted(general + operation.refusals)]


def document() -> Schema:
    """Return the API as an OpenAPI 3.1 document."""
    models: list[type[ApiModel]] = [Refusal, *(one.answer for one in OPERATIONS)]
    _, definitions = models_json_schema(
        [(model, "validation") for model in models],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    refusals = {str(code): _response(reason, Refusal) for code, reason in REFUSALS.items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "disttrain agent", "version": "1", "description": _DESCRIPTION},
        "servers": [{"url": "http://{pod}:{port}", "variables": _variables()}],
        "security": [{"token": []}],
        "paths": {one.path: {one.method.lower(): _operation(one)} for one in OPERATIONS},
        "components": {
            "securitySchemes": {"token": {"type": "apiKey", "in": "header", "name": TOKEN_HEADER}},
            "responses": refusals,
            "schemas": definitions["$defs"],
        },
    }


def to_json(described: Schema) -> str:
    """Return the file docs/agent-api.json."""
    return json.dumps(described, indent=2) + "\n"


class _Schemas(GenerateJsonSchema):
    """Without titles, which repeat the names, and without null, which no answer holds."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])


def _variables() -> Schema:
    return {
        "pod": {"default": "127.0.0.1", "description": "The pod's address."},
        "port": {"default": str(AGENT_PORT)},
    }


def _operation(operation: Operation) -> Schema:
    described: Schema = {"operationId": operation.name, "summary": operation.summary}
    if not operation.with_token:
        described["security"] = []
    elif operation.or_proof:
        described["security"] = [{"token": []}, {}]
    if operation.query:
        described["parameters"] = [
            {"name": name, "in": "query", "required": "default" not in schema}
            | {"description": schema["description"]}
            | {"schema": {key: value for key, value in schema.items() if key != "description"}}
            for name, schema in operation.query.items()
        ]
    refused = {str(code): {"$ref": f"#/components/responses/{code}"} for code in codes(operation)[1:]}
    return described | {
        "responses": {"200": _response(" ".join((operation.answer.__doc__ or "").split()), operation.answer)} | refused
    }


def _response(description: str, model: type[ApiModel]) -> Schema:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {"description": description, "content": {"application/json": {"schema": schema}}}


if __name__ == "__main__":
    sys.stdout.write(to_json(document()))
