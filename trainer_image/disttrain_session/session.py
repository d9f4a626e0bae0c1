"""`disttrain.session`: a training loop of one's own with all that jobs of the trainer have.

Progress and figures in the job's status, checkpoints with an exact resume and a fence, and a stop with a checkpoint on
SIGTERM; in a job with a command of its own, under `disttrain run`, and in a bare `python script.py`.
"""

import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from disttrain_api.names import Env, ExitCode
from disttrain_api.training import Checkpoint
from disttrain_session.checkpoints import Checkpoints
from disttrain_session.ending import Ending
from disttrain_session.loader import Collate, Loader
from disttrain_session.objects import Objects, SharedParameters
from disttrain_session.own_time import read
from disttrain_session.progress import SessionProgress
from disttrain_session.reported_values import checked, whole
from disttrain_session.stop_agreement import Asked, StopAgreement, question_to_all
from disttrain_session.world import join
from disttrain_session.wrap import wrap
from disttrain_trainer.checkpoint.step_manifest import Place
from disttrain_trainer.metrics.report import log_first_rank
from disttrain_trainer.runtime.checkpoint_request import CheckpointRequest
from disttrain_trainer.runtime.object_path import location
from disttrain_trainer.runtime.randomness import seed_everything

_LOADER = "session.loader"
"""How the names of loaders in a checkpoint begin: no keyword argument is called so."""


