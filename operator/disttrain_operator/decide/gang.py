"""The pods of a job, sorted once: the current attempt's gang, and what is left of older ones."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from disttrain_api.names import Role
from disttrain_api.spec import JobSpec
from disttrain_operator.decide.observed import Observed, PodFacts

Identity = tuple[Role, int]


def expected(spec: JobSpec) -> Iterator[Identity]:
    """Role and index of every pod of a gang."""
    yield from ((Role.WORKER, index) for index in range(spec.workers.replicas))
    if spec.parameter_servers is not None:
        yield from ((Role.PS, index) for index in range(spec.parameter_servers.replicas))


@dataclass(frozen=True)
class Gang:
    """The pods of one attempt, and of older ones."""

    spec: JobSpec
    attempt: int
    observed: Observed

    @cached_property
    def members(self) -> tuple[Identity, ...]:
        """Role and index of every pod of the gang."""
        return tuple(expected(self.spec))

    @cached_property
    def pods(self) -> tuple[PodFacts, ...]:
        """Pods of the attempt that exist."""
        return tuple(pod for pod in self.observed.pods if pod.attempt == self.attempt and not pod.gone)

    @cached_property
    def seen(self) -> tuple[PodFacts, ...]:
        """Pods of the attempt that exist or were deleted a short while ago."""
        return tuple(pod for pod in self.observed.pods if pod.attempt == self.attempt)

    @cached_property
    def old(self) -> tuple[PodFacts, ...]:
        """Existing pods of other attempts."""
        return tuple(pod for pod in self.observed.pods if pod.attempt != self.attempt and not pod.gone)

    @cached_property
    def missing(self) -> tuple[Identity, ...]:
        """Members that neither exist nor have done their work."""
        there = {(pod.role, pod.index) for pod in self.pods} | self.succeeded
        return tuple(identity for identity in self.members if identity not in there)

    @cached_property
    def succeeded(self) -> frozenset[Identity]:
        """Members that ended with exit code 0."""
        return frozenset((pod.role, pod.index) for pod in self.seen if pod.succeeded)

    @cached_property
    def failed(self) -> tuple[PodFacts, ...]:
        """Pods that ended otherwise, also those deleted a short while ago."""
        return tuple(pod for pod in self.seen if pod.failed)

    @cached_property
    def unstarted(self) -> tuple[PodFacts, ...]:
        """Existing pods whose trainer container does not run yet."""
        return tuple(pod for pod in self.pods if not pod.started)

    @property
    def all_started(self) -> bool:
        return not self.missing and not self.unstarted

    @property
    def all_workers_succeeded(self) -> bool:
        return all((Role.WORKER, index) in self.succeeded for index in range(self.spec.workers.replicas))
