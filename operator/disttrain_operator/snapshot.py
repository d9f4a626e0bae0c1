"""Caches -> what one decision sees: the job, its pods, what is left of deleted ones, and what could not be created.

The caches hold what is needed of each object (kept_job.py, kept_pod.py), and bounded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from disttrain_api.names import GROUP, PLURAL, VERSION
from disttrain_api.ownership import controlling_job
from disttrain_operator.decide.decision import Order
from disttrain_operator.decide.live import Live
from disttrain_operator.decide.observed import Admission, CreateProblem, Job, Observed, PodEvent, PodFacts, in_words
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.facts import Facts
from disttrain_operator.kept_job import is_long, keep, same_spec
from disttrain_operator.kept_job import read as read_job
from disttrain_operator.kept_pod import keep_pod, keep_service, read_pod
from disttrain_operator.kube.budget import Budget
from disttrain_operator.kube.cache import Cache, Raw

LEFT_OUT = "there is no room for all of its pods and Services in what the operator keeps of a namespace"

ChildKey = tuple[str, str]
"""Kind and name of a child."""
_Seen = tuple[str, bool, PodFacts | None]
"""resourceVersion of a pod, whether it is gone, and its facts."""


@dataclass(frozen=True)
class Key:
    """Key of the work queue: a job, and not its namesake."""

    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


def job_collection(namespace: str | None) -> str:
    """Path of all jobs of a namespace; None: of the cluster."""
    return f"/apis/{GROUP}/{VERSION}{_within(namespace)}/{PLURAL}"


def core_collection(plural: str, namespace: str | None) -> str:
    """Path of all objects of a core kind."""
    return f"/api/v1{_within(namespace)}/{plural}"


def child_collection(api_version: str, plural: str, namespace: str) -> str:
    """Path of all objects of a kind of child in a namespace."""
    if api_version == "v1":
        return core_collection(plural, namespace)
    return f"/apis/{api_version}{_within(namespace)}/{plural}"


def _within(namespace: str | None) -> str:
    return f"/namespaces/{namespace}" if namespace else ""


def _key(raw: Raw) -> Key:
    metadata = raw["metadata"]
    return Key(metadata["namespace"], metadata["name"], metadata["uid"])


def _own_uid(raw: Raw) -> str | None:
    uid: str | None = raw["metadata"].get("uid")
    return uid


def children_of(namespace: str, uid: str) -> str:
    """Return the group that the children of a job are kept in."""
    return f"{namespace}/{uid}"


def _child_of(raw: Raw) -> str | None:
    """Return the group of a child: a job in its own namespace that controls it. Labels say nothing of that."""
    metadata = raw["metadata"]
    uid = controlling_job(metadata)
    return None if uid is None else children_of(metadata["namespace"], uid)


class Listener:
    """Listener to changes, after the fact; this one ignores them."""

    def job_changed(self, key: Key, raw: Raw, *, gone: bool, quietly: bool = False) -> None:
        """A job is there, is another version, or is gone. quietly: nothing has to be done for this version."""

    def enqueue(self, key: Key, *, urgent: bool = False) -> None:
        """Something of what a decision on this job rests on has changed. `urgent`: a pod of it has ended, or is gone
        or about to end."""

    def pod_gone(self, namespace: str) -> None:
        """A pod of a job is gone: what it took of a quota is free."""


@dataclass(frozen=True)
class Sources:
    """Source of facts of a job that the caches do not have."""

    admission_of: Callable[[Job], Admission | None] = lambda job: None
    """The gate's word on a job."""
    live_of: Callable[[str], Live | None] = lambda uid: None
    """The last answer of a job's agent, by the job's uid."""
    unreachable_of: Callable[[str], frozenset[str]] = lambda uid: frozenset()
    """Uids of a job's pods that others miss and that are unreachable, by the job's uid."""
    silent_of: Callable[[str], frozenset[str]] = lambda uid: frozenset()
    """The same of those whose agents do not answer though their nodes live."""
    event_of: Callable[[str], PodEvent | None] = lambda uid: None
    """What holds up a pod of a job, by its Events, by the job's uid."""


NO_SOURCES = Sources()


@dataclass(frozen=True)
class Basis:
    """Basis of a decision on a job without pods: while it is equal, the same is decided until `requeue_at`."""

    version: str
    """resourceVersion of the job."""
    problems: dict[ChildKey, CreateProblem]


