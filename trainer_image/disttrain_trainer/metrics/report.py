"""Output of a rank: its report file, and on rank 0 the log and metrics.jsonl. Keys are torchtitan's."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from disttrain_agent.reports import figures_file
from disttrain_api.report import Figures, RankError, RankPhase, RankReport, SlowRank
from disttrain_trainer.metrics.flops import Work, utilisation
from disttrain_trainer.metrics.results import Reduction, StepResult, not_finite
from disttrain_trainer.metrics.samples_file import SAMPLES_FILE, make_room, sample_line
from disttrain_trainer.metrics.sinks.sink import Sink
from disttrain_trainer.metrics.stragglers import Stragglers, say
from disttrain_trainer.runtime.device import Device
from disttrain_trainer.runtime.errors import NonFiniteLoss
from disttrain_trainer.runtime.files import rewrite, write_atomically
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.phase_clock import PhaseClock
from disttrain_trainer.runtime.step_times import StepTimes

METRICS_FILE = "metrics.jsonl"
THROUGHPUT = "throughput(sps)"
WHOLE, LOADING = "time_metrics/end_to_end(s)", "time_metrics/data_loading(s)"
"""Samples of all ranks per second, over the steps since the line before: what the bar, the plot and the status show."""


class Reporter:
    """Keeps `rank-<rank>.json` (disttrain_api.report.RankReport) in the report folder; without a folder, nothing."""

    def __init__(self, rank: int, folder: Path | None) -> None:
        self._path = None if folder is None else folder / f"rank-{rank}.json"
        self.report = RankReport(rank=rank)
        self._step: Callable[[], int] | None = None
        self._first_step: int | None = None
        self._phases = PhaseClock()
        self.times = StepTimes(rank, folder)
        self.times.begin(RankPhase.STARTING)

    def update(self, **changes: Any) -> None:
        """Change fields and rewrite the file."""
        if "phase" in changes:
            changes["phase_seconds"] = self._phases.enter(changes["phase"])
        self.report = self.report.model_copy(update=changes)
        self._write()

    def _write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rewrite(self._path, self.report.model_dump_json(by_alias=True))

    def logged(self, step: int, figures: Mapping[str, float]) -> None:
        """Keep the figures of a logged step for who asks the agent. On a full disk they are those of a former step."""
        if self._path is not None:
            found = Figures(rank=self.report.rank, step=step, figures=figures)
            with suppress(OSError):
                file = figures_file(self._path.parent, found.rank)
                write_atomically(file, found.model_dump_json(by_alias=True), lasting=False)

    @property
    def step(self) -> int | None:
        """The last step that the job has done; None before `follow`."""
        return self._step() if self._step is not None else None

    def follow(self, step: Callable[[], int]) -> None:
        """Ask `step` for the last step that the job has done, for the signature of a failure. Before: none was done."""
        self._step, self._first_step = step, step()
        self.times.begin(RankPhase.TRAINING)
        self.update(phase=RankPhase.TRAINING)

    @contextmanager
    def during(self, phase: RankPhase) -> Iterator[None]:
        """Report that the rank is in this phase, and afterwards in the former one."""
        former = self.report.phase
        self.update(phase=phase)
        with self.times.during(phase):
            try:
                yield
            finally:
                over = {"phase": former, "phase_seconds": self._phases.enter(former)}
                self.report = self.report.model_copy(update=over)
        self._write()

    def fail(self, error: RankError) -> None:
        """The report of a rank that ends with `error`."""
        if (signature := error.signature) is not None:
            now = self.step
            done = 0 if now is None or self._first_step is None else now - self._first_step
            step = now if signature.step is None else signature.step
            signature = signature.model_copy(update={"step": step, "steps_done": done})
            error = error.model_copy(update={"signature": signature})
        self.update(error=error)


def log_first_rank(world: World, text: str) -> None:
    """Print a line of the log on the first rank, and nothing on others."""
    if world.first:
        print(text, flush=True)


@dataclass
class Metrics:
    """Collects steps; turns them into a log line, a line of metrics.jsonl and the report.

    Talks to no other rank: `reduction` makes figures of the job of what the ranks hold, at lines of the log and saves.
    """

    reduction: Reduction
    device: Device
    ranks: int
    """How many the whole job has."""
    writes: bool
    """Whether this rank writes the log and metrics.jsonl."""
    reporter: Reporter
    interval: int
    """Steps between two lines of the log."""
    last_step: int
    """The job's, of which there is always a line."""
    file: Path | None
    sink: Sink
    attempt: int
    generation: int
    """How often the ranks of the attempt have started before."""
    counts_tokens: bool
    work: Work
    devices: int
    """Devices of all ranks."""
    peak_flops: float | None
    """FLOP/s of a device, where it is known."""
    stragglers: Stragglers | None = None
    """Judges which rank is slow; on the rank that writes."""
    recorded_before: int = 0
    """Steps up to this one were recorded by a former life of this rank, and may come again."""
    count: int = 0
    """Steps that were recorded."""
    results: list[StepResult] = field(default_factory=list)
    """Since the last line of the log."""
    started: float = field(default_factory=time.monotonic)
    logged: float = field(default_factory=time.monotonic)

    def last_logged(self) -> int:
        """The last step that this attempt has a line of, from a former life of this rank; 0: none."""
        if not self.writes or self.file is None or not self.file.exists():
            return 0
        steps = [0]
        for text in self.file.read_text().splitlines():
            # The last line of who was killed may be half a one.
            with suppress(ValueError):
                line = json.loads(text)
                steps += [line["step"]] if line["attempt"] == self.attempt else []
        return max(steps)

    def record(self, result: StepResult) -> dict[str, Any]:
        """Remember a step, and log it where a line is due; return that line, else nothing. Raises NonFiniteLoss then,
        see `settle`."""
        if result.step <= self.recorded_before:
            return {}
        self.results.append(result)
        self.count += 1
        if result.step == self.last_step or result.step % self.interval == 0:
            return self._log()
        return {}

    def _log(self) -> dict[str, Any]:
        """Report the last of the recorded steps; return its line."""
        loss, norm = self.settle()[-1]
        self.device.synchronize()
        now = time.monotonic()
        values = self._values(loss, norm, now - self.logged)
        step, seconds = values["step"], now - self.started
        skipped = self.results[-1].skipped_steps
        self.reporter.update(
            step=step,
            # The loss of a step that is skipped may be inf or nan, which JSON does not know.
            **({"loss": loss} if math.isfinite(loss) else {}),
            **({} if skipped is None else {"skipped_steps": skipped}),
            samples_per_second=values[THROUGHPUT],
            loading_share=min(1.0, values[LOADING] / values[WHOLE]) if values[WHOLE] > 0 else None,
            remaining_seconds=max(0, self.last_step - step) * seconds / self.count,
            slow_rank=self._slow_rank(now - self.logged),
        )
        self.reporter.logged(step, {name: value for name, value in values.items() if name != "step"})
        self.logged = now
        self.results.clear()
        if self.writes:
            print(_line(values), flush=True)
            self._append(values)
        return values

    def _slow_rank(self, seconds: float) -> SlowRank | None:
        """Return the rank that is named as slow after the recorded steps, which took so many seconds; log a change."""
        own = self.reduction.own_seconds
        if self.stragglers is None or not own:
            return None
        if self.stragglers.take(own, len(self.results), seconds):
            print(say(self.stragglers.found), flush=True)
        return self.stragglers.found

    def settle(self) -> list[tuple[float, float]]:
        """Mean loss over all ranks, and gradient norm, of each step recorded since the last log.

        Raises NonFiniteLoss on every rank, naming the first step whose loss or gradient is not finite.
        """
        if not self.results:
            return []
        totals = self.reduction.totals(self.results)
        for result, (loss, norm) in zip(self.results, totals, strict=True):
            wrong = not_finite(loss, norm, may_overflow=result.may_overflow)
            if wrong is not None and not result.skipped:
                raise NonFiniteLoss(
                    f"the {wrong} of step {result.step} is {loss if wrong == 'loss' else norm}; lower "
                    "`training.optimizer.learningRate`, set `training.maxGradientNorm`, or use precision BF16 or FP32",
                    step=result.step,
                )
        return totals

    def evaluated(self, step: int, metrics: dict[str, float]) -> None:
        """Report an evaluation. JSON knows no inf and nan: the report leaves such a figure out."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self.reporter.update(metrics=finite, evaluation_failure=None)
        if self.writes:
            print(
                "  ".join([f"evaluation: {step}", *(f"{name}: {value:.4f}" for name, value in metrics.items())]),
                flush=True,
            )
            names = {"loss": "global_avg_loss"}
            values = {f"validation_metrics/{names.get(name, name)}": value for name, value in metrics.items()}
            self._append({"step": step, **values})

    def sampled(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Log the texts that the model has written after the prompts, and keep them beside metrics.jsonl and where the
        figures go."""
        if not self.writes:
            return
        for prompt, text in zip(prompts, texts, strict=True):
            print(sample_line(step, prompt, text), flush=True)
        self.sink.write_samples(step, list(zip(prompts, texts, strict=True)))
        if self.file is not None:
            file = self.file.with_name(SAMPLES_FILE)
            make_room(file)
            for prompt, text in zip(prompts, texts, strict=True):
                self._append_to(file, {"step": step, "prompt": prompt, "text": text})

    def _values(self, loss: float, norm: float, seconds: float) -> dict[str, Any]:
        """Entries of metrics.jsonl for the results since the last line; seconds: that they took."""
        last = self.results[-1]
        memory, gib = self.device.memory()
        samples = sum(one.samples for one in self.results)
        tokens = sum(one.weight for one in self.results) if self.counts_tokens else None
        flops = self.work.of(tokens, samples)
        return {
            "step": last.step,
            "loss_metrics/global_avg_loss": loss,
            "grad_norm": norm,
            "lr": last.rate,
            **({} if last.skipped_steps is None else {"skipped_steps": last.skipped_steps}),
            THROUGHPUT: samples / seconds,
            # As torchtitan has it, which knows no samples: of one rank.
            **({} if tokens is None else {"throughput(tps)": tokens / seconds / self.ranks}),
            **utilisation(flops, seconds, self.devices, self.peak_flops),
            WHOLE: seconds / len(self.results),
            LOADING: sum(one.loading_seconds for one in self.results) / len(self.results),
            memory: gib,
            **self.reduction.figures(self.results),
        }

    def _append(self, values: dict[str, Any]) -> None:
        self.sink.write(_without_inf_and_nan(values))
        if self.file is not None:
            self._append_to(self.file, _without_inf_and_nan(values))

    def _append_to(self, path: Path, values: Mapping[str, Any]) -> None:
        """Write a line to a file of JSON Lines."""
        life = {"attempt": self.attempt} | ({"generation": self.generation} if self.generation else {})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a") as file:
                file.write(json.dumps({**life, **values}) + "\n")
        except OSError as error:
            # A checkpoint that meets the same wall ends the job; lost metrics alone do not.
            print(f"disttrain: {path} cannot be written: {error.strerror}", file=sys.stderr, flush=True)


def _without_inf_and_nan(values: dict[str, Any]) -> dict[str, Any]:
    """JSON knows neither; FP16's gradient norm may be inf in a step that is skipped."""
    return {key: value if math.isfinite(value) else None for key, value in values.items()}


def _line(values: dict[str, Any]) -> str:
    memory = next(value for key, value in values.items() if key.startswith("memory/"))
    return (
        f"step: {values['step']}  loss: {values['loss_metrics/global_avg_loss']:.5f}  "
        f"grad_norm: {values['grad_norm']:.4f}  memory: {memory:.2f}GiB  samples/s: {values[THROUGHPUT]:,.0f}"
        + (f"  tps: {values['throughput(tps)']:,.0f}" if "throughput(tps)" in values else "")
        + (f"  tflops: {values['tflops']:,.2f}" if "tflops" in values else "")
        + (f"  mfu: {values['mfu(%)']:.2f}%" if "mfu(%)" in values else "")
    )
