"""Rules about the job as a whole: its name, and what may change once it has run."""

import re
from dataclasses import dataclass
from typing import Any

from disttrain_api.names import MAX_JOB_NAME_LENGTH
from disttrain_api.rules.rule import validation
from disttrain_api.spec import JobSpec

_DNS_1035 = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
_NAME = "self.metadata.name"


@dataclass(frozen=True)
class NameRule:
    """A rule about `metadata.name`; its sentence may hold `{name}` and `{length}`."""

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
        sentence=f"the name has {{length}} characters and may have at most {MAX_JOB_NAME_LENGTH}:"
        " names of pods and hosts contain it",
        pattern=f"^.{{0,{MAX_JOB_NAME_LENGTH}}}$",
    ),
    NameRule(
        id="NameLetters",
        sentence="'{name}' must begin with a lower-case letter, hold lower-case letters, digits and '-' only, and"
        " end with a letter or digit: a Service has this name",
        pattern=_DNS_1035,
    ),
)


_HAS_RUN = "has(oldSelf.status) && has(oldSelf.status.attempt) && oldSelf.status.attempt > 0"
# A write to /status leaves the spec as it is, any other write the status. This is cheaper to find out than whether all
# of the spec is as it was, which the API server would compare at every step of a job.
_STATUS_IS_WRITTEN = "has(self.status) && self.status != oldSelf.status"


# Then it has no pods, and those of the next attempt are made of the spec as it is by then. Servers may come and go,
# too: the job's Service, which is made once, selects the same pods of programs of one's own with them and without. With
# `training` the mode decides whether there are some, and that stays.
_IS_IDLE = "oldSelf.spec.suspend && has(oldSelf.status.phase) && oldSelf.status.phase == 'Suspended'"


@dataclass(frozen=True)
class FreezeRule:
    """Parts of the spec that stay as they are, from the first attempt on or always.

    Only the API server sees the old object, so there is nothing for Python to check.
    """

    parts: tuple[str, ...]
    when: str
    """Follows the part's name in the sentence."""
    advice: str
    free: tuple[str, ...] = ()
    """CEL expressions; where one is true all may change."""
    idle: tuple[str, ...] = ()
    """Parts that may change while the job is Suspended."""

    def sentence(self, part: str) -> str:
        """Return the message for the first part that has changed."""
        if part in self.idle:
            return f"`{part}` {self.when}, but while it is Suspended: set `spec.suspend` first"
        return f"`{part}` {self.when}: {self.advice}"

    def validation(self) -> dict[str, str]:
        """The entry under `x-kubernetes-validations` of the root; it exists for updates only, as it names `oldSelf`."""
        unchanged = {part: _unchanged(part) for part in self.parts}
        kept = [same for part, same in unchanged.items() if part not in self.idle]
        if self.idle:
            kept.append(f"({_IS_IDLE} || {' && '.join(unchanged[part] for part in self.idle)})")
        cel = " || ".join([*self.free, f"({' && '.join(kept)})"])
        changed = " : ".join(f"!{same} ? '{part}'" for part, same in unchanged.items() if part not in self.idle)
        at = self.parts[0] if len(self.parts) == 1 else "spec"
        entry = validation(cel, self.sentence("{part}"), {"part": f"({changed} : '')"}, f".{at}")
        if not self.idle:
            return entry
        # Where all others are as they were, one of these has changed while it may not.
        *first, last = (f"'{self.sentence(part)}'" for part in self.idle)
        idle = (
            "".join(f"!{unchanged[part]} ? {expression} : " for part, expression in zip(self.idle, first, strict=False))
            + last
        )
        name = f"({changed} : '')"
        expression = entry["messageExpression"].replace(name, "part")
        return entry | {"messageExpression": f"[{name}].map(part, part != '' ? {expression} : {idle})[0]"}


def _is_always_there(path: str) -> bool:
    """Return whether the field has a default, or must be given, as all fields above it."""
    model: Any = JobSpec
    for name in path.split(".")[1:]:
        (field,) = (field for field in model.model_fields.values() if field.alias == name)
        if not field.is_required() and field.default is None:
            return False
        model = field.annotation
    return True


def _unchanged(path: str) -> str:
    # Optional values (`.?`) would read better; the API server takes them for endless when it estimates a rule's cost.
    here, before = f"self.{path}", f"oldSelf.{path}"
    same = f"{here} == {before}"
    if not _is_always_there(path):
        same = f"has({here}) == has({before}) && (!has({here}) || {same})"
    return f"({same})"


_FOLDER = "`training.checkpoint.folder`"
FREEZE_RULES = (
    # Everything but `suspend`, the limits beside it, and what of `runPolicy` the next look or pod may go by.
    FreezeRule(
        (
            "spec.workers",
            "spec.parameterServers",
            "spec.parallelism",
            "spec.training",
            "spec.storage",
            "spec.progress",
            "spec.runPolicy.restartPolicy",
            "spec.runPolicy.restartBackoffSeconds",
            "spec.runPolicy.failurePolicy",
            "spec.runPolicy.successPolicy",
            "spec.runPolicy.nodeSuspicion",
            "spec.runPolicy.cleanPodPolicy",
            "spec.runPolicy.disruptionBudget",
            "spec.runPolicy.schedulingPolicy",
        ),
        "may not change once the job has run",
        f"create another job, which resumes from the checkpoints of this one if {_FOLDER} names their folder",
        (f"!({_HAS_RUN})", f"({_STATUS_IS_WRITTEN})"),
        ("spec.workers", "spec.parameterServers"),
    ),
    # Another controller may be at work on a job that has no attempt of ours.
    FreezeRule(("spec.managedBy",), "may never change", "create another job"),
)
