"""Progress that is read from a program's output."""

from disttrain_api.log_rules import STEP, TOTAL_STEPS, LoggedProgress, compiled
from disttrain_api.rules.rule import Rule, Values, when
from disttrain_api.spec import JobSpec

_PATH = "spec.progress"
_ABSENT = "!has(self.progress) || "


def _group(name: str) -> str:
    """Return the beginning of a named group, as CEL's `contains` looks for it."""
    return f"(?P<{name}"


def _some_have(progress: LoggedProgress, name: str) -> bool:
    return any(_group(f"{name}>") in rule.pattern for rule in progress.log_rules)


def _some_have_cel(name: str) -> str:
    return f"self.logRules.exists(r, r.pattern.contains('{_group(f'{name}>')}'))"


def _unreadable(spec: JobSpec) -> str | None:
    """Return the first pattern that is no expression, and why; None: all are."""
    for index, rule in enumerate(spec.progress.log_rules if spec.progress is not None else ()):
        try:
            compiled(rule.pattern)
        except ValueError as error:
            return f"`logRules[{index}].pattern` is '{rule.pattern}': {error}"
    return None


def _unnamed(spec: JobSpec) -> bool:
    return spec.progress is not None and not all(_group("") in rule.pattern for rule in spec.progress.log_rules)


def _wrong_total(spec: JobSpec) -> Values | None:
    progress = spec.progress
    if progress is None:
        return None
    return when(_some_have(progress, TOTAL_STEPS) == (progress.total_steps is not None))


PROGRESS_RULES = (
    Rule(
        id="ProgressOfTraining",
        path=_PATH,
        sentence="`training` reports its progress itself: remove `progress`, or use a command of your own",
        check=lambda spec: when(spec.progress is not None and spec.training is not None),
        cel=f"{_ABSENT}!has(self.training)",
        reads=(_PATH, "spec.training"),
    ),
    Rule(
        id="ProgressNeedsCommand",
        path=_PATH,
        sentence="`progress` needs `workers.command`, whose output is read: give it there, not in the template",
        check=lambda spec: when(spec.progress is not None and spec.training is None and spec.workers.command is None),
        cel=f"{_ABSENT}has(self.training) || has(self.workers.command)",
        reads=(_PATH, "spec.training", "spec.workers.command"),
    ),
    Rule(
        id="LogRulePattern",
        path=f"{_PATH}.logRules",
        sentence="each `pattern` must be an RE2 expression with a named group for each number, such as"
        " (?P<step>[0-9]+); RE2 has no lookaround and no backreference",
        check=lambda spec: when(_unnamed(spec) or _unreadable(spec) is not None),
        # `matches` of an expression that is none is an error, which the API server shows before the sentence.
        scope=_PATH,
        cel=f"self.logRules.all(r, r.pattern.contains('{_group('')}') && [''.matches(r.pattern)].size() == 1)",
        hint=_unreadable,
    ),
    Rule(
        id="LogRulesReadStep",
        path=f"{_PATH}.logRules",
        sentence=f"one of the patterns must have a group `{STEP}`, the number of steps that are done",
        check=lambda spec: when(spec.progress is not None and not _some_have(spec.progress, STEP)),
        scope=_PATH,
        cel=_some_have_cel(STEP),
    ),
    Rule(
        id="LogRulesReadTotal",
        path=_PATH,
        sentence="exactly one of `totalSteps` and a group `totalSteps` of a pattern must say how many steps there are",
        check=_wrong_total,
        scope=_PATH,
        cel=f"has(self.totalSteps) != {_some_have_cel(TOTAL_STEPS)}",
    ),
)
