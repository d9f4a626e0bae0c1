"""From the pod's environment to its exit code."""

import asyncio
import os
import sys
from collections.abc import Sequence

from disttrain_agent.environment import PodError, check_config, read_environment, termination_log
from disttrain_agent.output import log
from disttrain_agent.processes import Start, execute
from disttrain_agent.reports import TerminationMessage
from disttrain_agent.supervise import Supervisor
from disttrain_agent.zygote import Zygote
from disttrain_agent.zygote_process import ZygoteProcess
from disttrain_api.names import ExitCode, exit_reason
from disttrain_api.report import RankFailure

TRAINER = (sys.executable, "-P", "-m", "disttrain_trainer")


def main(command: Sequence[str] = (), start: Start = execute, zygote: ZygoteProcess | None = None) -> int:
    """Run `command` (default: the trainer) once per rank of this pod; returns the pod's exit code."""
    return _main(command, start, zygote, own_program=False)


def run_own_program(command: Sequence[str]) -> int:
    """Run a command of the user's own, whose process has all ranks of this pod; returns the pod's exit code."""
    return _main(command, execute, None, own_program=True)


def _main(command: Sequence[str], start: Start, running: ZygoteProcess | None, *, own_program: bool) -> int:
    message = TerminationMessage(termination_log(os.environ))
    try:
        pod = read_environment(own_program=own_program)
        if pod.config is not None:
            check_config(pod.config)
    except PodError as problem:
        code = ExitCode.INVALID_CONFIGURATION
        log(str(problem))
        message.write(None, RankFailure(rank=0, exit_code=code, reason=exit_reason(code), message=str(problem)))
        return code

    # Where ranks are forked anyway, they are forked again.
    warm = pod.restarts_in_place is not None and start is execute and not command
    zygote = Zygote(start, running, warm=warm)

    async def life() -> int:
        return await Supervisor(pod, command or TRAINER, message, zygote, must_report=not command).run()

    return asyncio.run(life())
