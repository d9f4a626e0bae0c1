"""The operator's process: `disttrain-operator`, or `python -m disttrain_operator`.

kopf: jobs, informers: the rest ──► caches ──► queue of jobs ──► workers: snapshot, decide, execute ──► API server
"""

import asyncio
import gc
import hashlib
import hmac
import logging
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial

from disttrain_api.agent_token import agent_token
from disttrain_api.names import Label
from disttrain_operator.agent_client import ApiServerProxy, ask_directly
from disttrain_operator.agents import Agents
from disttrain_operator.decide.observed import Job
from disttrain_operator.execute import Executor
from disttrain_operator.gatekeeper import Gatekeeper
from disttrain_operator.hang_orders import HangOrders
from disttrain_operator.health import Health
from disttrain_operator.history import History
from disttrain_operator.host import Host
from disttrain_operator.kube.again import Again, Collection
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.elections import AnyElection, Elections, terms_of
from disttrain_operator.kube.errors import AccessError
from disttrain_operator.kube.informer import Informer
from disttrain_operator.kube.kopf_watch import KopfWatch
from disttrain_operator.kube.kubeconfig import find_access
from disttrain_operator.kube.lease import Election
from disttrain_operator.kube.watch import Watch
from disttrain_operator.lag import LoopLag
from disttrain_operator.leader_addresses import LeaderAddresses
from disttrain_operator.leadership import Leadership
from disttrain_operator.logs import set_up_logging
from disttrain_operator.metrics import Figures, Metrics
from disttrain_operator.plan.site import OperatorPods, Site
from disttrain_operator.pod_events import PodEvents
from disttrain_operator.preflight import (
    log_missing,
    log_missing_proxy_rights,
    missing_proxy_rights,
    missing_rights,
    wait_for_jobs,
)
from disttrain_operator.queue import WorkQueue
from disttrain_operator.reconcile import Reconciler
from disttrain_operator.refused import Refused
from disttrain_operator.settings import AgentAccess, Settings, read_settings
from disttrain_operator.silent_pods import SilentPods
from disttrain_operator.snapshot import Key, Sources, World, core_collection, job_collection
from disttrain_operator.token_key import file_or_random_key, key_of_secret
from disttrain_operator.unreadable import UnreadableReports
from disttrain_operator.wakeups import Wakeups

logger = logging.getLogger("disttrain_operator")

SELECTOR = f"{Label.MANAGED_BY}={Label.MANAGER}"


