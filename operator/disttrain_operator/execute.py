"""Actions -> requests, side by side. The only module that asks for creations and deletions.

All of a gang goes out at once, at most `max_in_flight` requests at a time; only two things go ahead of its pods: a
NetworkPolicy, without which strangers might reach them, and a PodGroup, without which their scheduler may refuse them.
One pod is held back until Service, Secret and claim are there: so a gang
that is complete has all it needs, and a process that is killed half-way finds a pod missing and comes here again. A
process that has seen them for an earlier attempt holds nothing back: it asks for them once more, lest somebody took
them away, but the new pods need not wait for that.

What the API server refuses becomes a CreateProblem that the next decision sees; it stays until the child is created or
no longer wanted. Every request may be repeated: names are fixed, deletes carry a uid.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

from disttrain_api.names import Reason, Role
from disttrain_operator.children import create_child, refused_by_quota
from disttrain_operator.decide.decision import (
    Action,
    CreatePod,
    CreateSupport,
    DeleteJob,
    DeletePod,
    ReleasePod,
    RestartInPlace,
)
from disttrain_operator.decide.observed import CreateProblem, Job
from disttrain_operator.kept_pod import read_pod
from disttrain_operator.kube.cache import Cache
from disttrain_operator.kube.client import Client, Raw
from disttrain_operator.kube.errors import Conflict, Forbidden, Invalid, KubeError, NotFound
from disttrain_operator.plan.desired import (
    GangPlan,
    Site,
    claim,
    default_environment,
    disruption_budget,
    network_policy,
    pod_group,
    secret,
    service,
)
from disttrain_operator.plan.identity import child_name, pod_name
from disttrain_operator.plan.schedulers import release_patch
from disttrain_operator.snapshot import ChildKey, World, core_collection, job_collection

Work = Callable[[], Awaitable[object]]
Give = Callable[[str, RestartInPlace], Awaitable[None]]

# Creations that begin in one turn of the event loop.
_BEGUN_PER_TURN = 4
# Refusals that say nothing of the next pod of the same template.
_OF_ONE_NAME = (Reason.NAME_CONFLICT, Reason.WAITING_FOR_OLD_PODS)


class Executor:
    """Does what decisions ask for, and keeps in `world` what came of it."""

    def __init__(self, client: Client, world: World, site_of: Callable[[Job], Site], give: Give | None = None) -> None:
        """`give`: gives an order to an agent of the job with this uid."""
        self.client, self.world, self._site_of, self._give = client, world, site_of, give

    async def execute(self, job: Job, actions: Sequence[Action], *, create: bool = True) -> bool:
        """Return whether everything wanted exists now. Raises a KubeError if the API server does not answer.

        `create` False: nothing is created this time, and what is known of refusals stays known.
        """
        round_ = _Round(self.client, self.world, job, self._site_of(job))
        await self._give_orders(job, actions)
        others = [action for action in actions if create or not isinstance(action, CreatePod | CreateSupport)]
        if len(others) < len(actions):
            round_.keep_known()
        try:
            await round_.run(others)
        finally:
            if round_.problems:
                self.world.problems[job.uid] = round_.problems
            else:
                self.world.problems.pop(job.uid, None)
        if round_.supported is not None:
            self.world.supported[job.uid] = round_.supported
        return not round_.problems and len(others) == len(actions)

    async def _give_orders(self, job: Job, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, RestartInPlace) and self._give is not None:
                await self._give(job.uid, action)

    async def refused_ahead(self, job: Job, actions: Sequence[Action]) -> bool:
        """Whether a quota would refuse the first pod that these want: it is asked, and nothing is made."""
        wanted = next((action for action in actions if isinstance(action, CreatePod)), None)
        if wanted is None:
            return False
        plan = GangPlan(job, wanted.attempt, self._site_of(job), wanted.avoid)
        manifest = plan.pod(wanted.role, wanted.index, gated=wanted.gated)
        problem = await refused_by_quota(self.client, job, manifest)
        if problem is None:
            return False
        self.world.problems[job.uid] = {**self.world.problems.get(job.uid, {}), (problem.kind, problem.name): problem}
        return True

    def forget_all(self) -> None:
        """Others have acted meanwhile."""
        self.world.supported.clear()

    def forget(self, uid: str) -> None:
        """The job is gone."""
        self.world.supported.pop(uid, None)
        self.world.orders.pop(uid, None)


class _Round:
    """One job's actions of one decision."""

    def __init__(self, client: Client, world: World, job: Job, site: Site) -> None:
        self._client, self._world, self._job, self._site = client, world, job, site
        self.supported = world.supported.get(job.uid)
        self._known = world.problems.get(job.uid, {})
        self.problems: dict[ChildKey, CreateProblem] = {}
        self._refused: set[Role] = set()
        self._plans: dict[int, GangPlan] = {}
        self._support_left = 0
        self._support_tried = asyncio.Event()
        self._errors: list[KubeError] = []

    def keep_known(self) -> None:
        """Keep earlier refusals: they still hold, as far as is known."""
        self.problems.update(self._known)

    async def run(self, actions: Sequence[Action]) -> None:
        wanted = next((action for action in actions if isinstance(action, CreateSupport)), None)
        if wanted is not None:
            await self._side_by_side(list(self._ahead_of_pods(wanted)))
            if self._support_is_refused():
                actions = [action for action in actions if not isinstance(action, CreatePod)]
        had_support = self.supported is not None and self._has_service()
        support = [] if wanted is None else [self._counted(work) for work in self._support(wanted)]
        self._support_left = len(support)
        others = [work for action in actions for work in self._other(action)]
        first, then = self._in_order([action for action in actions if isinstance(action, CreatePod)])
        creations = [[self._creation(pod) for pod in part] for part in (first, then)]
        if support and first and not had_support:
            last = creations[1] or creations[0]
            last.append(self._after_support(last.pop()))
        await self._side_by_side([*support, *others, *creations[0]])
        await self._side_by_side(creations[1])
        if wanted is not None and not self._support_is_refused() and not self._is_supported(wanted):
            self.supported = wanted.attempt, wanted.tries

    def _counted(self, work: Work) -> Work:
        async def counted() -> None:
            try:
                await work()
            finally:
                self._support_left -= 1
                if not self._support_left:
                    self._support_tried.set()

        return counted

    def _after_support(self, work: Work) -> Work:
        async def held_back() -> None:
            await self._support_tried.wait()
            if not self._support_is_refused() and not self._errors:
                await work()

        return held_back

    def _support_is_refused(self) -> bool:
        return any(kind != "Pod" for kind, _ in self.problems)

    def _in_order(self, pods: list[CreatePod]) -> tuple[list[CreatePod], list[CreatePod]]:
        """A role that was refused the last time sends one pod ahead; the others follow if that one is let in."""
        ahead: dict[Role, CreatePod] = {}
        for pod in pods:
            if self._key(pod) in self._known:
                ahead.setdefault(pod.role, pod)
        first = [pod for pod in pods if ahead.get(pod.role, pod) is pod]
        then = [pod for pod in pods if ahead.get(pod.role, pod) is not pod]
        return first, then

    def _is_supported(self, wanted: CreateSupport) -> bool:
        """Whether all but the Service was made, or asked for as often as it is wanted now."""
        return self.supported is not None and self.supported >= (wanted.attempt, wanted.tries)

    def _ahead_of_pods(self, wanted: CreateSupport) -> Iterator[Work]:
        if self._is_supported(wanted):
            return
        for manifest in (network_policy(self._job, self._site), pod_group(self._job, wanted.attempt)):
            if manifest is not None:
                yield partial(self._create, manifest)

    def _support(self, wanted: CreateSupport) -> Iterator[Work]:
        job = self._job
        if not self._has_service():
            yield lambda: self._create(service(job, self._site), self._world.services)
        if self._is_supported(wanted):
            return
        needed = (secret(job, self._site), default_environment(job, self._site), claim(job), disruption_budget(job))
        for manifest in needed:
            if manifest is not None:
                yield partial(self._create_needed, manifest, again=wanted.tries > 0)

    def _has_service(self) -> bool:
        return self._world.has_service(self._job, child_name(self._job.name, self._job.uid))

    def _other(self, action: Action) -> Iterator[Work]:
        if isinstance(action, DeletePod):
            yield lambda: self._delete_pod(action)
        elif isinstance(action, ReleasePod):
            yield lambda: self._release_pod(action)
        elif isinstance(action, DeleteJob):
            yield self._delete_job

    def _creation(self, action: CreatePod) -> Work:
        return lambda: self._create_pod(action)

    async def _create_pod(self, action: CreatePod) -> None:
        if action.role in self._refused:
            # The same template would meet the same refusal. What is known of this pod stays known.
            if (key := self._key(action)) in self._known:
                self.problems[key] = self._known[key]
            return
        plan = self._plans.get(action.attempt)
        if plan is None:
            plan = self._plans[action.attempt] = GangPlan(self._job, action.attempt, self._site, action.avoid)
        manifest = plan.pod(
            action.role, action.index, gated=action.gated, replacement=action.replacement, dead=action.dead
        )
        problem = await self._create(manifest, self._world.pods)
        if problem is not None and problem.reason not in _OF_ONE_NAME:
            self._refused.add(action.role)

    async def _create(self, manifest: Raw, cache: Cache | None = None) -> CreateProblem | None:
        outcome = await create_child(self._client, self._job, manifest, None if cache is None else cache.trimmed)
        if isinstance(outcome, CreateProblem):
            self.problems[outcome.kind, outcome.name] = outcome
            return outcome
        if cache is not None and outcome.raw is not None:
            cache.observe(outcome.raw)
        return None

    async def _create_needed(self, manifest: Raw, *, again: bool) -> None:
        problem = await self._create(manifest)
        if again and problem is not None and problem.kind == "Secret" and problem.reason == Reason.QUOTA_EXCEEDED:
            # A full quota says so of a Secret that fills it, too, which nobody here may read.
            del self.problems[problem.kind, problem.name]

    async def _delete_pod(self, action: DeletePod) -> None:
        path = f"{core_collection('pods', self._job.namespace)}/{action.name}"
        try:
            answer = await self._client.delete(
                path, uid=action.uid, grace_seconds=action.grace_seconds, trim=self._world.pods.trimmed
            )
        except (NotFound, Conflict):
            return  # it is gone, or the name is another's by now
        if answer.get("kind") != "Status":
            self._world.pods.observe(answer)

    async def _release_pod(self, action: ReleasePod) -> None:
        pod = self._world.pods.get(action.uid)
        if pod is None:
            return
        path = f"{core_collection('pods', self._job.namespace)}/{action.name}"
        try:
            patch = release_patch(read_pod(pod), action.node, action.at)
            answer = await self._client.patch(path, patch, trim=self._world.pods.trimmed)
        except (NotFound, Conflict):
            return  # it is gone, or the name is another's by now
        except (Forbidden, Invalid) as error:
            message = f"it cannot be released: {error.message}"
            self.problems["Pod", action.name] = CreateProblem(
                "Pod", action.name, error.code, Reason.NOT_RELEASED, message
            )
        else:
            self._world.pods.observe(answer)

    async def _delete_job(self) -> None:
        with suppress(NotFound, Conflict):
            path = f"{job_collection(self._job.namespace)}/{self._job.name}"
            await self._client.delete(path, uid=self._job.uid)

    def _key(self, action: CreatePod) -> ChildKey:
        return "Pod", pod_name(self._job.name, self._job.uid, action.role, action.index, action.attempt)

    async def _side_by_side(self, works: Sequence[Work]) -> None:
        """All of it, as many at a time as the client lets through. The first error stops what has not begun."""
        waiting = iter(works)

        async def work_off(turns: int) -> None:
            for _ in range(turns):
                await asyncio.sleep(0)
            for work in waiting:
                if self._errors:
                    return
                try:
                    await work()
                except KubeError as error:
                    self._errors.append(error)

        # A request leaves when its turn of the loop ends: the API server need not wait until all are made.
        workers = range(min(len(works), self._client.max_in_flight))
        await asyncio.gather(*(work_off(worker // _BEGUN_PER_TURN) for worker in workers))
        if self._errors:
            raise self._errors[0]
