"""One look at a job, which every policy is asked about."""

from dataclasses import dataclass
from datetime import datetime
from functools import cached_property

from disttrain_api.run_policy import RunPolicy
from disttrain_api.spec import JobSpec
from disttrain_api.status import JobStatus
from disttrain_operator.decide.failures import Failures
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.observed import Observed, ReadableJob


@dataclass(frozen=True)
class Situation:
    """A job, what is observed of it and the time. What several policies derive from these is derived once."""

    job: ReadableJob
    observed: Observed
    now: datetime

    @property
    def status(self) -> JobStatus:
        """The job's status, which holds what its pods have reported."""
        return self.job.status

    @property
    def spec(self) -> JobSpec:
        """The job's spec."""
        return self.job.spec

    @property
    def run_policy(self) -> RunPolicy:
        """The spec's `runPolicy`."""
        return self.spec.run_policy

    @cached_property
    def gang(self) -> Gang:
        """The pods of the newest attempt, and of older ones."""
        return Gang(self.spec, self.status, self.observed)

    def gang_of(self, status: JobStatus) -> Gang:
        """The gang as a transition's status has it."""
        return self.gang if status is self.status else Gang(self.spec, status, self.observed)

    @cached_property
    def failures(self) -> Failures:
        """The failed members of the gang, with what the failure policy says of each."""
        return Failures(self.job, self.gang, self.now)
