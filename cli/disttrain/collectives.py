"""`disttrain collectives`: the trainer's check of collectives as a job of this machine, which leaves nothing behind."""

import asyncio
import tempfile
from pathlib import Path

from disttrain.errors import USAGE, CommandError
from disttrain.extras import require
from disttrain.local.folder import RunFolder, new_run
from disttrain.local.gpus import gpu_slices
from disttrain.local.machine import require_room
from disttrain.local.pods import log_tail
from disttrain.local.runner import LocalRun
from disttrain.local.view import PlainView
from disttrain.output import show
from disttrain.terminal import last_lines
from disttrain_api.names import API_VERSION, CONTAINER, KIND, MAX_REPLICAS
from disttrain_api.spec import DistTrainingJob
from disttrain_api.status import ConditionType, JobStatus
from disttrain_operator.decide.conditions import condition
from disttrain_trainer.checks.collectives.plan import Plan, arguments_of, group_ranks
from disttrain_trainer.checks.collectives.results import from_json, tables, to_json, verdict

_NAME = "collectives"
_MODULES = ("disttrain_trainer.checks.collectives.check",)
_LOG_LINES = 15


class _FailuresOnly(PlainView):
    """The tables are the news; what else happens is not."""

    def status(self, status: JobStatus) -> None:
        return None


def collectives(plan: Plan, *, ranks: int, gpus: bool, as_json: bool) -> int:
    """Print what was found. Returns 0 where every element was right, else 1. Raises CommandError."""
    _refuse_nonsense(plan, ranks)
    require("the ranks cannot start")
    with _scratch() as scratch:
        results = Path(scratch, "results.json")
        job = _job(plan, ranks, gpus, results)
        slices = gpu_slices(job.spec)
        require_room(job.spec, _MODULES)
        folder, raw = new_run(Path(scratch), job)
        status = asyncio.run(LocalRun(folder, raw, _FailuresOnly(_NAME), slices, _MODULES).run())
        if not results.exists():
            raise CommandError(_failure(status, folder))
        rows = from_json(results.read_text())
    show(to_json(rows) if as_json else f"{tables(rows)}\n{verdict(rows)}")
    return 1 if any(row.wrong for row in rows) else 0


def _scratch() -> tempfile.TemporaryDirectory[str]:
    """Make a folder that lives as long as the check. Raises CommandError."""
    try:
        return tempfile.TemporaryDirectory(prefix="disttrain-collectives-")
    except OSError as error:
        where = Path(error.filename).parent if error.filename else "a folder for temporary files"
        raise CommandError(f"cannot write to {where}: {error.strerror}; choose another place with TMPDIR") from error


def _refuse_nonsense(plan: Plan, ranks: int) -> None:
    """Refuse wrong options that each rank would also detect, but later."""
    if not 2 <= ranks <= MAX_REPLICAS:
        raise CommandError(f"--ranks {ranks}: expected 2 to {MAX_REPLICAS}", USAGE)
    for name in plan.groups:
        try:
            group_ranks(name, ranks)
        except ValueError as error:
            raise CommandError(f"--groups: {error}", USAGE) from error


def _job(plan: Plan, ranks: int, gpus: bool, results: Path) -> DistTrainingJob:
    command = ["python", "-P", "-m", "disttrain_trainer.checks.collectives", *arguments_of(plan), f"--json={results}"]
    return DistTrainingJob.model_validate(
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "metadata": {"name": _NAME},
            "spec": {
                "workers": {
                    "replicas": ranks,
                    "gpusPerPod": 1 if gpus else None,
                    "template": {"spec": {"containers": [{"name": CONTAINER, "command": command}]}},
                },
                "runPolicy": {"maxRestarts": 0},
            },
        },
        by_alias=True,
        by_name=False,
    )


def _failure(status: JobStatus, folder: RunFolder) -> str:
    """Why there is no result, with the end of the log that says it."""
    failed = condition(status, ConditionType.FAILED)
    pod = status.attempts[-1].verdict.pod if status.attempts and status.attempts[-1].verdict else None
    lines = last_lines(log_tail(folder.log(pod), 10_000), _LOG_LINES) if pod else []
    message = failed.message if failed else "the check did not come to an end"
    return "\n".join([message or "", *(f"  {line}" for line in lines)])
