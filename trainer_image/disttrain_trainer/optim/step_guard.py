"""Which steps are skipped: those whose loss or gradient is not finite, or much larger than those before.

OLMo-core's SkipStepOptimizer goes by mean and standard deviation of the last 128 losses and norms. So do losses here:
zero means nothing to them, and what counts is how far they usually stray. Of norms, which are positive and have a long
tail, a multiple of the median is the bound.
"""

from __future__ import annotations

import json
import math
from collections import deque
from statistics import fmean, median

from disttrain_api.training import OnMostInRow, SkipSteps
from disttrain_trainer.runtime.errors import NonFiniteLoss

_LEAST_SPREAD = 1e-6
"""The least standard deviation of losses, as a part of their mean: FP32 rounds them to a tenth of that."""


class StepGuard:
    """Judges the steps of a job one by one, alike on all ranks; its state is part of a checkpoint."""

    def __init__(self, settings: SkipSteps) -> None:
        self._settings = settings
        self.skipped = 0
        """Steps that were skipped, those of earlier attempts and those that were rolled back included."""
        self.in_row = 0
        """Steps in a row that were skipped, up to the one that was judged last."""
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._norms: deque[float] = deque(maxlen=settings.window)

    def reason_to_skip(self, step: int, loss: float, norm: float) -> str | None:
        """Return in words why no update is to be made of the step; None: it is to be made.

        loss: the mean over all ranks. norm: 2-norm of the whole gradient, before clipping. Raises NonFiniteLoss where
        too many in a row are skipped.
        """
        reason = self.judge(loss, norm)
        if reason is not None:
            self.count(step, reason)
        return reason

    def judge(self, loss: float, norm: float) -> str | None:
        """Return in words why a gradient is not to be used, and learn from one that is; None then. Counts none."""
        reason = self._reason_in_norm(norm) or self._reason_in_loss(loss)
        self._learn(loss, norm, skipped=reason is not None)
        return reason

    def learn(self, loss: float, norm: float, *, skipped: bool) -> str | None:
        """Return in words why a step was skipped that has been judged elsewhere; None where it was not. Counts none."""
        reason = (self._reason_in_loss(loss) or f"gradient norm is {norm}") if skipped else None
        self._learn(loss, norm, skipped=skipped)
        return reason

    def _learn(self, loss: float, norm: float, *, skipped: bool) -> None:
        if skipped:
            self.in_row += 1
            return
        self.in_row = 0
        self._losses.append(loss)
        self._norms.append(norm)

    def count(self, step: int, reason: str) -> None:
        """Count the step that was judged last as skipped. Raises NonFiniteLoss where too many in a row are."""
        self.skipped += 1
        rows = f"{self.in_row} steps in a row have a gradient that is not used, the last of them step {step}"
        first = f"the gradient of step {step} is not used"
        self.require_few(self.in_row, step, f"{rows if self.in_row > 1 else first}, whose {reason}")

    def require_few(self, in_row: int, step: int, what: str) -> None:
        """Raise NonFiniteLoss where so many skips in a row, up to this step, are too many. what: says which."""
        if in_row <= self._settings.most_in_row:
            return
        advice = (
            "lower `training.optimizer.learningRate`, look at the data of these steps, or raise "
            "`training.skipSteps.mostInRow`"
        )
        if self._settings.on_most_in_row is OnMostInRow.ROLL_BACK:
            advice = (
                "the next attempt passes over the samples up to this step, and should it fail, too, another one "
                f"begins with an earlier checkpoint; if all do, {advice}"
            )
        repeats = self._settings.on_most_in_row is OnMostInRow.FAIL
        raise NonFiniteLoss(f"{what}; {advice}", step=step, repeats=repeats)

    @property
    def norms(self) -> int:
        """Return how many norms a step is compared with."""
        return len(self._norms)

    def forget_norms(self) -> None:
        """Begin anew with norms, which are those of another gradient from now on."""
        self._norms.clear()

    def _reason_in_norm(self, norm: float) -> str | None:
        if not math.isfinite(norm):
            return f"gradient norm is {norm}"
        factor = self._settings.above_median
        if factor is None or len(self._norms) < self._settings.window:
            return None
        usual = median(self._norms)
        if norm <= factor * usual:
            return None
        return f"gradient norm is {norm:.4g}, and the median of the last {self._settings.window} is {usual:.4g}"

    def _reason_in_loss(self, loss: float) -> str | None:
        if not math.isfinite(loss):
            return f"loss is {loss}"
        most = self._settings.loss_deviations
        if most is None or len(self._losses) < self._settings.window:
            return None
        mean = fmean(self._losses)
        spread = math.sqrt(fmean((one - mean) ** 2 for one in self._losses))
        least = _LEAST_SPREAD * abs(mean)
        # Losses that are all 0 say nothing about how far others may stray.
        if loss <= mean + most * max(spread, least) or mean == spread == 0:
            return None
        return (
            f"loss is {loss:.4g}, and the last {self._settings.window} have the mean {mean:.4g} and the standard "
            f"deviation {spread:.2g}"
        )

    def state_dict(self) -> dict[str, str]:
        """Return one text, which a checkpoint holds as it is."""
        counts = {"skipped": self.skipped, "in_row": self.in_row}
        return {"state": json.dumps({**counts, "losses": list(self._losses), "norms": list(self._norms)})}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """Take over what `state_dict` returned. Raises TypeError, ValueError or KeyError where it is something else."""
        found = json.loads(state["state"])
        self.skipped, self.in_row = int(found["skipped"]), int(found["in_row"])
        # Checkpoints of a former version have no losses.
        losses, norms = found.get("losses", ()), found["norms"]
        self._losses, self._norms = (deque(map(float, kept), maxlen=self._settings.window) for kept in (losses, norms))
