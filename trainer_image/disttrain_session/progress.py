"""Progress of a session: the rank's report, the times of its steps, the pod's termination message, metrics.jsonl."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from disttrain_api.report import CheckpointReport, RankError, RankFailure, RankPhase, RankReport, SlowRank
from disttrain_session.asked import be_asked
from disttrain_session.files import METRICS_FILE, ReportFiles, append_line, metrics_line
from disttrain_session.own_time import Judge, OwnTime
from disttrain_session.place import Place, place_of
from disttrain_session.reported_values import Figures, Pace, plain
from disttrain_session.reporting import INTERVAL_SECONDS
from disttrain_trainer.checkpoint.step_manifest import Place as CheckpointPlace
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.phase_clock import PhaseClock
from disttrain_trainer.runtime.step_times import StepTimes


class SessionProgress:
    """The report of this rank, kept up to date on disk at most once per second; a checkpoint is noted at once."""

    def __init__(self, steps: int) -> None:
        self._place: Place | None = place_of(os.environ)
        self._files = None if self._place is None else ReportFiles(self._place)
        self._metrics: Path | None = None
        rank = int(os.environ.get("RANK") or 0) if self._place is None else self._place.rank
        self.report = RankReport(rank=rank, total_steps=steps)
        self._pending: Figures | None = None
        self._written_at = float("-inf")
        self._pace = Pace(time.monotonic)
        self._times, self._counted, self._phases = StepTimes(rank, None), ExitStack(), PhaseClock()

    @property
    def reports(self) -> Path | None:
        """Folder of the reports of the pod's ranks; None outside a job."""
        return None if self._place is None else self._place.reports

    def metrics_beside(self, checkpoints: CheckpointPlace | None) -> None:
        """Append metrics.jsonl in the folder of the checkpoints, where the pod has no other folder for it."""
        if isinstance(checkpoints, Path) and (self._place is None or self._place.metrics is None):
            self._metrics = checkpoints / METRICS_FILE

    def compared(self, world: World) -> tuple[OwnTime | None, Judge | None]:
        """Return what times this rank, and on rank 0 what compares the ranks; None outside a job of several ranks."""
        if self._place is None or world.size == 1:
            return None, None
        place = self._place
        judge = Judge(world.size, place.ranks_here, world.device, self._slow) if world.first else None
        return OwnTime(world, placed=place.is_of_its_pod(os.environ)), judge

    def restores(self) -> None:
        """Note that this rank reads the latest checkpoint, if there is any."""
        self._update(phase=RankPhase.RESTORING)

    def resumed(self, step: int, latest: CheckpointReport | None) -> None:
        """Note where this attempt begins to take steps."""
        if self._place is not None:
            be_asked(self._place)
            self._times = StepTimes(self._place.rank, self._place.reports)
        self._update(step=step, began=step, checkpoint=latest)
        self._train()
        if latest is not None:
            self._leave()

    def step(self, figures: Figures) -> None:
        """Note a step."""
        self._times.stepped()
        self._pending = figures
        now = time.monotonic()
        if now - self._written_at >= INTERVAL_SECONDS or figures.step == figures.total:
            self._written_at = now
            self.flush()

    def flush(self) -> None:
        """Write what was noted since the last write."""
        found, self._pending = self._pending, None
        if found is None:
            return
        numbers = {name: plain(value) for name, value in found.others.items()}
        metrics = {name: number for name, number in numbers.items() if number is not None}
        remaining = self._pace.remaining_seconds(found.step, found.total)
        self._update(step=found.step, loss=plain(found.loss), metrics=metrics, remaining_seconds=remaining)
        line = metrics_line(self.report)
        if self._files is not None:
            self._files.add_line(line)
        if self._metrics is not None and self.report.rank == 0:
            append_line(self._metrics, {**({"attempt": 1} if self._place is None else self._place.life), **line})

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within the block this rank writes a checkpoint, or waits for one."""
        self.flush()
        self._rest()
        self._update(phase=RankPhase.SAVING)
        self._times.begin(RankPhase.SAVING)
        yield
        self._train()

    def saved(self, latest: CheckpointReport | None) -> None:
        """Note a checkpoint where the operator finds it also if the pod is killed: in the termination message."""
        self.flush()
        self._update(checkpoint=latest)
        self._leave()

    def ended(self) -> None:
        """Note that the work is done."""
        self.flush()
        self._rest()
        self._times.close()
        self._update(done=True)
        self._leave()

    def failed(self, error: RankError, log_tail: str) -> None:
        """Note why this rank ends."""
        self.flush()
        self._rest()
        self._update(error=error)
        if self._files is not None:
            failure = RankFailure(
                rank=self.report.rank, exit_code=error.exit_code, reason=error.reason, message=error.message,
                signature=error.signature, log_tail=log_tail or None,
            )  # fmt: skip
            self._files.leave(self.report, failure)

    def _slow(self, found: SlowRank | None) -> None:
        self._update(slow_rank=found)

    def _train(self) -> None:
        self._update(phase=RankPhase.TRAINING)
        self._counted.enter_context(self._times.counted())

    def _rest(self) -> None:
        self._counted.close()

    def _update(self, **changes: Any) -> None:
        if "phase" in changes:
            changes["phase_seconds"] = self._phases.enter(changes["phase"])
        self.report = self.report.model_copy(update=changes)
        if self._files is not None:
            self._files.write(self.report)

    def _leave(self) -> None:
        if self._files is not None:
            self._files.leave(self.report)
