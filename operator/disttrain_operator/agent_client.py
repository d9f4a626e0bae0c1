"""Agents of pods that run: where they listen, how they are asked, and what is believed of an answer."""

import re
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import quote

import aiohttp
from yarl import URL

from disttrain_api.agent_api import OPERATIONS, STACKS, STATUS
from disttrain_api.names import AGENT_PORT, HOST_AGENT_PORTS, TOKEN_HEADER, Label, Role
from disttrain_api.pod_address import pod_address
from disttrain_api.report import MAX_AGENT_ANSWER_BYTES, AgentStatus
from disttrain_api.stacks import MAX_STACKS_ANSWER_BYTES
from disttrain_operator.agent_http import Refused, exchange
from disttrain_operator.decide.live import Live
from disttrain_operator.kube.auth import Access, ClientCertificate
from disttrain_operator.kube.cache import Raw
from disttrain_operator.kube.client import read_body

_NUMBER = re.compile("[0-9]{1,9}")


@dataclass(frozen=True)
class Agent:
    """The agent of a worker; of all workers only the first is asked how the job is."""

    job_uid: str
    pod_uid: str
    attempt: int
    host: str
    port: int
    namespace: str = ""
    name: str = ""
    """Name of the pod."""
    index: int = 0
    """Number of the worker."""
    most_bytes: int = MAX_AGENT_ANSWER_BYTES
    """The largest answer that is read."""


ANSWER_SECONDS, CONNECT_SECONDS = 5.0, 2.0

Ask = Callable[[Agent, str, str], Awaitable[bytes]]
"""(agent, token, path) -> what it answers. Raises whatever keeps the answer away."""
STATUS_PATH, STACKS_PATH = STATUS.path, f"{STACKS.path}?thread=main"
_MOST_BYTES = {STATUS.path: MAX_AGENT_ANSWER_BYTES, STACKS.path: MAX_STACKS_ANSWER_BYTES}
_MOST_OF_OTHERS = 4096
_NO_USE_TO_ASK_AGAIN = (404, 409)
"""There is no such pod or path, or the agent cannot do what it is asked. A 401 may be the API server's own here: only
from the agent itself is it final (agent_http.py)."""
_METHODS = {one.path: one.method for one in OPERATIONS}


def agent_of(job_uid: str, pod: Raw, *, any_worker: bool = False) -> Agent | None:
    """Return the agent of a raw pod that runs; None where it has none, or is not its job's first worker."""
    labels, status = pod["metadata"].get("labels") or {}, pod.get("status") or {}
    port, attempt, index = pod["spec"].get("agentPort"), labels.get(Label.ATTEMPT, ""), labels.get(Label.INDEX, "")
    is_one = labels.get(Label.ROLE) == Role.WORKER.value and (_NUMBER.fullmatch(index) if any_worker else index == "0")
    if not is_one or status.get("phase") != "Running" or not _NUMBER.fullmatch(attempt):
        return None
    host = _address(status.get("podIP"))
    if host is None or (port != AGENT_PORT and port not in HOST_AGENT_PORTS):
        return None
    about = pod["metadata"]
    return Agent(job_uid, about["uid"], int(attempt), host, port, about["namespace"], about["name"], int(index))


def _address(text: object) -> str | None:
    """Return an address that can be a pod's, as it stands in a URL; the operator's own machine is none."""
    address = pod_address(text)
    if address is None:
        return None
    return f"[{address}]" if address.version == 6 else str(address)


def live_of(agent: Agent, status: AgentStatus | None) -> Live | None:
    """Return what an answer says of the job; None where it is no answer, or one of another job or attempt."""
    if status is None or (status.job_uid, status.attempt) != (agent.job_uid, agent.attempt):
        return None
    awaited = frozenset(status.awaited)
    if agent.index:
        return Live(agent.pod_uid, agent.attempt, None, awaited=awaited & {0})
    reports = [rank.report for rank in status.ranks if rank.report is not None and rank.report.total_steps]
    first = min(reports, key=lambda report: report.rank, default=None)
    return Live(agent.pod_uid, agent.attempt, first, restarts_in_place=status.restarts_in_place, awaited=awaited)


def _method(path: str) -> str:
    return _METHODS[path.partition("?")[0]]


def _most(agent: Agent, path: str) -> int:
    """How much is read of an answer."""
    return min(_MOST_BYTES.get(path.partition("?")[0], _MOST_OF_OTHERS), agent.most_bytes)


async def ask_directly(agent: Agent, token: str, path: str) -> bytes:
    """Ask an agent at the address of its pod."""
    return await exchange(
        _method(path), agent.host, agent.port, path, {TOKEN_HEADER: token},
        most=_most(agent, path), seconds=ANSWER_SECONDS, connect_seconds=CONNECT_SECONDS,
    )  # fmt: skip


class ApiServerProxy:
    """Asks agents through the API server, from where the addresses of pods cannot be reached. No agent is Unreachable:
    what the API server does not reach tells nothing of a pod's node.

    Apart from the operator's own requests: whatever a pod answers, be it a refusal, a cookie or nothing, concerns
    neither their connections nor the credentials, and is not counted as an answer of the API server.
    """

    def __init__(self, access: Access, seconds: float = ANSWER_SECONDS) -> None:
        """`seconds`: within which an agent answers."""
        self._access, self._seconds = access, seconds
        self._session: aiohttp.ClientSession | None = None
        self._tls: tuple[ClientCertificate | None, ssl.SSLContext | bool] | None = None

    async def ask(self, agent: Agent, token: str, path: str) -> bytes:
        """Return what an agent answers. Connections are kept, to the API server alone."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=self._seconds, sock_connect=CONNECT_SECONDS),
                proxy=self._access.proxy,
                # What is compressed could become any length.
                auto_decompress=False,
                headers={"Accept-Encoding": "identity"},
            )
        headers = {TOKEN_HEADER: token, "User-Agent": "disttrain-operator"}
        if bearer := self._access.credentials.token():
            # The API server keeps it for itself.
            headers["Authorization"] = f"Bearer {bearer}"
        pod = f"/api/v1/namespaces/{quote(agent.namespace, safe='')}/pods/{quote(agent.name, safe='')}"
        async with self._session.request(
            _method(path),
            URL(f"{self._access.server}{pod}:{agent.port}/proxy{path}", encoded=True),
            headers=headers,
            allow_redirects=False,
            ssl=self._tls_of_now(),
            server_hostname=self._access.server_name,
        ) as response:
            if response.status in _NO_USE_TO_ASK_AGAIN:
                raise Refused(f"it is answered {response.status}")
            if response.status != 200:
                # The API server says it, or the pod.
                raise aiohttp.ClientError(f"it is answered {response.status}")
            return await read_body(response, _most(agent, path))

    def _tls_of_now(self) -> ssl.SSLContext | bool:
        """Return the TLS context. One for another certificate makes aiohttp open other connections."""
        certificate = self._access.credentials.certificate()
        if self._tls is None or self._tls[0] != certificate:
            self._tls = certificate, self._access.ssl_context() or False
        return self._tls[1]

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()