@dataclass
class World:
    """All that this process knows of the cluster, and what it was refused there."""

    listener: Listener = field(default_factory=Listener)
    budget: Budget = field(default_factory=Budget)
    """What the caches may take together, those of the gate too."""
    jobs: Cache = field(init=False)
    pods: Cache = field(init=False)
    services: Cache = field(init=False)
    problems: dict[str, dict[ChildKey, CreateProblem]] = field(default_factory=dict)
    """By the job's uid."""
    orders: dict[str, Order] = field(default_factory=dict)
    """The last order to restart in place, by the job's uid."""
    supported: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By the job's uid: the attempt whose Secret and claim are known to be there, and how often they were asked for
    again. They are not watched."""
    _quiet_writes: dict[str, set[str]] = field(default_factory=dict)
    """By the uids of jobs that are being written quietly: the versions of them that have come meanwhile."""
    _facts: Facts = field(default_factory=Facts)
    _pod_facts: dict[str, dict[str, _Seen]] = field(default_factory=dict)
    """By the uids of job and pod."""
    _disturbed: set[str] = field(default_factory=set)
    _awaiting: set[str] = field(default_factory=set)
    """Uids of jobs of which some pod did not simply run when they were looked at last."""

    def __post_init__(self) -> None:
        cache = partial(Cache, budget=self.budget)
        self.jobs = cache(group_of=_own_uid, trim=keep, on_change=self._job_changed)
        self.pods = cache(group_of=_child_of, trim=keep_pod, on_change=self._pod_changed)
        self.services = cache(group_of=_child_of, trim=keep_service, on_change=self._child_changed)

    def _job_changed(self, uid: str, raw: Raw) -> None:
        gone, quiet = self.jobs.get(uid) is None, self._quiet_writes.get(uid)
        if quiet is not None:
            quiet.add(raw["metadata"]["resourceVersion"])
        self.listener.job_changed(_key(raw), raw, gone=gone, quietly=quiet is not None)

    @contextmanager
    def quiet_write(self, uid: str) -> Iterator[Callable[[Raw], None]]:
        """Within the block a job is written, and nothing has to be done for the version that comes of it, which the
        watch may bring before the answer. Call what the block gets with the answer. Any other version that comes
        meanwhile has the job looked at after the block."""
        versions = self._quiet_writes[uid] = set()
        own: list[str] = []
        try:
            yield lambda raw: own.append(raw["metadata"]["resourceVersion"])
        finally:
            del self._quiet_writes[uid]
            if versions.difference(own):
                self.wake(uid)

    def _child_changed(self, group: str, raw: Raw) -> None:
        self._wake_owner(group)

    def _pod_changed(self, group: str, raw: Raw) -> None:
        gone = self.pods.get(raw["metadata"]["uid"]) is None
        self._wake_owner(group, urgent=gone or "ends" in raw)
        if gone:
            self.listener.pod_gone(raw["metadata"]["namespace"])

    def _wake_owner(self, group: str, *, urgent: bool = False) -> None:
        owner = self.owner(group)
        if owner is not None:
            self.listener.enqueue(owner, urgent=urgent)

    def wake(self, uid: str) -> None:
        """Have the job of this uid looked at, if it is known."""
        key = self.key_of(uid)
        if key is not None:
            self.listener.enqueue(key)

    def key_of(self, uid: str) -> Key | None:
        """The key of a job that exists."""
        raw = self.jobs.get(uid)
        return None if raw is None else _key(raw)

    def owner(self, group: str) -> Key | None:
        """Return the key of the job whose children are in this group; None where there is no such job."""
        namespace, _, uid = group.partition("/")
        key = self.key_of(uid)
        return key if key is not None and key.namespace == namespace else None

    def all_keys(self) -> list[Key]:
        """The keys of all jobs."""
        return [key for uid in self.jobs.groups() if (key := self.key_of(uid)) is not None]

    def snapshot(self, uid: str, sources: Sources = NO_SOURCES) -> tuple[Job, Observed] | None:
        """Return everything known of a job; None if it is gone."""
        raw = self.jobs.get(uid)
        if raw is None:
            self._forget(uid)
            return None
        job = self._job(uid, raw)
        if self._is_partial(job):
            return replace(job, unread=LEFT_OUT), Observed()
        try:
            return job, self._observed(job, sources)
        except Exception as error:
            # What is wrong with the pods of one job costs no other anything.
            return replace(job, unread=f"its pods cannot be read ({in_words(error)})"), Observed()

    def _is_partial(self, job: Job) -> bool:
        group = children_of(job.namespace, job.uid)
        return any(cache.is_partial(group, job.namespace) for cache in (self.pods, self.services))

    def _observed(self, job: Job, sources: Sources) -> Observed:
        problems = self.problems.get(job.uid, {})
        return Observed(
            pods=self._pods(job),
            problems=tuple(problems[child] for child in sorted(problems)),
            services=frozenset(self._services(job)),
            supported=self.supported.get(job.uid),
            admission=sources.admission_of(job),
            live=sources.live_of(job.uid),
            order=self.orders.get(job.uid),
            unreachable=sources.unreachable_of(job.uid),
            silent=sources.silent_of(job.uid),
            pod_event=sources.event_of(job.uid),
        )

    def basis(self, uid: str) -> Basis | None:
        """What a decision on a job without pods rests on, but the time; None where it is gone, or has or had pods."""
        raw = self.jobs.get(uid)
        if raw is None:
            return None
        group = children_of(raw["metadata"]["namespace"], uid)
        if self.pods.group(group) or self.pods.gone(group):
            return None
        return Basis(raw["metadata"]["resourceVersion"], self.problems.get(uid, {}))

    def job(self, uid: str) -> Job | None:
        """The facts of a job; None where it is gone, or its newest version cannot be read."""
        raw = self.jobs.get(uid)
        return None if raw is None or self.jobs.is_unreadable(uid) else self._job(uid, raw)

    def has_replacements(self, uid: str) -> bool:
        """Whether pods of the job's last attempt were made anew, as its status says."""
        raw = self.jobs.get(uid)
        return raw is not None and bool(raw["replaced"])

    def checkpoint_request(self, uid: str) -> str | None:
        """The last request for a checkpoint of a job; None: there is none."""
        raw = self.jobs.get(uid)
        return None if raw is None else raw.get("checkpoint_request")

    def has_service(self, job: Job, name: str) -> bool:
        """Whether the job's Service of that name exists."""
        return name in self._services(job)

    def _services(self, job: Job) -> Iterator[str]:
        group = self.services.group(children_of(job.namespace, job.uid))
        return (service["metadata"]["name"] for service in group)

    def _pods(self, job: Job) -> tuple[PodFacts, ...]:
        """Facts of the job's pods. A change concerns one of thousands: the others' are read once per version."""
        group = children_of(job.namespace, job.uid)
        known = self._pod_facts.get(job.uid, {})
        now = self._pod_facts[job.uid] = {}
        for gone, pods in ((False, self.pods.group(group)), (True, self.pods.gone(group))):
            for raw in pods:
                metadata = raw["metadata"]
                seen = known.get(metadata["uid"])
                if seen is None or seen[:2] != (metadata["resourceVersion"], gone):
                    seen = metadata["resourceVersion"], gone, pod_facts(read_pod(raw), gone=gone)
                now[metadata["uid"]] = seen
        facts = [facts for _, _, facts in now.values() if facts is not None]
        (self._disturbed.discard if all(pod.undisturbed for pod in facts) else self._disturbed.add)(job.uid)
        (self._awaiting.add if any(pod.awaits_address for pod in facts) else self._awaiting.discard)(job.uid)
        return tuple(sorted(facts, key=lambda pod: (pod.attempt, pod.role, pod.index, pod.uid)))

    def looked_at(self) -> list[str]:
        """The uids of jobs that were looked at."""
        return list(self._pod_facts)

    def simply_runs(self, uid: str) -> bool:
        """Whether the programs of all pods of a job had started when it was looked at last, and nothing was about to
        end one of them."""
        return uid in self._pod_facts and uid not in self._disturbed

    def awaits_address(self, uid: str) -> bool:
        """Whether an agent of a job waited for the address of worker 0 when it was looked at last."""
        return uid in self._awaiting

    def last_seen(self, uid: str) -> list[PodFacts]:
        """The pods of a job as they were when it was looked at last: a change of theirs has it looked at again."""
        return [facts for _, _, facts in self._pod_facts.get(uid, {}).values() if facts is not None]

    def long_to_read(self, uid: str) -> Raw | None:
        """The newest version of a job whose spec is long and not known yet; None where a look at the job is quick."""
        raw = self.jobs.get(uid)
        if raw is None or not is_long(raw):
            return None
        known = self._facts.get(uid)
        return None if known is not None and same_spec(known[0], raw) else raw

    def take(self, raw: Raw, job: Job) -> None:
        """`job` was read from this version of it. A version that is no longer the newest is passed over."""
        if self.jobs.get(job.uid) is raw:
            self._facts.put(raw, job)

    def _job(self, uid: str, raw: Raw) -> Job:
        # Reading a spec costs more than a decision, and with each status the job comes back with the same one.
        read, job = self._facts.get(uid) or (None, None)
        if read is None or read["metadata"]["resourceVersion"] != raw["metadata"]["resourceVersion"]:
            former = job if read is not None and same_spec(read, raw) else None
            job = read_job(raw, former=former)
            self.take(raw, job)
        assert job is not None
        return job

    def _forget(self, uid: str) -> None:
        self.problems.pop(uid, None)
        self.supported.pop(uid, None)
        self._facts.forget(uid)
        self._pod_facts.pop(uid, None)
        self._disturbed.discard(uid)
        self._awaiting.discard(uid)
