"""The files by which a rank of an own-command job reports. Nothing here raises: a report is never worth a training."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from disttrain_agent.reports import TerminationMessage, report_path
from disttrain_api.names import ExitCode
from disttrain_api.report import (
    MAX_TERMINATION_MESSAGE_BYTES,
    PodReport,
    RankFailure,
    RankReport,
    decode_pod_report,
)
from disttrain_session.place import Place

METRICS_FILE = "metrics.jsonl"


class ReportFiles:
    """The report file of this rank, the termination message of its pod, and metrics.jsonl of the run."""

    def __init__(self, place: Place) -> None:
        self._place = place

    def write(self, report: RankReport) -> None:
        """Replace the rank's report file, in the form that the agent's ranks have."""
        path = report_path(self._place.reports, self._place.rank)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(report.model_dump_json(by_alias=True))
            part.replace(path)
        except OSError:
            # A full disk, or a folder that is gone.
            with suppress(OSError):
                part.unlink(missing_ok=True)

    def leave(self, report: RankReport, failure: RankFailure | None = None) -> None:
        """Write the pod's termination message: the progress of its lowest rank that reports, and the first failure.

        From then on the message takes the place of the log's end, which the kubelet keeps of a program that failed and
        has left no message.
        """
        message, speaks = self._place.termination_log, self._speaks()
        if message is None or (failure is None and not speaks):
            return
        former = _left(message)
        progress = report if speaks or former is None or former.progress is None else former.progress
        kept = None if former is None else former.failure
        # A lost peer is a symptom, whatever the rank that has it was in time.
        if kept is None or (failure is not None and kept.exit_code == ExitCode.PEER_LOST):
            kept = failure
        TerminationMessage(message).write(progress, kept)

    def add_line(self, values: dict[str, Any]) -> None:
        """Append to metrics.jsonl, on rank 0 alone, what plots are drawn from."""
        if self._place.metrics is None or self._place.rank != 0:
            return
        append_line(self._place.metrics / METRICS_FILE, {**self._place.life, **values})

    def _speaks(self) -> bool:
        ranks = range(self._place.rank - self._place.local_rank, self._place.rank)
        return not any(report_path(self._place.reports, rank).exists() for rank in ranks)


def _left(message: Path) -> PodReport | None:
    with suppress(OSError):
        return decode_pod_report(message.read_bytes()[:MAX_TERMINATION_MESSAGE_BYTES].decode(errors="replace"))
    return None


def append_line(file: Path, values: dict[str, Any]) -> None:
    """Append a line of JSON where that is possible."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a") as stream:
            stream.write(json.dumps(values) + "\n")


def metrics_line(report: RankReport) -> dict[str, Any]:
    """Return a report as a line of metrics.jsonl; the loss has torchtitan's key, as in the trainer's lines."""
    rate = {} if report.samples_per_second is None else {"throughput(sps)": report.samples_per_second}
    return {"step": report.step, "loss_metrics/global_avg_loss": report.loss, **rate, **report.metrics}
