"""Random jobs of all that ranks can do without servers, of which the rules allow every one."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import cycle, islice
from typing import Any

from disttrain_api.compute import ActivationCheckpointing
from disttrain_api.jobconfig import JobConfig
from disttrain_api.parallelism import AllReduce, CompressionName, PipelineSchedule, PipelineSplit
from disttrain_api.pipeline import V_SCHEDULES
from disttrain_api.relaxed import OptimizerState
from disttrain_api.training import LrScheduleName
from disttrain_trainer.runtime.config import resolve
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.worlds import job, small, user

STEPS = 5
# A job is stopped here, and one that is not writes a checkpoint: what a pipeline drains for, both have.
STOPPED_AFTER = 2
# Here one is asked for a checkpoint, and writes none otherwise.
ASKED_AFTER = 3

Settings = dict[str, Any]
# Adds itself to a drawn parallelism.
Technique = Callable[[random.Random, Settings], None]
_DEGREES = ("dataParallelShardDegree", "tensorParallelDegree", "pipelineParallelDegree", "expertParallelDegree")
_CONTEXT = "contextParallelDegree"


@dataclass(frozen=True)
class AnyJob:
    """What is trained and how it is cut."""

    training: Settings
    parallelism: Settings
    ranks_per_pod: int

    @property
    def drains(self) -> bool:
        """Whether a checkpoint changes the gradients that follow."""
        return self.parallelism.get("pipeline", {}).get("schedule", "").startswith("PipeDream")

    @property
    def synchronous(self) -> bool:
        """Whether it computes what one process computes."""
        settings = self.parallelism.get("dataParallel", {})
        relaxed = settings.get("mode", "AllReduce") != "AllReduce" or "compression" in settings
        # A microbatch's tokens balance its experts, and another layout has other microbatches.
        experts = "moe" in self.training["model"]["entrypoint"]
        return not self.drains and not relaxed and not experts

    def run(self, **more: Any) -> Settings:
        """A run of a case of `worlds.run_cases`."""
        return {"training": self.training, "parallelism": self.parallelism, "ranks_per_pod": self.ranks_per_pod, **more}

    @property
    def alone(self) -> Settings:
        """The same training in one process."""
        return alone(self.training)


def alone(training: Settings) -> Settings:
    """A run of a case: the same training in one process."""
    how = ("gradientAccumulationSteps", "activationCheckpointing", "offload")
    return {"training": {name: value for name, value in training.items() if name not in how}}


def any_jobs(seed: int, ranks: int, count: int) -> Iterator[AnyJob]:
    """So many jobs for so many ranks, the same ones for the same seed; of each technique as many."""
    chance = random.Random(seed)
    techniques = list(_TECHNIQUES)
    chance.shuffle(techniques)
    for technique in islice(cycle(techniques), count):
        drawn = _draw(chance, ranks, technique)
        while not allowed(drawn.training, drawn.parallelism, ranks, drawn.ranks_per_pod):
            drawn = _draw(chance, ranks, technique)
        yield drawn


def allowed(training: Settings, parallelism: Settings, ranks: int, ranks_per_pod: int) -> bool:
    """Whether no rule refuses the job."""
    config = JobConfig.model_validate(job(training, parallelism=parallelism))
    try:
        resolve(config, ranks, ranks_per_pod)
    except InvalidConfiguration:
        return False
    return True


def _draw(chance: random.Random, ranks: int, technique: str) -> AnyJob:
    training = any_training(chance)
    parallelism = any_degrees(chance, ranks)
    parallelism |= some(chance, 0.4, sequenceParallel=[True], vocabularyParallel=[True], expertParallelDegree=[2, 4])
    if chance.random() < 0.3:
        parallelism["dataParallel"] = some(chance, 0.5, allReduce=values(AllReduce), staticGraph=[True])
    if parallelism.get("pipelineParallelDegree"):
        parallelism["pipeline"] = any_pipeline(chance, chance.choice(list(PipelineSchedule)))
    _TECHNIQUES[technique](chance, parallelism)
    if parallelism.get("pipeline", {}).get("schedule") in V_SCHEDULES and "gpt" in training["model"]["entrypoint"]:
        # Tied weights do not go with shards there, and most are cut into some.
        training["model"]["config"]["tieWeights"] = False
    if parallelism.get(_CONTEXT) and "gpt" not in training["model"]["entrypoint"]:
        training |= {"model": user("double_gpt"), "data": user("double_tokens")}
    return AnyJob(training, parallelism, chance.choice([size for size in (1, 2) if ranks % size == 0]))


def some(chance: random.Random, each: float, **choices: list[Any]) -> Settings:
    """Each field with that probability, with one of its values."""
    return {name: chance.choice(values) for name, values in choices.items() if chance.random() < each}


def values(kinds: type[StrEnum]) -> list[Any]:
    return [kind.value for kind in kinds]


def any_degrees(chance: random.Random, ranks: int) -> Settings:
    degrees: Settings = {}
    for name in _DEGREES[:3]:
        degree = chance.choice([size for size in (1, 1, 2, 3, 4) if ranks % size == 0])
        if degree > 1:
            degrees[name] = degree
            ranks //= degree
    return degrees


def any_training(chance: random.Random) -> Settings:
    sizes = chance.choice([{}, {"heads": 12, "width": 24, "vocabularySize": 24}])
    gpt = user("double_gpt", layers=chance.choice([2, 4, 8]), tieWeights=chance.random() < 0.5, **sizes)
    experts = {
        "layers": chance.choice([2, 4]),
        "experts": chance.choice([4, 6]),
        "expertsPerToken": chance.choice([1, 2]),
    }
    model, data = chance.choice(
        [
            (gpt, user("double_tokens")),
            (user("double_moe_gpt", **experts, **sizes), user("double_tokens")),
            (user("double_builtin_mlp", depth=chance.choice([2, 7])), user("double_samples")),
        ]
    )
    sgd = {"name": "SGD", "learningRate": 0.1, **some(chance, 0.7, momentum=[0.9], nesterov=[True])}
    adam = {"name": chance.choice(["Adam", "AdamW"]), "learningRate": 0.01, "weightDecay": 0.1}
    schedule = {"name": chance.choice(list(LrScheduleName)).value, "warmupSteps": chance.choice([0, 3])}
    return small(
        model=model,
        data=data,
        optimizer=chance.choice([sgd, adam]),
        lrSchedule=schedule,
        steps=STEPS,
        checkpoint={"interval": STOPPED_AFTER, "keepLatest": STEPS, "asynchronous": chance.random() < 0.5},
        evaluation=some(chance, 0.3, interval=[1, 2], batchSize=[5]),
        offload={name: chance.random() < 0.2 for name in ("parameters", "activations")},
        seed=chance.randrange(100),
        **some(
            chance,
            0.3,
            gradientAccumulationSteps=[2, 3, 4],
            maxGradientNorm=[0.3],
            activationCheckpointing=values(ActivationCheckpointing),
            loss=[{"labelSmoothing": 0.1}],
            skipSteps=[{}],
        ),
    )


def any_pipeline(chance: random.Random, schedule: PipelineSchedule) -> Settings:
    choices: dict[str, list[Any]] = {
        "microbatches": [1, 2, 3, 4, 6, 8],
        "stagesPerRank": [1, 2, 3],
        "split": values(PipelineSplit),
        "verticalSync": [True],
    }
    return {"schedule": schedule.value, **some(chance, 0.4, **choices)}


def _in_pipeline(schedule: PipelineSchedule) -> Technique:
    def technique(chance: random.Random, parallelism: Settings) -> None:
        parallelism["pipeline"] = any_pipeline(chance, schedule)

    return technique


def compression(chance: random.Random, name: CompressionName) -> Settings:
    """`dataParallel.compression` of that name, with some of its settings."""
    own: dict[str, list[Any]] = {"warmupSteps": [1, 3]}
    if name in (CompressionName.TOP_K, CompressionName.RANDOM_K):
        own |= {"ratio": [0.1, 1.0], "momentumCorrection": [0.5]}
    if name is CompressionName.POWER_SGD:
        own["rank"] = [1, 2]
    return {"name": name.value, **some(chance, 0.5, **own)}


def _compressed(name: CompressionName) -> Technique:
    def technique(chance: random.Random, parallelism: Settings) -> None:
        settings = {"compression": compression(chance, name)}
        parallelism["dataParallel"] = parallelism.get("dataParallel", {}) | settings

    return technique


def _local_sgd(chance: random.Random, parallelism: Settings) -> None:
    settings = {
        "period": chance.choice([1, 2, 3]),
        **some(chance, 0.3, warmupSteps=[1, 3], globalPeriod=[2, 4, 6], optimizerState=values(OptimizerState)),
        **some(chance, 0.3, outerOptimizer=[{"learningRate": 0.7, "momentum": 0.5}]),
    }
    parallelism["dataParallel"] = {"mode": "LocalSGD", "localSGD": settings}


def _bmuf(chance: random.Random, parallelism: Settings) -> None:
    settings = {
        "period": chance.choice([1, 2, 3]),
        **some(chance, 0.3, warmupSteps=[2], blockMomentum=[0.5], blockLearningRate=[0.9], nesterov=[False]),
        **some(chance, 0.3, optimizerState=values(OptimizerState)),
    }
    parallelism["dataParallel"] = {"mode": "BMUF", "bmuf": settings}


def _devices(chance: random.Random, parallelism: Settings) -> None:
    parallelism |= {"devicesPerProcess": chance.choice([2, 3]), "deviceMode": chance.choice(["Replicate", "Place"])}


def _needing(degree: str) -> Technique:
    def technique(chance: random.Random, parallelism: Settings) -> None:
        parallelism.setdefault(degree, chance.choice([2, 3, 4]))

    return technique


def _context(chance: random.Random, parallelism: Settings) -> None:
    # These divide the sequences and the heads of every model.
    parallelism |= {_CONTEXT: chance.choice([2, 4]), "contextParallelMethod": chance.choice(["Ulysses", "Ring"])}


_TECHNIQUES: dict[str, Technique] = {
    "replicas": lambda chance, parallelism: None,
    "devices": _devices,
    "context": _context,
    "LocalSGD": _local_sgd,
    "BMUF": _bmuf,
    **{degree: _needing(degree) for degree in _DEGREES},
    **{schedule.value: _in_pipeline(schedule) for schedule in PipelineSchedule},
    **{name.value: _compressed(name) for name in CompressionName},
}
