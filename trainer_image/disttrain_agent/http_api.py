"""The agent's HTTP API, for clients with its token (disttrain_api.agent_token).

    GET /healthz                    without a token
    GET /v1/status                  AgentStatus
    GET /v1/logs?rank=R&tail=N      the last lines of a rank
    GET /v1/metrics?rank=R          the last logged figures of a rank
    GET /v1/stacks?thread=T         the stacks of all ranks; T: main, or all
    POST /v1/checkpoint             ask the ranks for a checkpoint
    POST /v1/restart?attempt=…      restart the ranks of a gang that hangs
    POST /v1/leader?address=A&replacement=N&proof=P    where worker 0's pod is; with a proof, the token is not needed

Imported when the first connection comes: aiohttp takes a third of a second, which no start of a rank waits for.
"""

import asyncio
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from disttrain_agent.limits import Admission, Bucket, Limits
from disttrain_agent.look import Look
from disttrain_api import agent_api
from disttrain_api.names import TOKEN_HEADER
from disttrain_api.pod_address import pod_address


def protocols(look: Look, token: str, admission: Admission, limits: Limits) -> Callable[[], asyncio.Protocol]:
    """Return a factory of protocols that answer requests."""
    api = Api(look, token, admission, limits)
    quiet = logging.getLogger("disttrain_agent.http")
    # Whoever sends garbage would fill the pod's log.
    quiet.disabled = True
    return web.Server(
        api.answer, logger=quiet, access_log=None, keepalive_timeout=0, lingering_time=0, max_line_size=1024,
        max_field_size=4096, max_headers=64,
    )  # fmt: skip


