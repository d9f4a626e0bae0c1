"""One leadership over several namespaces: a replica leads while it holds the lease of each of them.

Releases whose namespaces overlap meet at the leases of those that both serve; the one that does not get all of its
leases stands by, for all of its namespaces. Leases are taken in the order of the namespaces' names and held only
together with all before them, so two replicas cannot each keep a lease that the other one waits for.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from disttrain_operator.kube.client import Client
from disttrain_operator.kube.lease import Election, Terms

RENEWALS_PER_SECOND = 20
"""Writes of leases at most: each is written in the API server's store."""


def terms_of(seconds: int, leases: int) -> Terms:
    """Return the terms of leases that last so long, or longer where so many of them would be renewed too often."""
    renewals = Terms().duration / Terms().renew_every
    return Terms().of(max(seconds, math.ceil(leases * renewals / RENEWALS_PER_SECOND)))


class Elections:
    """Takes part in the elections for one Lease in each namespace. Has the attributes of an Election."""

    def __init__(
        self,
        client: Client,
        namespaces: Sequence[str],
        name: str,
        me: str,
        terms: Terms | None = None,
        clock: Callable[[], float] = time.monotonic,
        wider_namespace: str | None = None,
    ) -> None:
        self.me = me
        self.changed = asyncio.Event()
        """Set when leadership of any of the namespaces was gained or lost. Its waiter clears it."""
        self._members = list[Election]()
        for namespace in sorted(namespaces):
            member = Election(
                client,
                namespace,
                name,
                me,
                terms,
                clock,
                wider_namespace=wider_namespace,
                may_hold=partial(_all_lead, tuple(self._members)),
            )
            member.changed = self.changed
            self._members.append(member)

    @property
    def leads(self) -> bool:
        """Whether this replica may act now."""
        return _all_lead(self._members)

    @property
    def holder(self) -> str:
        """Return the last known holder of the first lease that this replica lacks, or this replica if it lacks none."""
        return self._lacking().holder

    @property
    def superseded_by(self) -> str | None:
        """Return the holder of the lease of operators for all namespaces; None if there is none."""
        return self._lacking().superseded_by

    def _lacking(self) -> Election:
        return next((member for member in self._members if not member.leads), self._members[-1])

    async def run(self) -> None:
        """Never returns."""
        async with asyncio.TaskGroup() as tasks:
            for member in self._members:
                tasks.create_task(member.run())

    async def release(self) -> None:
        """Give all leases back, the last one first, so that the next leader finds them free in its order."""
        for member in reversed(self._members):
            await member.release()


AnyElection = Election | Elections


def _all_lead(members: Sequence[Election]) -> bool:
    return all(member.leads for member in members)
