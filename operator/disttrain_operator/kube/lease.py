"""Leader election: a Lease, taken and renewed with its resourceVersion.

Clocks of two machines are never compared. Who follows a lease judges it by its own clock: a lease is expired when it
has not changed for its duration since *we* first saw it so. Who holds it judges itself by the moment before it asked
for the last renewal that succeeded, and stops to act after `renew_deadline`, which is shorter than the duration. So two
replicas act at once only if one's clock runs a third faster than the other's.

A short lease is soon taken over, and soon lost where the API server, or this process, is slow. So its holder makes it
longer as renewals take longer, and shorter again as they do not: who follows it reads the duration in the lease.

Releases of the operator that serve the same jobs share one lease, whatever namespaces they are installed in. One that
serves single namespaces has one in each (elections.py). It also follows the lease of those that serve all (`wider`),
and stands by while that is taken.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum

from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import Conflict, Forbidden, KubeError, NotFound

logger = logging.getLogger(__name__)


LONGEST_SECONDS = 15.0
"""How long a slow API server makes a lease that is shorter by itself."""
RENEWALS_IN_DURATION = 4
"""How many times as long as the slowest renewal a lease is at least: so the one after that is in time, too."""
FADING = 0.98
"""What of a slow renewal is remembered with each one that follows: a third after about 55."""


@dataclass(frozen=True)
class Terms:
    """Times in seconds; `renew_deadline` < `duration`."""

    duration: float = 2.0
    """How long a lease that nobody renews stays its holder's; whole seconds, as it is written."""
    renew_deadline: float = 1.5
    """How long a holder acts on its last renewal."""
    renew_every: float = 0.5
    look_every: float = 0.25
    """How often a standby looks: a released lease is taken after this time at the latest."""

    def of(self, duration: float) -> "Terms":
        """Return terms of another duration, the other times in proportion."""
        factor = duration / self.duration
        return Terms(duration, self.renew_deadline * factor, self.renew_every * factor, self.look_every * factor)

    def where_renewals_take(self, seconds: float) -> "Terms":
        """Return these, or longer ones by which a renewal that takes so long comes in time."""
        needed = min(math.ceil(RENEWALS_IN_DURATION * seconds), LONGEST_SECONDS)
        return self.of(needed) if needed > self.duration else self


@dataclass(frozen=True)
class Lease:
    """A lease as the API server has it; `holder` "" where it was released."""

    holder: str
    version: str
    duration: float
    transitions: int = 0
    metadata: Raw = field(default_factory=dict, compare=False)
    """What its maker wrote there, such as labels."""


@dataclass(frozen=True)
class ObservedLease:
    """The lease that was seen last (None: there is none) and since when, by our clock, it has been like that."""

    lease: Lease | None
    since: float


class LeaseAction(StrEnum):
    """Next action on the lease."""

    CREATE = "create"
    TAKE = "take"
    RENEW = "renew"
    WAIT = "wait"


def next_action(observed: ObservedLease, me: str, now: float) -> LeaseAction:
    """Return the next action of the replica `me` on the lease that it has observed."""
    lease = observed.lease
    if lease is None:
        return LeaseAction.CREATE
    if lease.holder == me:
        return LeaseAction.RENEW
    if not lease.holder or now - observed.since >= lease.duration:
        return LeaseAction.TAKE
    return LeaseAction.WAIT


def updated(observed: ObservedLease | None, lease: Lease | None, now: float) -> ObservedLease:
    """Return the observation after another look. Only a change restarts its time."""
    if observed is not None and observed.lease == lease:
        return observed
    return ObservedLease(lease, now)


_KEPT = ("labels", "annotations", "ownerReferences", "finalizers")

WIDER_DURATIONS = 3
"""For how many of its durations a wider lease counts as taken: its own replicas come first."""


def is_taken(observed: ObservedLease, now: float) -> bool:
    """Whether somebody holds the lease, or did until a moment ago."""
    return observed.lease is not None and now - observed.since < WIDER_DURATIONS * observed.lease.duration


