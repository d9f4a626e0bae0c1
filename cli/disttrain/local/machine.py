"""Resources of this machine for a job, and whether they suffice."""

import os
import resource
import sys
from collections.abc import Sequence

from disttrain.errors import CommandError
from disttrain.extras import require
from disttrain.local.demand import COMMAND, EXECUTED, FORKED, Demand, Machine, Misfit, demand_of, find_misfit
from disttrain.output import ask, print_stderr
from disttrain_api.spec import JobSpec
from disttrain_trainer.runtime.host_limits import cores, memory_available, memory_limit, tasks_left

_ADVICE = "use fewer `replicas` or a smaller model, or send the job to a cluster with `disttrain submit`"


def require_room(spec: JobSpec, modules: Sequence[str], *, yes: bool = False) -> None:
    """Return where the job may be started: it fits this machine, or the person wants it all the same (`yes`).

    What may not fit is asked on a terminal, and said elsewhere. modules: what ranks share where they are forked.
    Raises CommandError.
    """
    if spec.training is not None:
        require("the job cannot train here")
    costs = COMMAND if not modules else FORKED if sys.platform.startswith("linux") else EXECUTED
    demand = demand_of(spec, costs)
    misfit = find_misfit(demand, this_machine())
    if misfit is not None:
        _require_yes(misfit, yes)
    _allow_files(demand)


def _require_yes(misfit: Misfit, yes: bool) -> None:
    """Raise CommandError unless the user wants to start such a job."""
    if misfit.certain and not yes:
        raise CommandError(f"{misfit.sentence}; {_ADVICE}, or start it anyway with --yes")
    answer = None if yes else ask(f"disttrain: {misfit.sentence}. Start it?")
    if answer is False:
        raise CommandError(f"not started; {_ADVICE}")
    if answer is None:
        print_stderr(f"disttrain: started although {misfit.sentence}")


def this_machine() -> Machine:
    """Return what there is now."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        cores=cores(),
        memory=memory_limit(),
        free_memory=memory_available(),
        tasks=_tasks_left(),
        files=None if files == resource.RLIM_INFINITY else files,
    )


def _allow_files(demand: Demand) -> None:
    """Raise the limit of open files as far as the job needs and may: shells give 1,024 of those that they may give."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = demand.files if hard == resource.RLIM_INFINITY else min(demand.files, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _tasks_left() -> int | None:
    """Processes and threads that this user may still start."""
    own, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    # root is under no such limit.
    limits = [tasks_left(), own if own != resource.RLIM_INFINITY and os.geteuid() != 0 else None]
    return min((limit for limit in limits if limit is not None), default=None)
