"""Whether a status says something else than another one: what is worth a write, and what is worth another look."""

from disttrain_api.status import Condition, JobStatus, Progress


def same_meaning(new: JobStatus, old: JobStatus) -> bool:
    """Whether two statuses differ in book-keeping times at most, and in the count of time that goes with each write."""
    same = _same_progress(new.progress, old.progress) and _same_conditions(new.conditions, old.conditions)
    return same and _others(new) == _others(old)


def figures_alone(new: JobStatus, old: JobStatus) -> bool:
    """Whether two statuses differ in what running ranks say of their training at most, and in the count of time. A
    decision that does nothing else would be made again on the new one, and find nothing to do."""
    return new.conditions == old.conditions and _others(new) == _others(old)


def _same_progress(new: Progress | None, old: Progress | None) -> bool:
    if new is None or old is None:
        return new is old
    return new == old or new.model_copy(update={"update_time": old.update_time}) == old


def _same_conditions(new: list[Condition], old: list[Condition]) -> bool:
    return new == old or list(map(_without_time, new)) == list(map(_without_time, old))


def _without_time(condition: Condition) -> Condition:
    return condition.model_copy(update={"last_transition_time": ""})


def _others(status: JobStatus) -> JobStatus:
    return status.model_copy(update={"conditions": [], "progress": None, "goodput": None})