class Election:
    """Takes part in the election for one Lease. `leads` may be asked at any time."""

    def __init__(
        self,
        client: Client,
        namespace: str,
        name: str,
        me: str,
        terms: Terms | None = None,
        clock: Callable[[], float] = time.monotonic,
        wider_namespace: str | None = None,
        may_hold: Callable[[], bool] = lambda: True,
    ) -> None:
        """`me`: "namespace/release/replica", or the replica alone. `wider_namespace`: where operators of all namespaces
        have their lease, for one that serves single ones. While `may_hold` says no the lease is neither taken nor
        renewed."""
        self._client, self.me, self._terms, self._clock = client, me, terms or Terms(), clock
        self._collection, self._name = _collection(namespace), name
        self._path = f"{self._collection}/{name}"
        self._wider = f"{_collection(wider_namespace)}/{name}" if wider_namespace not in (None, namespace) else None
        self._may_hold = may_hold
        self._observed: ObservedLease | None = None
        self._wider_observed: ObservedLease | None = None
        self.superseded_by: str | None = None
        """Who holds the wider lease, "" where it was given back a moment ago; None: nobody does."""
        self._acts_until = float("-inf")
        self._due = float("inf")
        """When this round was to begin."""
        self._slowest = 0.0
        """How long a round takes, with what it began late: the slowest of the last ones."""
        self.changed = asyncio.Event()
        """Set after each round that gained or lost leadership, or before which it had lapsed. Its waiter clears it."""
        self._led = False
        self._shown: object = None

    @property
    def leads(self) -> bool:
        """Whether this replica may act now."""
        return self._clock() < self._acts_until

    @property
    def holder(self) -> str:
        """The last known holder of the lease."""
        return self._observed.lease.holder if self._observed is not None and self._observed.lease is not None else ""

    async def run(self) -> None:
        """Never returns. An API server that is away costs the leadership, nothing else."""
        self._due = self._clock()
        while True:
            began, terms = self._clock(), self.terms
            try:
                # A renewal that takes longer than this came too late anyway.
                async with asyncio.timeout(terms.renew_deadline):
                    await self._round(terms)
                self._slowest = max(self._clock() - self._due, self._slowest * FADING)
            except TimeoutError:
                self._slowest = max(self._slowest, terms.renew_deadline)
                logger.info("the lease %s could not be looked at: no answer in time", self._name)
            except KubeError as error:
                logger.info("the lease %s could not be looked at: %s", self._name, error)
            self._notify()
            pause = self._pause(terms, began)
            self._due = self._clock() + pause
            await asyncio.sleep(pause)

    @property
    def terms(self) -> Terms:
        """The terms by which the lease is renewed now."""
        return self._terms.where_renewals_take(self._slowest)

    def _pause(self, terms: Terms, began: float) -> float:
        """Until the next action: that of a standby, when the lease ends; a slow API server is given some time."""
        now = self._clock()
        if self.leads:
            next_at = began + terms.renew_every
        else:
            # The own terms: how slow the API server is for its holder says the lease.
            next_at = now + self._terms.look_every
            if self._observed is not None and self._observed.lease is not None:
                next_at = min(next_at, max(self._observed.since + self._observed.lease.duration, now))
        return max(next_at - now, terms.renew_every / 10)

    async def release(self) -> None:
        """Give the lease back, so that no replica waits for its end. Call it when nothing acts any more."""
        observed, self._acts_until = self._observed, float("-inf")
        if observed is None or observed.lease is None or observed.lease.holder != self.me:
            return
        try:
            async with asyncio.timeout(self._terms.renew_deadline):
                try:
                    await self._put(observed.lease, "", self._terms)
                except Conflict:
                    # A renewal that was cut off may have been written all the same.
                    lease = await self._look()
                    if lease is not None and lease.holder == self.me:
                        await self._put(lease, "", self._terms)
        except (KubeError, TimeoutError) as error:
            logger.info("the lease %s could not be released: %s", self._name, error or "no answer in time")

    async def _round(self, terms: Terms) -> None:
        if await self._is_superseded():
            self._acts_until = float("-inf")
            return
        if not self.leads:
            self._observed = updated(self._observed, await self._look(), self._clock())
        if not self._may_hold():
            self._acts_until = float("-inf")
            return
        assert self._observed is not None
        asked = self._clock()
        action = next_action(self._observed, self.me, asked)
        if action is LeaseAction.WAIT:
            return
        # A shorter lease holds from the moment when it may be written, whether its answer comes or not.
        self._acts_until = min(self._acts_until, asked + terms.renew_deadline)
        try:
            lease = await (
                self._create(terms) if action is LeaseAction.CREATE else self._hold(self._observed.lease, terms)
            )
        except (Conflict, NotFound):
            # Somebody was faster. What they wrote is seen at the next look.
            self._acts_until = float("-inf")
            return
        if self._led and not self.leads:
            # It stood still for too long. Nobody else has acted, but what it was about to do has been left undone.
            logger.info("this replica (%s) did not act for a while: its renewal is late", self.me)
            self._led = False
        self._observed = ObservedLease(lease, asked)
        self._acts_until = asked + terms.renew_deadline

    async def _is_superseded(self) -> bool:
        if self._wider is None:
            return False
        try:
            lease = _lease(await self._client.get(self._wider))
        except (NotFound, Forbidden):
            lease = None  # who has that lease lets everybody look at it
        self._wider_observed = updated(self._wider_observed, lease, self._clock())
        taken = lease is not None and is_taken(self._wider_observed, self._clock())
        self.superseded_by = lease.holder if lease is not None and taken else None
        return taken

    async def _look(self) -> Lease | None:
        try:
            return _lease(await self._client.get(self._path))
        except NotFound:
            return None

    async def _create(self, terms: Terms) -> Lease:
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": self._name}}
        try:
            return _lease(await self._client.create(self._collection, {**body, "spec": _spec(self.me, 0, terms)}))
        except Forbidden as error:
            raise KubeError(f"it is gone, and `helm upgrade` makes it: {error}") from error

    async def _hold(self, old: Lease | None, terms: Terms) -> Lease:
        """Take or renew. A change of something else in the object, such as a label, does not interfere."""
        try:
            return await self._put(old, self.me, terms)
        except Conflict:
            lease = await self._look()
            if lease is None or old is None or lease.holder != old.holder or lease.holder not in (self.me, ""):
                raise
            return await self._put(lease, self.me, terms)

    async def _put(self, old: Lease | None, holder: str, terms: Terms) -> Lease:
        assert old is not None
        transitions = old.transitions + (old.holder != holder and bool(holder))
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {**old.metadata, "name": self._name, "resourceVersion": old.version},
            "spec": _spec(holder, transitions, terms),
        }
        return _lease(await self._client.replace(self._path, body))

    def _notify(self) -> None:
        shown = (self.leads, self.holder, self.superseded_by)
        if self.leads != self._led or (not self.leads and shown != self._shown):
            self._led = self.leads
            self.changed.set()
        self._shown = shown


def _collection(namespace: str | None) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"


def _spec(holder: str, transitions: int, terms: Terms) -> Raw:
    # The time is for people who read the lease; no replica does.
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
    return {
        "holderIdentity": holder,
        "leaseDurationSeconds": math.ceil(terms.duration),
        "renewTime": now,
        "leaseTransitions": transitions,
    }


def _lease(raw: Raw) -> Lease:
    spec = raw.get("spec") or {}
    return Lease(
        holder=spec.get("holderIdentity") or "",
        version=raw["metadata"]["resourceVersion"],
        duration=float(spec.get("leaseDurationSeconds") or 0),
        transitions=int(spec.get("leaseTransitions") or 0),
        metadata={key: raw["metadata"][key] for key in _KEPT if key in raw["metadata"]},
    )