class Api:
    """Requests to answers."""

    def __init__(self, look: Look, token: str, admission: Admission, limits: Limits) -> None:
        self._look, self._token, self._refused = look, token.encode(), admission.refused
        now = asyncio.get_running_loop().time()
        # Whoever has seen a proof may repeat it: that takes no answer away from who has the token.
        self._rate, self._rate_of_proofs = (Bucket(limits.requests_per_second, now) for _ in range(2))
        answers: Mapping[str, Callable[[web.BaseRequest], Awaitable[Any]]] = {
            agent_api.STATUS.path: self._status,
            agent_api.LOGS.path: self._logs,
            agent_api.METRICS.path: self._metrics,
            agent_api.STACKS.path: self._stacks,
            agent_api.CHECKPOINT.path: self._checkpoint,
            agent_api.RESTART.path: self._restart,
            agent_api.LEADER.path: self._leader,
        }
        self._routes = {one.path: (one, answers[one.path]) for one in agent_api.OPERATIONS if one.with_token}

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; its connection then ends."""
        try:
            response = _json(200, await self._find(request))
        except RefusedError as refusal:
            if refusal.counted_as:
                self._refused[refusal.counted_as] += 1
            response = _json(refusal.code, {"error": str(refusal)})
        response.force_close()
        return response

    async def _find(self, request: web.BaseRequest) -> Any:
        if request.can_read_body:
            raise RefusedError(413, "no request has a body", "size")
        if request.path == agent_api.HEALTH.path:
            return {"ok": True}
        given = request.headers.get(TOKEN_HEADER, "").encode(errors="surrogateescape")
        has_token = hmac.compare_digest(given, self._token)
        if not has_token and not self._is_proved(request):
            raise RefusedError(401, f"the header {TOKEN_HEADER} must hold the token of the job's agents", "token")
        if not (self._rate if has_token else self._rate_of_proofs).take(asyncio.get_running_loop().time()):
            raise RefusedError(429, "too many requests", "rate")
        route = self._routes.get(request.path)
        if route is None:
            raise RefusedError(404, f"no such page; there are {', '.join(self._routes)}")
        operation, answer = route
        if request.method != operation.method:
            raise RefusedError(405, f"only {operation.method} is answered")
        if not self._look.started and not operation.before_start:
            raise RefusedError(503, "no rank has been started in this pod yet")
        return await answer(request)

    def _is_proved(self, request: web.BaseRequest) -> bool:
        """Whether a request without the token says where worker 0's pod is, with a proof of it: who sends the token to
        an address that a name has led to may send it to somebody else's pod."""
        if request.path != agent_api.LEADER.path:
            return False
        address = self._address(request)
        number = request.query.get("replacement", "")
        if address is None or not _is_number(number):
            return False
        return self._look.proves(request.query.get("proof", ""), address, int(number))

    def _address(self, request: web.BaseRequest) -> str | None:
        """The address in a request, if a pod can have it."""
        address = pod_address(request.query.get("address"), loopback=self._look.on_loopback)
        return None if address is None else str(address)

    async def _status(self, request: web.BaseRequest) -> Any:
        status = self._look.status(self._refused)
        return status.model_dump(mode="json", by_alias=True, exclude_none=True)

    async def _logs(self, request: web.BaseRequest) -> Any:
        rank = _number(request, "rank", None)
        lines = self._look.log(rank, min(_number(request, "tail", agent_api.DEFAULT_TAIL), agent_api.MAX_LOG_LINES))
        if lines is None:
            raise _no_such(rank)
        return {"rank": rank, "lines": lines}

    async def _metrics(self, request: web.BaseRequest) -> Any:
        rank = _number(request, "rank", None)
        figures = self._look.figures(rank)
        if figures is None:
            raise _no_such(rank)
        return figures.model_dump(mode="json", by_alias=True, exclude_none=True)

    async def _stacks(self, request: web.BaseRequest) -> Any:
        thread = request.query.get("thread", agent_api.THREADS[0])
        if thread not in agent_api.THREADS:
            raise RefusedError(400, "`thread` must be main or all")
        return {"stacks": await self._look.stacks(main=thread == "main")}

    async def _checkpoint(self, request: web.BaseRequest) -> Any:
        if not self._look.ask_for_checkpoint():
            why = "its ranks do not train now, or keep none (no `storage`, parameter servers, no session)"
            raise RefusedError(409, f"no checkpoint can be asked for: {why}")
        return {"requested": True}

    async def _restart(self, request: web.BaseRequest) -> Any:
        attempt, generation, step = (_number(request, name, None) for name in ("attempt", "generation", "step"))
        rank = _number(request, "rank", None) if request.query.get("rank") else None
        found = self._look.restart(attempt, generation, step, rank)
        if isinstance(found, str):
            raise RefusedError(409, f"no restart in place: {found}")
        return {"restarts": found}

    async def _leader(self, request: web.BaseRequest) -> Any:
        replacement = _number(request, "replacement", None)
        address = self._address(request)
        if address is None:
            raise RefusedError(400, "`address` must be an address that a pod can have")
        if not self._is_proved(request):
            raise RefusedError(409, "`proof` must be that of this address and replacement in this attempt")
        if not self._look.hear_leader(address, replacement, request.query.get("proof", "")):
            raise RefusedError(409, "this agent waits for no such pod of worker 0")
        return {"known": True}


class RefusedError(Exception):
    """A request that is not served: its code, a sentence, and what it is counted as."""

    def __init__(self, code: int, sentence: str, counted_as: str = "") -> None:
        super().__init__(sentence)
        self.code, self.counted_as = code, counted_as


def _no_such(rank: int) -> RefusedError:
    return RefusedError(404, f"no rank {rank} in this pod")


def _json(code: int, answer: Any) -> web.Response:
    return web.Response(status=code, text=json.dumps(answer), content_type="application/json")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= agent_api.MAX_DIGITS


def _number(request: web.BaseRequest, name: str, default: int | None) -> int:
    text = request.query.get(name, "" if default is None else str(default))
    if not _is_number(text):
        raise RefusedError(400, f"`{name}` must be a whole number")
    return int(text)
