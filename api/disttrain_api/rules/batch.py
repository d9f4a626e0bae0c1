"""Batch sizes against each other and the layout. Arithmetic and sentences are those of `disttrain_api.batch`."""

from collections.abc import Callable

from disttrain_api.batch import ALL_SIZES, NO_ACCUMULATION, NO_MICRO, NO_SIZE, find_misfit
from disttrain_api.pipeline import microbatches_of
from disttrain_api.rules.layout import (
    CUTS,
    MICROBATCHES,
    MISFIT,
    READS_LAYOUT,
    WORLD,
    layout_fits,
    product_of_others,
)
from disttrain_api.rules.rule import Rule, Values, given
from disttrain_api.spec import JobSpec

_MICRO, _WORLD = "self.training.microBatchSize", "self.training.globalBatchSize"
_STEPS = "self.training.gradientAccumulationSteps"
_STEPS_OR_1 = given("self.training.?gradientAccumulationSteps", "1")
# Replicate x shard degree: what the cuts of a replica leave of the world size. MISFIT refuses where they do not divide.
_REPLICAS = f"(({WORLD}) / ({CUTS}))"
_READS = (
    *READS_LAYOUT,
    "spec.training.microBatchSize",
    "spec.training.globalBatchSize",
    "spec.training.gradientAccumulationSteps",
)
_VALUES = {
    "world": _WORLD,
    "micro": _MICRO,
    "accumulation": _STEPS,
    "replicas": _REPLICAS,
    "pipeline": MICROBATCHES,
}
_REST = f"{_REPLICAS} * {MICROBATCHES}"


def _says(sentence: str) -> Callable[[JobSpec], Values | None]:
    """A check: is this the sentence that the arithmetic has to say?"""

    def check(spec: JobSpec) -> Values | None:
        if spec.training is None or not layout_fits(spec):
            return None
        shard = spec.parallelism.data_parallel_shard_degree or 1
        replicas = spec.world_size // product_of_others(spec.parallelism) * shard
        misfit = find_misfit(spec.training, replicas, microbatches_of(spec.parallelism))
        return misfit.values if misfit is not None and misfit.sentence == sentence else None

    return check


def _rule(identifier: str, sentence: str, applies: str, fits: str, **values: str) -> Rule:
    """A rule that holds where it does not apply, where another rule refuses the layout, or where the sizes fit."""
    return Rule(
        id=identifier,
        path="spec.training.globalBatchSize",
        sentence=sentence,
        check=_says(sentence),
        cel=f"!has(self.training) || !({applies}) || {fits} || {MISFIT}",
        values=_VALUES | values,
        reads=_READS,
    )


BATCH_RULES = (
    Rule(
        id="BatchSizeGiven",
        path="spec.training",
        sentence=NO_SIZE,
        check=_says(NO_SIZE),
        cel=f"!has(self.training) || has({_MICRO}) || has({_WORLD}) || {MISFIT}",
        reads=_READS,
    ),
    _rule(
        "GlobalBatchMultipleOfAccumulation",
        NO_MICRO,
        applies=f"has({_WORLD}) && !has({_MICRO})",
        fits=f"{_WORLD} % ({_STEPS_OR_1} * {_REST}) == 0",
        accumulation=_STEPS_OR_1,
        product=f"{_STEPS_OR_1} * {_REST}",
    ),
    _rule(
        "GlobalBatchMultipleOfMicroBatch",
        NO_ACCUMULATION,
        applies=f"has({_WORLD}) && has({_MICRO}) && !has({_STEPS})",
        fits=f"{_WORLD} % ({_MICRO} * {_REST}) == 0",
        product=f"{_MICRO} * {_REST}",
    ),
    _rule(
        "GlobalBatchEqualsProduct",
        ALL_SIZES,
        applies=f"has({_WORLD}) && has({_MICRO}) && has({_STEPS})",
        fits=f"{_WORLD} == {_MICRO} * {_STEPS} * {_REST}",
        product=f"{_MICRO} * {_STEPS} * {_REST}",
    ),
)