class Operator:
    """All parts of the process, wired."""

    def __init__(
        self, settings: Settings, client: Client, election: AnyElection | None, token_key: bytes | None
    ) -> None:
        """`token_key` None: it is kept in the Secret that the settings name."""
        self._settings, self._client, self._token_key, self._election = settings, client, token_key, election
        self._namespaces: Sequence[str | None] = settings.namespaces or [None]
        self._leadership = Leadership(election)
        acts = self._leadership.acts
        self._metrics, self._lag = Metrics(), LoopLag()
        self._measuring: asyncio.Task[None] | None = None
        client.on_answer = self._metrics.answered

        refused = Refused()
        self._queue = WorkQueue[Key](
            group_of=lambda key: key.namespace, limit=lambda namespace: refused.share(namespace, settings.workers)
        )
        self._history = History(client, settings.history_jobs) if settings.history_jobs else None
        self._world = world = World(Wakeups(self._queue, refused, self._metrics, self._history))
        hold = timedelta(seconds=settings.gate_hold_seconds)
        self._gatekeeper = Gatekeeper(world, world.wake, acts, longest_hold=hold) if settings.gang_gate else None

        self.jobs = [
            KopfWatch(
                client, job_collection(namespace), world.jobs, within=namespace, silence=settings.watch_silence_seconds
            )
            for namespace in self._namespaces
        ]
        informer = partial(Informer, client, silence=settings.watch_silence_seconds)
        pods, services, nodes = (partial(core_collection, plural) for plural in ("pods", "services", "nodes"))
        children = [Collection(world.pods, pods, SELECTOR), Collection(world.services, services, SELECTOR)]
        self._children = [
            informer(each.path_of(namespace), each.cache, selector=each.selector, within=namespace)
            for each in children
            for namespace in self._namespaces
        ]
        self._nodes: list[Informer] = []
        if self._gatekeeper is not None:
            self._nodes.append(informer(nodes(None), self._gatekeeper.nodes))
            self._children.append(informer(pods(None), self._gatekeeper.pods))
            children += Collection(self._gatekeeper.pods, pods), Collection(self._gatekeeper.nodes, nodes)
        # Pods after jobs: so none seems lost.
        self._watches: list[Watch] = [*self.jobs, *self._nodes, *self._children]
        self._again = Again(client, [Collection(world.jobs, job_collection), *children])
        self._unreadable = UnreadableReports(
            client, acts, [(watch.path.rpartition("/")[2], watch.cache) for watch in self._watches], owner=world.owner
        )

        self._proxy = ApiServerProxy(client.access) if _asks_through_api_server(settings, client) else None
        ask = self._proxy.ask if self._proxy is not None else ask_directly
        self._agents = Agents(
            world,
            lambda uid: agent_token(self._token_of(uid)),
            world.wake,
            acts,
            interval=settings.progress_interval_seconds,
            per_second=settings.progress_per_second,
            ask=ask,
        )
        self._leader_addresses = LeaderAddresses(world, self._token_of, acts, ask)
        self._pod_events = PodEvents(client, world, world.wake, acts)
        sources = Sources(live_of=self._agents.live, event_of=self._pod_events.event)
        self._silent_pods: SilentPods | None = None
        if self._proxy is None:
            # Through the API server nothing is learned of whether a node is there.
            self._silent_pods = SilentPods(
                world, lambda uid: agent_token(self._token_of(uid)), self._agents.live, world.wake, acts
            )
            silent = self._silent_pods
            sources = replace(sources, unreachable_of=silent.unreachable, silent_of=silent.silent)
        if self._gatekeeper is not None:
            sources = replace(sources, admission_of=self._gatekeeper.admission)
        self._site = Site(
            trainer_image=settings.trainer_image,
            token="",
            defaults=settings.pods,
            network_policies=settings.network_policies,
            operator=_own_pods(settings.release),
        )
        ask = self._proxy.ask if self._proxy is not None else ask_directly
        orders = HangOrders(world, lambda uid: agent_token(self._token_of(uid)), ask)
        self._executor = Executor(client, world, self._site_of, orders.give)
        self._reconciler = Reconciler(
            client, world, self._executor, self._queue, refused, sources, active=acts, recorder=self._metrics
        )

        self._metrics.registry.register(Figures(self._gauges, self._counters, self._unreadable.counts))
        self.health = Health(self._watches, self._lag, self._metrics, self._leadership.describe)

    async def prepare(self) -> None:
        """Returns when the API server serves jobs. Health is answered from the begin."""
        # Health takes a loop that is not measured for one that hangs.
        self._measuring = asyncio.create_task(self._lag.run())
        await self.health.serve(self._settings.health_address, self._settings.health_port)
        _, port = self.health.address or ("", 0)
        logger.info("health is answered at %s, port %d", self._settings.health_address or "all addresses", port)
        if self._token_key is None:
            assert self._settings.token_key_secret is not None
            self._token_key = await key_of_secret(self._client, self._settings.token_key_secret)
        await wait_for_jobs(self._client, self._namespaces[0])
        leases = [(namespace, self._settings.lease_name) for namespace in self._settings.lease_namespaces]
        missing = await missing_rights(
            self._client,
            self._namespaces,
            leases if self._election is not None else [],
            gate=self._settings.gang_gate,
            history=self._history is not None,
            network_policies=self._settings.network_policies,
        )
        log_missing(missing)
        if self._proxy is not None:
            log_missing_proxy_rights(await missing_proxy_rights(self._client, self._namespaces))
        # From here on a write needs the leadership: making the key and asking for rights did not.
        self._client.may_write = self._leadership.acts

    async def work(self) -> None:
        """Works until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                # Jobs first: pods listed later are never older than the status of their job, so none seems lost.
                tasks.create_task(self._unreadable.run())
                tasks.create_task(self._again.run())
                # Nodes, too: of a pod that names too many resources those count that nodes have.
                for jobs in self.jobs:
                    await jobs.wait_synced()
                for group in (self._nodes, self._children):
                    for informer in group:
                        tasks.create_task(informer.run())
                    for informer in group:
                        await informer.wait_synced()
                logger.info("ready: %d jobs, %d pods", len(self._world.jobs), len(self._world.pods))
                logger.info("pods of jobs that name no image get %s", self._site.trainer_image)
                for _ in range(self._settings.workers):
                    tasks.create_task(self._reconciler.work())
                tasks.create_task(self._leadership.run(self._watches, self._begin_to_act, self._end_to_act))
                tasks.create_task(self._pod_events.run())
                if self._settings.progress_interval_seconds:
                    tasks.create_task(self._agents.run())
                    tasks.create_task(self._leader_addresses.run())
                    if self._silent_pods is not None:
                        tasks.create_task(self._silent_pods.run())
                if self._history is not None:
                    tasks.create_task(self._history.run())
                if self._election is not None:
                    tasks.create_task(self._election.run())
        finally:
            if self._gatekeeper is not None:
                await self._gatekeeper.close()
            if self._election is not None:
                await self._election.release()

    async def close(self) -> None:
        """Health is answered no more; a second call does nothing."""
        if self._measuring is not None:
            self._measuring.cancel()
        await self.health.close()
        if self._proxy is not None:
            await self._proxy.close()

    def _site_of(self, job: Job) -> Site:
        return replace(self._site, token=self._token_of(job.uid))

    def _token_of(self, job_uid: str) -> str:
        assert self._token_key is not None
        return hmac.new(self._token_key, job_uid.encode(), hashlib.sha256).hexdigest()

    def _begin_to_act(self) -> None:
        """This replica acts from now on. What it knew of its own requests is of another time."""
        self._metrics.leads(True)
        self._world.problems.clear()
        self._reconciler.refused.forget_all()
        self._unreadable.begin()
        self._executor.forget_all()
        if self._gatekeeper is not None:
            self._gatekeeper.begin()
        if self._history is not None:
            self._history.begin(self._world)
        for key in self._world.all_keys():
            self._queue.add(key)

    def _end_to_act(self) -> None:
        """This replica may not act any more, or not yet."""
        self._metrics.leads(False)

    def _gauges(self) -> dict[str, float]:
        return {
            "leader": float(self._leadership.acts()),
            "queue_depth": len(self._queue),
            "event_loop_lag_seconds": self._lag.worst,
            "cached_jobs": len(self._world.jobs),
            "cached_pods": len(self._world.pods),
            "kept_bytes": self._world.budget.total,
        }

    def _counters(self) -> dict[str, float]:
        return {
            "informer_lists": sum(watch.lists for watch in self._watches),
            **self._agents.counts,
        }


def _asks_through_api_server(settings: Settings, client: Client) -> bool:
    """Whether agents are asked through the API server."""
    if not settings.progress_interval_seconds:
        return False
    by_itself = settings.agent_access is AgentAccess.AUTO and not client.access.in_pod
    return by_itself or settings.agent_access is AgentAccess.API_SERVER


def _own_pods(release: str) -> OperatorPods | None:
    """The pods of a release "namespace/name", by the chart's label; None without a release."""
    namespace, _, name = release.partition("/")
    return OperatorPods(namespace, {"app.kubernetes.io/instance": name}) if namespace and name else None


