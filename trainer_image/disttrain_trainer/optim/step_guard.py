"""Which steps are skipped: those whose gradient is not finite, or much larger than those before.

The norm of the gradient alone is judged: all ranks know it before the update, and a loss that is not finite has a
gradient that is not. OLMo-core's SkipStepOptimizer goes by mean and spread of the last 128 losses and norms; a median
needs no assumption about how norms are spread.
"""

from __future__ import annotations

import json
import math
from collections import deque
from statistics import median

from disttrain_api.training import OnMostInRow, SkipSteps
from disttrain_trainer.runtime.errors import NonFiniteLoss


class StepGuard:
    """Judges the steps of a job one by one, alike on all ranks; its state is part of a checkpoint."""

    def __init__(self, settings: SkipSteps) -> None:
        self._settings = settings
        self.skipped = 0
        """Steps that were skipped, those of earlier attempts and those that were rolled back included."""
        self._in_row = 0
        self._norms: deque[float] = deque(maxlen=settings.window)

    def reason_to_skip(self, step: int, norm: float) -> str | None:
        """Return in words why no update is to be made of the step; None: it is to be made.

        norm: 2-norm of the whole gradient, before clipping. Raises NonFiniteLoss where too many in a row are skipped.
        """
        reason = self._reason_to_skip(norm)
        if reason is None:
            self._in_row = 0
            self._norms.append(norm)
            return None
        self.skipped += 1
        self._in_row += 1
        if self._in_row > self._settings.most_in_row:
            advice = (
                "lower `training.optimizer.learningRate`, look at the data of these steps, or raise "
                "`training.skipSteps.mostInRow`"
            )
            if self._settings.on_most_in_row is OnMostInRow.ROLL_BACK:
                advice = f"the next attempt passes over the samples up to this step; if it fails, too, {advice}"
            raise NonFiniteLoss(
                f"{self._in_row} steps in a row have a gradient that is not used, the last of them step {step}, whose "
                f"{reason}; {advice}",
                step=step,
            )
        return reason

    def _reason_to_skip(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        factor = self._settings.above_median
        if factor is None or len(self._norms) < self._settings.window:
            return None
        usual = median(self._norms)
        if norm <= factor * usual:
            return None
        return f"gradient norm is {norm:.4g}, and the median of the last {self._settings.window} is {usual:.4g}"

    def state_dict(self) -> dict[str, str]:
        """Return one text, which a checkpoint holds as it is."""
        state = {"skipped": self.skipped, "in_row": self._in_row, "norms": list(self._norms)}
        return {"state": json.dumps(state)}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Take over what `state_dict` returned. Raises TypeError, ValueError or KeyError where it is something else."""
        found = json.loads(state["state"])
        self.skipped, self._in_row = int(found["skipped"]), int(found["in_row"])
        self._norms = deque(map(float, found["norms"]), maxlen=self._settings.window)
