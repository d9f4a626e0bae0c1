"""A job with all that is known of it, and phrases that several answers of `why` have in common. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from disttrain.cluster.remote import RemoteJob
from disttrain.terminal import duration, plain
from disttrain.views.advice import CLASSES, advice_on
from disttrain_api.names import Reason
from disttrain_api.status import Attempt, Verdict
from disttrain_api.times import parse_time
from disttrain_operator.decide.observed import PodFacts
from disttrain_operator.decide.reading import pod_facts
from disttrain_operator.decide.verdict import program_message

Raw = Mapping[str, Any]
Finding = tuple[str | None, str | None]


@dataclass(frozen=True)
class Why:
    """The answer."""

    paragraph: str
    todo: tuple[str, ...] = ()
    """Sentences, each of which says what one would do."""
    next: tuple[str, ...] = ()
    """Commands that show more."""


@dataclass(frozen=True)
class Case:
    """All that is known."""

    job: RemoteJob
    pods: Sequence[PodFacts]
    events: Sequence[Raw]
    now: datetime
    misfit: Finding = (None, None)
    """What a pod that has no node asks for that none has, and what to do."""

    @property
    def run_policy(self) -> Raw:
        """The job's runPolicy as it is stored; its defaults stand in it."""
        spec = self.job.raw.get("spec")
        policy = spec.get("runPolicy") if isinstance(spec, Mapping) else None
        return policy if isinstance(policy, Mapping) else {}

    @property
    def attempt(self) -> Attempt | None:
        """The last attempt."""
        return self.job.status.attempts[-1] if self.job.status.attempts else None

    @property
    def current_pods(self) -> list[PodFacts]:
        """Pods of the current attempt."""
        return [pod for pod in self.pods if pod.attempt == self.job.status.attempt]

    def since(self, time: str | None) -> str:
        """Return how long ago a time of the status was: "12m"; "?" where it cannot be read."""
        moment = parse_time(time)
        return duration((self.now - moment).total_seconds()) if moment is not None else "?"


def facts_of(raw: Raw) -> PodFacts | None:
    try:
        return pod_facts(raw)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def last_verdict(case: Case) -> tuple[Verdict | None, int]:
    """The verdict over the last attempt that has one, and the attempt's number."""
    for attempt in reversed(case.job.status.attempts):
        if attempt.verdict is not None and attempt.verdict.reason != Reason.SUSPENDED:
            return attempt.verdict, attempt.number
    return None, case.job.status.attempt


def because(verdict: Verdict | None) -> str:
    return (
        f"{plain(verdict.message).rstrip('.')} ({plain(verdict.reason)})"
        if verdict is not None
        else "of an unknown cause"
    )


def of_class(verdict: Verdict | None) -> list[str]:
    sentence = CLASSES.get(verdict.class_ or "") if verdict is not None else None
    rule = f"the failure policy's rule {plain(verdict.rule)} decided" if verdict is not None and verdict.rule else None
    return [f"{capital(text)}." for text in (rule, sentence) if text]


def words_of(case: Case, verdict: Verdict | None) -> list[str]:
    """Return the last output of the failed program, if its pod still exists: the status does not hold it."""
    pod = next((pod for pod in case.pods if verdict is not None and pod.name == verdict.pod), None)
    last_words = plain(program_message(pod)).rstrip(".") if pod is not None else ""
    return (
        [f"It said: {last_words}."]
        if last_words and verdict is not None and last_words not in plain(verdict.message)
        else []
    )


def pods_replaced(case: Case) -> Finding:
    replacements = case.attempt.replacements if case.attempt is not None else []
    if not replacements:
        return None, None
    last = replacements[-1]
    when = f"{plain(last.pod)} {case.since(last.time)} ago"
    return f"{len(replacements)} times a single pod was recreated, last {when} ({plain(last.reason)}).", None


def restarts_in_place(attempt: Attempt) -> str | None:
    """Return how often the attempt's ranks have started again in their pod, and why, as a part of a sentence; None:
    never."""
    count = attempt.restarts_in_place or 0
    if not count:
        return None
    why = plain(attempt.last_restart_in_place or "of an unknown cause").rstrip(".")
    return f"ranks were restarted in place {count} time{'' if count == 1 else 's'}, last because {why}"


def todo_of(verdict: Verdict | None, job: RemoteJob) -> tuple[str, ...]:
    return tuple(filled(advice, job) for advice in advice_on(verdict.reason, verdict)) if verdict is not None else ()


def resumes_from(case: Case) -> str:
    status = case.job.status
    if status.checkpoint is not None:
        return f"It continues from the checkpoint of step {status.checkpoint.step}."
    if not has_storage(case.job):
        return "It has no `storage`, so it begins at step 0 again."
    return "No checkpoint is known yet; it continues from the newest complete one."


def log_commands(case: Case, number: int, verdict: Verdict | None) -> tuple[str, ...]:
    name = case.job.name
    kept = [pod for pod in case.pods if pod.attempt == number and pod.program_started]
    for pod in kept:
        if verdict is not None and pod.name == verdict.pod and pod.exit is not None and pod.exit.init_container:
            log = f"kubectl logs {pod.name} -n {case.job.namespace} -c {plain(pod.exit.init_container)}"
            return log, f"disttrain describe {name}"
    rank = f" --rank {verdict.rank}" if verdict is not None and verdict.rank is not None else ""
    logs = (f"disttrain logs {name} --attempt {number}{rank}",) if kept else ()
    return (*logs, f"disttrain describe {name}")


def has_storage(job: RemoteJob) -> bool:
    spec = job.raw.get("spec")
    # A program of the user's own keeps what it keeps.
    return not isinstance(spec, Mapping) or "storage" in spec or "training" not in spec


def pods_of(job: RemoteJob) -> str:
    spec = job.raw.get("spec")
    count = 0
    for role in ("workers", "parameterServers"):
        part = spec.get(role) if isinstance(spec, Mapping) else None
        replicas = part.get("replicas", 1) if isinstance(part, Mapping) else 0
        count += replicas if isinstance(replicas, int) else 0
    return f"{count} pod{'' if count == 1 else 's'}"


def filled(advice: str, job: RemoteJob) -> str:
    return advice.replace("{name}", job.name).replace("{namespace}", job.namespace)


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]
