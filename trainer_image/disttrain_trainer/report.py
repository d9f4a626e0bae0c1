"""What a rank tells the world: its report file, and on rank 0 the log and metrics.jsonl. Keys are torchtitan's."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from disttrain_api.report import RankError, RankReport
from disttrain_trainer.errors import NonFiniteLoss
from disttrain_trainer.files import rewrite
from disttrain_trainer.flops import Work, utilisation
from disttrain_trainer.mesh import World
from disttrain_trainer.moe.step import RoutingFigures
from disttrain_trainer.sinks.sink import Sink

METRICS_FILE = "metrics.jsonl"


class Reporter:
    """Keeps `rank-<rank>.json` (disttrain_api.report.RankReport) in the report folder; without a folder, nothing."""

    def __init__(self, rank: int, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"rank-{rank}.json"
        self.report = RankReport(rank=rank)
        self._step: Callable[[], int] | None = None
        self._first_step: int | None = None

    def update(self, **changes: Any) -> None:
        """Change fields and rewrite the file."""
        self.report = self.report.model_copy(update=changes)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rewrite(self._path, self.report.model_dump_json(by_alias=True))

    @property
    def step(self) -> int | None:
        """The last step that the job has done; None before `follow`."""
        return self._step() if self._step is not None else None

    def follow(self, step: Callable[[], int]) -> None:
        """Ask `step` for the last step that the job has done, for the signature of a failure. Before: none was done."""
        self._step, self._first_step = step, step()

    def fail(self, error: RankError) -> None:
        """The report of a rank that ends with `error`."""
        if (signature := error.signature) is not None:
            now = self.step
            done = 0 if now is None or self._first_step is None else now - self._first_step
            step = now if signature.step is None else signature.step
            signature = signature.model_copy(update={"step": step, "steps_done": done})
            error = error.model_copy(update={"signature": signature})
        self.update(error=error)


def say(world: World, text: str) -> None:
    """A line of the log, from rank 0."""
    if world.first:
        print(text, flush=True)


@dataclass
class _Step:
    """A step since the last logged one; tensors stay on the device, so that nothing waits for it in between."""

    loss: Tensor
    """This rank's part of the mean loss: sum of its losses / weight of all ranks."""
    weight: float
    """Samples or tokens of all ranks."""
    own_weight: float
    gradient_norm: Tensor
    samples: float
    """Samples of all ranks."""
    rate: float
    loading_seconds: float
    gradient_bytes: int | None
    """What this rank has sent for gradients; None where nobody counts it."""
    routing: RoutingFigures | None = None


