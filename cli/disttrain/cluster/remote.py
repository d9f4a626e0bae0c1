"""A job as an API server holds it. Who may write its status may put anything there: what cannot be read is left out."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from disttrain_api.moved import carried_over
from disttrain_api.status import Condition, ConditionType, JobStatus
from disttrain_api.times import parse_time

Raw = dict[str, Any]


@dataclass(frozen=True)
class RemoteJob:
    """A job as the API server holds it; `raw` is the whole object."""

    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""
        return str(self.raw["metadata"]["name"])

    @property
    def namespace(self) -> str:
        """Its namespace."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def uid(self) -> str:
        """Its uid: a job that is deleted and made again has another one."""
        return str(self.raw["metadata"]["uid"])

    @cached_property
    def status(self) -> JobStatus:
        """Its status; empty if no operator has seen the job yet, or if the status cannot be read."""
        try:
            return JobStatus.model_validate(self.raw.get("status") or {}, extra="ignore")
        except ValueError:
            return JobStatus()

    @property
    def suspend(self) -> bool:
        """Whether `spec.suspend` is set, or in a job of an earlier version what was called so before."""
        spec, _ = carried_over(self.raw.get("spec"))
        return isinstance(spec, Mapping) and spec.get("suspend") is True

    def condition(self, type_: ConditionType) -> Condition | None:
        """Return its condition of that type."""
        return next((entry for entry in self.status.conditions if entry.type == type_), None)

    def holds(self, type_: ConditionType) -> bool:
        """Return whether the condition of that type is True."""
        found = self.condition(type_)
        return found is not None and found.status == "True"

    @property
    def finished(self) -> bool:
        """Whether it has come to either end."""
        return self.holds(ConditionType.FINISHED)

    @property
    def phase(self) -> str:
        """One word for people."""
        return self.status.phase or ("Suspended" if self.suspend else "Pending")

    @property
    def created(self) -> Any:
        """When it was made; None where that cannot be read."""
        return parse_time(self.raw["metadata"].get("creationTimestamp"))
