"""Rules about the job as a whole: its name, and what may change once it has run."""

import re
from dataclasses import dataclass

from disttrain_api.names import MAX_JOB_NAME_LENGTH
from disttrain_api.rules.rule import validation

_DNS_1035 = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_NAME = "self.metadata.name"


@dataclass(frozen=True)
class NameRule:
    """A rule about `metadata.name`; its sentence may hold `{name}` and `{length:d}`."""

    id: str
    sentence: str
    pattern: str
    """The name is fine where this matches: one expression for Python and for CEL."""

    def problem(self, name: str) -> str | None:
        """The sentence where the name breaks the rule, else None."""
        if re.fullmatch(self.pattern.strip("^$"), name):
            return None
        return self.sentence.format(name=name, length=len(name))

    def validation(self) -> dict[str, str]:
        """The entry under `x-kubernetes-validations` of the root."""
        values = {"name": _NAME, "length": f"{_NAME}.size()"}
        return validation(f"{_NAME}.matches('{self.pattern}')", self.sentence, values, ".metadata.name")


NAME_RULES = (
    NameRule(
        id="NameLength",
        sentence=f"the name has {{length:d}} characters and may have at most {MAX_JOB_NAME_LENGTH}:"
        " names of pods and hosts are made of it",
        pattern=f"^.{{0,{MAX_JOB_NAME_LENGTH}}}$",
    ),
    NameRule(
        id="NameLetters",
        sentence="'{name}' must begin with a lower-case letter, hold lower-case letters, digits and '-' only, and"
        " end with a letter or digit: a Service has this name",
        pattern=_DNS_1035,
    ),
)


@dataclass(frozen=True)
class FreezeRule:
    """A part of the spec that stays as it is, from the first attempt on or always.

    Only the API server sees the old object, so there is nothing for Python to check.
    """

    path: str
    optional: bool = True
    """Whether the part may be absent."""
    always: bool = False
    """Whether it stays from the job's creation on."""

    @property
    def sentence(self) -> str:
        """What the user reads."""
        when = "may never change" if self.always else "may not change once the job has run"
        return f"`{self.path}` {when}: delete the job and make it again"

    def validation(self) -> dict[str, str]:
        """The entry under `x-kubernetes-validations` of the root; it exists for updates only, as it names `oldSelf`."""
        unchanged = f"self.{self.path} == oldSelf.{self.path}"
        if self.optional:
            unchanged = f"has(self.{self.path}) == has(oldSelf.{self.path}) && (!has(self.{self.path}) || {unchanged})"
        if self.always:
            return validation(unchanged, self.sentence, {}, f".{self.path}")
        ran = "has(oldSelf.status) && has(oldSelf.status.attempt) && oldSelf.status.attempt > 0"
        return validation(f"!({ran}) || ({unchanged})", self.sentence, {}, f".{self.path}")


_FROZEN_POLICIES = (
    "restartPolicy",
    "maxRestarts",
    "restartBackoffSeconds",
    "failurePolicy",
    "successPolicy",
    "nodeSuspicion",
    "cleanPodPolicy",
    "podSecurity",
    "disruptionBudget",
    "schedulingPolicy",
)

# Everything but suspend, the deadlines, the time-outs and the time to live of `runPolicy`.
FREEZE_RULES = (
    FreezeRule("spec.workers", optional=False),
    FreezeRule("spec.parameterServers"),
    FreezeRule("spec.parallelism", optional=False),
    FreezeRule("spec.training"),
    FreezeRule("spec.storage"),
    *(FreezeRule(f"spec.runPolicy.{field}") for field in _FROZEN_POLICIES),
    # Another controller may be at work on a job that has no attempt of ours.
    FreezeRule("spec.runPolicy.managedBy", always=True),
)