@dataclass
class Metrics:
    """Collects steps; turns them into a log line, a line of metrics.jsonl and the report."""

    world: World
    reporter: Reporter
    file: Path | None
    sink: Sink
    attempt: int
    counts_tokens: bool
    work: Work
    devices: int
    """Devices of all ranks."""
    peak_flops: float | None
    """FLOP/s of a device, where it is known."""
    check_gradients: bool
    """False with FP16, where the scaler handles gradients that overflow."""
    own_norms: bool = False
    """Whether each rank clips a gradient of its own; the mean of their norms is reported."""
    figures: Callable[[], dict[str, float]] = dict
    """What else is to be told of the steps since it was last asked; called by all ranks together."""
    steps: list[_Step] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)
    samples: float = 0.0

    def last_logged(self) -> int:
        """The last step that this attempt has a line of, from a former life of this rank; 0: none."""
        if not self.world.first or self.file is None or not self.file.exists():
            return 0
        steps = [0]
        for text in self.file.read_text().splitlines():
            # The last line of who was killed may be half a one.
            with suppress(ValueError):
                line = json.loads(text)
                steps += [line["step"]] if line["attempt"] == self.attempt else []
        return max(steps)

    def record(self, **step: Any) -> None:
        """Remember a step; see _Step for its fields."""
        self.steps.append(_Step(**step))
        self.samples += self.steps[-1].samples

    def log(self, step: int) -> None:
        """Report the last of the recorded steps. Raises NonFiniteLoss, see `settle`."""
        loss, norm = self.settle(step)[-1]
        self.world.device.synchronize()
        now = time.monotonic()
        values = self._values(step, loss, norm, now - self.logged)
        self.reporter.update(step=step, loss=loss, samples_per_second=self.samples / (now - self.started))
        self.logged = now
        self.steps.clear()
        if self.world.first:
            print(_line(values), flush=True)
            self._append(values)

    def settle(self, step: int) -> list[tuple[float, float]]:
        """Mean loss over all ranks, and gradient norm, of each step recorded since the last log; `step` is the last.

        Raises NonFiniteLoss on every rank, naming the first step whose loss or gradient is not finite.
        """
        if not self.steps:
            return []
        losses = self.world.sum_tensor(torch.stack([one.loss for one in self.steps])).tolist()
        norms_of_rank = torch.stack([one.gradient_norm for one in self.steps])
        # All ranks must find the same.
        mean = self.world.sum_tensor(norms_of_rank) / self.world.size if self.own_norms else norms_of_rank
        norms = mean.tolist()
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), start=step - len(losses) + 1):
            wrong = "loss" if not math.isfinite(loss) else "gradient norm"
            if wrong == "loss" or (self.check_gradients and not math.isfinite(norm)):
                raise NonFiniteLoss(
                    f"the {wrong} of step {number} is {loss if wrong == 'loss' else norm}; lower "
                    "`training.optimizer.learningRate`, set `training.maxGradientNorm`, or use precision BF16 or FP32",
                    step=number,
                )
        return list(zip(losses, norms, strict=True))

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation. JSON knows no inf and nan: the report leaves such a figure out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.reporter.update(metrics=finite, evaluation_failure=None)
        if self.world.first:
            print(
                "  ".join([f"evaluation: {step}", *(f"{name}: {value:.4f}" for name, value in metrics.items())]),
                flush=True,
            )
            names = {"loss": "global_avg_loss"}
            values = {f"validation_metrics/{names.get(name, name)}": value for name, value in metrics.items()}
            self._append({"step": step, **values})

    def _values(self, step: int, loss: float, norm: float, seconds: float) -> dict[str, Any]:
        last = self.steps[-1]
        own = last.loss.detach().to("cpu", torch.float64) * last.weight / max(last.own_weight, 1.0)
        memory, gib = self.world.device.memory()
        counted = sum(one.weight if self.counts_tokens else one.samples for one in self.steps)
        samples = sum(one.samples for one in self.steps)
        flops = self.work.of(counted if self.counts_tokens else None, samples)
        unit = "tps" if self.counts_tokens else "sps"
        return {
            "step": step,
            "loss_metrics/global_avg_loss": loss,
            "loss_metrics/global_max_loss": float(self.world.max_tensor(own)),
            "grad_norm": norm,
            "lr": last.rate,
            f"throughput({unit})": counted / seconds / self.world.size,
            **utilisation(flops, seconds, self.devices, self.peak_flops),
            "time_metrics/end_to_end(s)": seconds / len(self.steps),
            "time_metrics/data_loading(s)": sum(one.loading_seconds for one in self.steps) / len(self.steps),
            memory: gib,
            **(last.routing.metrics(self.world) if last.routing else {}),
            **self.figures(),
            **self._sent(),
        }

    def _sent(self) -> dict[str, float]:
        """Bytes per step that the rank that sends most has sent for gradients, or for averages of parameters."""
        counts = [one.gradient_bytes for one in self.steps if one.gradient_bytes is not None]
        if not counts:
            return {}
        own = torch.tensor(sum(counts) / len(counts), dtype=torch.float64)
        return {"comm/gradient_bytes": float(self.world.max_tensor(own))}

    def _append(self, values: dict[str, Any]) -> None:
        self.sink.write(_without_inf_and_nan(values))
        if self.file is None:
            return
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a") as file:
                file.write(json.dumps({"attempt": self.attempt, **_without_inf_and_nan(values)}) + "\n")
        except OSError as error:
            # A checkpoint that meets the same wall ends the job; lost metrics alone do not.
            print(f"disttrain: {self.file} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _without_inf_and_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows neither; FP16's gradient norm may be inf in a step that is skipped."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _line(values: dict[str, Any]) -> str:
    memory = next(value for key, value in values.items() if key.startswith("memory/"))
    unit, rate = next((key[11:14], value) for key, value in values.items() if key.startswith("throughput("))
    return (
        f"step: {values['step']}  loss: {values['loss_metrics/global_avg_loss']:.5f}  "
        f"grad_norm: {values['grad_norm']:.4f}  memory: {memory:.2f}GiB  {unit}: {rate:,.0f}"
        + (f"  tflops: {values['tflops']:,.2f}" if "tflops" in values else "")
        + (f"  mfu: {values['mfu(%)']:.2f}%" if "mfu(%)" in values else "")
    )
