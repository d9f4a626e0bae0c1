"""Connections to the API: those within the limits go on to the HTTP server, others end at once."""

import asyncio
from collections.abc import Callable

from disttrain_agent.limits import Admission, Limits
from disttrain_api import connection_limits
from disttrain_api.connection_limits import Connection


class ConnectionLimiter(connection_limits.ConnectionLimiter):
    """Admits connections by their number and rate, in all and per address; counts those that are refused."""

    def __init__(self, inner: Callable[[], asyncio.Protocol], admission: Admission, limits: Limits) -> None:
        super().__init__(inner, limits.seconds, limits.bytes)
        self._admission = admission

    def enter(self, connection: Connection, now: float) -> bool:
        return self._admission.enter(connection.address, now)

    def leave(self, connection: Connection) -> None:
        self._admission.leave(connection.address)

    def refused(self, reason: str) -> None:
        self._admission.refused[reason] += 1