class session:  # noqa: N801 - a context manager, named like a function as in contextlib
    """The context of a training loop; every method is called by all ranks together.

        with disttrain.session(steps=1000, checkpoint_interval=100) as session:
            model, optimizer = session.prepare(model, optimizer)
            batches = session.loader(dataset, batch_size=32)
            session.restore(model=model, optimizer=optimizer)
            for inputs, targets in batches:
                ...
                session.step(loss=loss)

    steps: after which the loop is done. checkpoint_interval: steps between two checkpoints; one is also written at
    the end and on SIGTERM. keep_latest: checkpoints that stay. seed: of data order and of each rank's random numbers.
    folder: where checkpoints lie; a relative one counts from the job's storage, and outside a job from the working
    folder. Absent: in a job with storage a folder of the job's own, else no checkpoints are written.

    Raises ValueError for an argument that is wrong. What else ends a session (a checkpoint that does not fit, storage
    that is full) is printed as one sentence and ends the process with the trainer's exit code for it.
    """

    def __init__(
        self, *, steps: int, checkpoint_interval: int = 100, keep_latest: int = 3, seed: int = 0,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.steps = whole("steps", steps, 1)
        """Steps after which the loop is done."""
        interval, latest = whole("checkpoint_interval", checkpoint_interval, 1), whole("keep_latest", keep_latest, 1)
        self._settings = Checkpoint(interval=interval, keep_latest=latest)
        self._seed = whole("seed", seed, 0)
        self._folder = folder
        self._done = 0
        self._objects: Objects | None = None
        self._request = CheckpointRequest(None)
        self._loaders: list[Loader] = []

    def __enter__(self) -> Self:
        """Meet the other ranks, and take over the checkpoints of earlier attempts."""
        self._progress = SessionProgress(self.steps)
        self._ending = Ending(self._progress, opens_group=not dist.is_initialized())
        with self._ending.reporting_errors():
            self._world = join()
            self._agreement = StopAgreement(question_to_all(self._world, self._asked_here))
            self._own_time, self._judge = self._progress.compared(self._world)
            self._shared = SharedParameters(alone=self._world.size == 1)
            seed_everything(self._seed, self._world.rank)
            place = place_of_checkpoints(self._folder)
            self._checkpoints = None if place is None else self._open(place)
            self._progress.metrics_beside(place)
        self._ending.world = self._world
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the last checkpoint and leave together with the other ranks; after an exception, say why."""
        if error is None or (isinstance(error, SystemExit) and not error.code):
            with self._ending.reporting_errors():
                self._save()
            self._ending.well()
        else:
            self._ending.badly(error)

    @property
    def completed(self) -> int:
        """Steps done, those of earlier attempts included."""
        return self._done

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self._done >= self.steps

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self._world.size

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        return self._world.device.torch

    def prepare(self, model: nn.Module, *optimizers: Optimizer) -> Any:
        """Return the model as the job's `parallelism` says, with its optimizers if any are given.

        All ranks get rank 0's parameters. With `dataParallelShardDegree` above 1 the model is cut by FSDP2, layer by
        layer; else DDP averages gradients over the ranks; a lone rank's model is only moved to its device.
        """
        with self._ending.reporting_errors():
            wrapped = wrap(model, optimizers, self._world)
        if self._own_time is not None:
            self._own_time.watch(wrapped)
        self._shared.add(wrapped)
        self._agreement.watch(optimizers)
        return (wrapped, *optimizers) if optimizers else wrapped

    def loader(
        self, dataset: Any, batch_size: int, *, shuffle: bool = True, num_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> Loader:  # fmt: skip
        """Return an endless iterator of batches, on this rank's device; its position is in the checkpoints.

        dataset: samples by index, alike on all ranks. batch_size: samples of this rank's batch. Ranks get different
        samples. Raises ValueError after `restore`, and for a data set without a whole batch.
        """
        if self._objects is not None:
            raise ValueError("make loaders before `restore`, which gives them their position")
        options: dict[str, Any] = {"shuffle": shuffle, "num_workers": num_workers, "collate_fn": collate_fn}
        if self._own_time is not None:
            options["loading"] = self._own_time.loading
        seed = self._seed + len(self._loaders)
        loader = Loader(dataset, batch_size, self._world, lambda: self.finished, seed=seed, **options)
        self._loaders.append(loader)
        return loader

    def restore(self, **objects: Any) -> int:
        """Register what checkpoints hold, load the latest one if there is any, and return the steps done.

        objects: anything with state_dict and load_state_dict. Models that were prepared, and their optimizers, are
        saved once by all ranks together; all else is each rank's own, of plain values and tensors. Random states of
        Python, NumPy and torch are always part of a checkpoint. A resume has as many ranks as the run that wrote it.
        """
        if self._objects is not None:
            raise ValueError("`restore` was called already")
        loaders = {f"{_LOADER}{number}": loader for number, loader in enumerate(self._loaders)}
        self._objects = Objects.sort({**objects, **loaders}, self._shared)
        self._progress.restores()
        with self._ending.reporting_errors():
            found = None if self._checkpoints is None else self._checkpoints.restore(self._objects)
        self._done = found or 0
        if self._checkpoints is not None:
            where = self._checkpoints.latest
            log_first_rank(
                self._world, f"resuming after step {found} from {where.path}" if where else "no checkpoint yet: step 0"
            )
        self._progress.resumed(self._done, self._checkpoints and self._checkpoints.latest)
        if self._checkpoints is not None:
            self._request = CheckpointRequest(self._progress.reports)
        self._ending.loop_starts()
        return self._done

    def step(self, *, loss: Any = None, **figures: Any) -> None:
        """Count a step as done, report it, and write a checkpoint where one is due.

        A checkpoint is due every `checkpoint_interval` steps, and where one was asked for (`disttrain checkpoint`).
        After SIGTERM it writes a checkpoint, at the end of this step or the next, and raises SystemExit with code 143,
        which ends the process; the next attempt goes on there. loss, figures: as `disttrain.report` takes them, of this
        rank; those of rank 0 are the job's.
        """
        if self._objects is None:
            raise ValueError("call `restore` before the first step: it registers what checkpoints hold")
        if self.finished:
            raise ValueError(f"all {self.steps} steps are done: let the loop end at `session.finished`")
        given = checked(self._done + 1, self.steps, loss, None, figures)
        self._done += 1
        self._progress.step(given)
        with self._ending.reporting_errors():
            # All ranks stop, and save, after the same step.
            stopping, asked, looks, seconds = self._agreement.asked()
            self._compare(looks, seconds)
            due = self._checkpoints is not None and self._checkpoints.due(self._done)
            if stopping or asked or due or self.finished:
                self._save()
        if stopping and not self.finished:
            kept = "its checkpoint is written" if self._checkpoints else "without storage nothing of it is kept"
            log_first_rank(self._world, f"SIGTERM: stopped after step {self._done}, {kept}")
            raise SystemExit(int(ExitCode.STOPPED))

    def _asked_here(self) -> Asked:
        looks = self._judge is not None and self._judge.wants
        seconds = () if self._own_time is None else tuple(self._own_time.seconds())
        return Asked(self._ending.stop_requested, self._request.pending, looks, seconds)

    def _compare(self, looks: bool, seconds: Sequence[float]) -> None:
        """Take what ranks have done in this step, if it was looked at; looks: at the next one."""
        if self._own_time is not None:
            self._own_time.look(looks=looks)
        if self._judge is not None:
            self._judge.step(looks, read(seconds))

    def _open(self, place: Place) -> Checkpoints:
        attempt = int(os.environ.get(Env.ATTEMPT) or 1)
        return Checkpoints(place, os.environ.get(Env.JOB_UID) or "script", attempt, self._settings, self._world)

    def _save(self) -> None:
        if self._checkpoints is None or self._objects is None or self._done == 0:
            return
        self._request.answered()
        with self._progress.saving():
            self._checkpoints.save(self._done, self._objects)
            self._progress.saved(self._checkpoints.latest)


def place_of_checkpoints(
    folder: str | os.PathLike[str] | None, environ: Callable[[str], str | None] = os.environ.get
) -> Place | None:
    """Return where checkpoints lie; None: nowhere. environ: variable -> value."""
    storage = environ(Env.STORAGE)
    name, uid = environ(Env.JOB_NAME), environ(Env.JOB_UID)
    if not storage or not (name and uid):
        return None if folder is None else location(os.fspath(folder))
    given = None if folder is None else os.fspath(folder)
    if given is not None and (given.startswith("/") or "://" in given):
        return location(given)
    # As the trainer's own folder is called.
    return location(storage) / (given or f"{name}-{uid.replace('-', '')[:5]}")