async def serve(settings: Settings) -> None:
    """The whole life of the process: until SIGTERM or SIGINT."""
    key = file_or_random_key(settings)
    access = find_access(settings.kubeconfig, settings.context)
    client = Client(access, max_in_flight=settings.max_in_flight, timeout=settings.request_timeout_seconds)
    # Renewals do not queue behind the work that they are the permission for.
    lease_client = Client(access, max_in_flight=1, retry_delays=(0.0,))
    election = _election(settings, lease_client) if settings.leader_elect else None
    try:
        await Host(Operator(settings, client, election, key)).run()
    finally:
        await client.close()
        await lease_client.close()


def _election(settings: Settings, client: Client) -> AnyElection:
    # A name that comes again, as a StatefulSet's, would take the lease of its former life for its own.
    replica = f"{settings.replica_name}_{uuid.uuid4().hex[:8]}"
    me = f"{settings.release}/{replica}" if settings.release else replica
    wider = settings.cluster_lease_namespace if settings.namespaces else None
    namespaces = settings.lease_namespaces
    terms = terms_of(settings.lease_duration_seconds, len(namespaces))
    if len(namespaces) > 1:
        return Elections(client, namespaces, settings.lease_name, me, terms, wider_namespace=wider)
    return Election(client, namespaces[0], settings.lease_name, me, terms, wider_namespace=wider)


def main() -> None:
    """Console script."""
    settings = read_settings(sys.argv[1:])
    set_up_logging(settings.log_level, json_lines=settings.json_logs)
    # What is loaded by now stays: looking through it for garbage stops everything for 0.1 s, now and then.
    gc.freeze()
    try:
        # Not uvloop: see docs/decisions/0003-asyncio-loop-not-uvloop.md.
        asyncio.run(serve(settings))
    except (AccessError, OSError) as error:
        logger.error("cannot start: %s", error)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
