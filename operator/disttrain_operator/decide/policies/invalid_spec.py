"""A spec that admission could not refuse and that cannot run."""

from disttrain_api.bounds import listed
from disttrain_api.names import Reason
from disttrain_api.status import Verdict
from disttrain_operator.decide.decision import Move, State
from disttrain_operator.decide.finish import finish
from disttrain_operator.decide.situation import Situation


def invalid_spec(situation: Situation) -> Move | None:
    """Fail the job with all that is wrong in its spec, before its first attempt."""
    job = situation.job
    if not job.problems or job.status.attempt:
        return None
    verdict = Verdict(reason=Reason.INVALID_SPEC, message=listed(job.problems))
    return finish(job.status, situation.now, State.FAILED, verdict)
