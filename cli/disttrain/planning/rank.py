"""What a rank needs, as numbers. Pure."""

from dataclasses import dataclass

from disttrain.planning.cost import StepWork
from disttrain_api.memory import in_words
from disttrain_api.spec import JobSpec


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank; None: not known, and `unknown` says why."""

    rank: int
    parameters: int | None = None
    buffers: int | None = None
    gradients: int | None = None
    optimizer_state: int | None = None
    activations: int | None = None
    peak: int | None = None
    in_host: int | None = None
    """The part of the peak that is in the host's memory where ranks have GPUs."""
    building: int | None = None
    """The whole model, before it is cut."""
    least: int | None = None
    """Where nothing could be built: parameters, gradients and optimizer state, counted from the manifest."""
    unknown: str | None = None
    assumed: str | None = None
    """What data alone would say, and what was taken for it."""
    work: StepWork | None = None
    """None where no step could be followed."""

    @property
    def needed(self) -> int | None:
        """Bytes that the rank needs on its device, or as many of them as are known."""
        held = (self.parameters, self.buffers, self.gradients, self.optimizer_state)
        counted = [size for size in held if size is not None]
        in_steps = self.peak - (self.in_host or 0) if self.peak is not None else sum(counted) if counted else self.least
        return None if in_steps is None else max(in_steps, self.building or 0)


def misfit(memory: RankMemory, gpu_bytes: int, spec: JobSpec) -> str | None:
    """Why the rank does not fit a GPU, with what to do; None where it fits or what is known of it does."""
    if memory.needed is None or memory.needed <= gpu_bytes or not on_one_gpu(spec):
        return None
    needed = f"{'' if memory.unknown is None else 'at least '}{in_words(memory.needed)}"
    sentence = f"rank {memory.rank} needs {needed}, and a GPU has {in_words(gpu_bytes)}"
    if memory.building == memory.needed:
        return f"{sentence}: it holds the whole model before it is cut; set `training.model.metaDevice`"
    advice = (
        "cut the model over more ranks (`parallelism.dataParallelShardDegree`, `tensorParallelDegree`), lower"
        " `training.microBatchSize`, or set `training.activationCheckpointing`"
    )
    return f"{sentence}: {advice}"


def on_one_gpu(spec: JobSpec) -> bool:
    """Return whether everything that a rank holds is on one GPU."""
    training = spec.training
    offloaded = training is not None and training.offload.parameters
    return not offloaded and (spec.parallelism.devices_per_process or 1) == 1
