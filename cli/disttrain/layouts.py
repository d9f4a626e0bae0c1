"""`disttrain plan FILE --layouts`: a job's layouts that fit its devices, ranked by the estimated time of a step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from disttrain.errors import USAGE, CommandError
from disttrain.local.folder import to_yaml
from disttrain.output import print_stderr, show
from disttrain.planning.candidates import Candidate, Ranking
from disttrain.planning.layouts import layouts_of, refusal
from disttrain.planning.machine import Given, machine_of
from disttrain.planning.ranking import rank_layouts
from disttrain.terminal import rendered, table
from disttrain.validate import accepted, summary
from disttrain.views import layouts as view
from disttrain.views import step as step_view
from disttrain_api.memory import in_words
from disttrain_api.spec import DistTrainingJob


@dataclass(frozen=True)
class Bounds:
    """How much is looked at."""

    layouts: int = 24
    seconds: float = 300.0


def layouts(path: str, given: Given, bounds: Bounds, write: str | None, row: int, *, as_json: bool) -> int:
    """Print the ranking, and write the manifest of a row where it is asked for. Returns the command's exit code.

    Raises CommandError.
    """
    device_bytes = given.device_bytes
    job = accepted(path)
    if job is None:
        return 1
    reason = refusal(job.spec)
    if reason is not None:
        raise CommandError(f"no other layouts: {reason}")
    machine = machine_of(given, job.spec)
    found = layouts_of(job)
    ranking = rank_layouts(job, found[: bounds.layouts], machine, device_bytes, bounds.seconds, _progress)
    ranking.unasked += max(len(found) - bounds.layouts, 0)
    if as_json:
        show(json.dumps(view.as_data(ranking), indent=2))
    else:
        parts: list[Any] = [summary(job), "", table(view.HEADINGS, view.rows(ranking))]
        if ranking.left_out:
            parts += ["", table(view.LEFT_OUT_HEADINGS, view.left_out_rows(ranking))]
        parts += ["", *_remarks(ranking), *step_view.remarks(machine)]
        show(rendered(*parts))
    if not ranking.ranked:
        print_stderr("disttrain: no layout is left: see why above; use more ranks or devices with more memory")
        return 1
    if write is not None:
        _write(ranking, job, Path(write), row)
    return 0


def _progress(done: int, total: int) -> None:
    print_stderr(f"{done} of {total} layouts")


def _remarks(ranking: Ranking) -> list[str]:
    found = []
    if ranking.device_bytes is None:
        found.append("Whether they fit is not known: give --gpu-memory or --accelerator.")
    else:
        found.append(f"A device has {in_words(ranking.device_bytes)}.")
    if ranking.unasked:
        found.append(f"{ranking.unasked} more layouts were not estimated: give a higher --most or --within.")
    return found


def _write(ranking: Ranking, job: DistTrainingJob, path: Path, row: int) -> None:
    if not 1 <= row <= len(ranking.ranked):
        raise CommandError(f"--row: found {row}, expected 1 to {len(ranking.ranked)}", USAGE)
    try:
        path.write_text(to_yaml(_manifest(ranking.ranked[row - 1])))
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from error
    print_stderr(f"row {row} is written to {path}")


def _manifest(chosen: Candidate) -> Mapping[str, Any]:
    return chosen.job.model_dump(mode="json", by_alias=True, exclude_none=True, exclude_unset=True)
