"""Tables of actions: complete, in an order that can be followed, and with the idle part that theory gives them."""

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api.parallelism import Parallelism, Pipeline, PipelineSchedule
from disttrain_api.pipeline import (
    FLUSHLESS_SCHEDULES,
    SINGLE_STAGE_SCHEDULES,
    index_of_stage,
    microbatches_of,
    rounds_of,
    stages_of,
)
from disttrain_api.rules.pipeline import PIPELINE_RULES
from disttrain_api.spec import JobSpec, Workers
from disttrain_trainer.parallel.pipeline.schedule import build_schedule, table_of
from disttrain_trainer.parallel.pipeline.simulate import (
    Action,
    Kind,
    Table,
    end_times,
    idle_part,
    splits_backward,
)
from tests.suites import examples


def table(schedule: PipelineSchedule, degree: int, microbatches: int, per_rank: int) -> Table:
    """The table of a schedule, built for rank 0 from stages without a network."""
    stages = [
        SimpleNamespace(num_stages=degree * per_rank, group_size=degree, group_rank=0, submod=None, stage_index=number)
        for number in range(per_rank)
    ]
    built = build_schedule(schedule, stages, microbatches, lambda outputs, number: outputs)
    return table_of(built, schedule, degree, microbatches)


def equal(forward: float = 1.0, backward: float = 1.0) -> dict[tuple[Kind, int], float]:
    """Stages that are alike; a backward pass is as long as its two halves."""
    times = {Kind.FORWARD: forward, Kind.BACKWARD: backward, Kind.INPUTS: backward / 2, Kind.PARAMETERS: backward / 2}
    return {(kind, stage): seconds for kind, seconds in times.items() for stage in range(64)}


@pytest.mark.parametrize("schedule", [PipelineSchedule.GPIPE, PipelineSchedule.ONE_F_ONE_B])
@pytest.mark.parametrize(("degree", "microbatches"), [(2, 2), (2, 8), (3, 4), (4, 4), (4, 16), (8, 8)])
@pytest.mark.parametrize("backward", [1.0, 2.0])
def test_bubble_of_gpipe_and_1f1b(schedule: PipelineSchedule, degree: int, microbatches: int, backward: float) -> None:
    found = idle_part(table(schedule, degree, microbatches, 1), equal(backward=backward))
    assert found == pytest.approx((degree - 1) / (microbatches + degree - 1))


@pytest.mark.parametrize(
    ("degree", "microbatches", "per_rank"), [(2, 2, 2), (2, 8, 2), (4, 4, 2), (4, 8, 3), (3, 6, 2)]
)
def test_the_bubble_of_interleaved_stages(degree: int, microbatches: int, per_rank: int) -> None:
    found = idle_part(table(PipelineSchedule.INTERLEAVED_1F1B, degree, microbatches, per_rank), equal())
    assert found == pytest.approx((degree - 1) / (per_rank * microbatches + degree - 1))


def test_zero_bubble_schedules_wait_less() -> None:
    times = equal(backward=2.0)
    one = idle_part(table(PipelineSchedule.ONE_F_ONE_B, 4, 8, 1), times)
    interleaved = idle_part(table(PipelineSchedule.INTERLEAVED_1F1B, 4, 8, 2), times)
    zero = idle_part(table(PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, 4, 8, 2), times)
    v = idle_part(table(PipelineSchedule.ZBV_ZERO_BUBBLE, 4, 8, 2), times)
    assert v <= zero < interleaved < one


SPLIT = (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, PipelineSchedule.ZBV_ZERO_BUBBLE, PipelineSchedule.DUAL_PIPE_V)


@pytest.mark.parametrize("schedule", [name for name in PipelineSchedule if name not in FLUSHLESS_SCHEDULES])
def test_gradients_need_another_layout_only_where_the_backward_pass_is_split(schedule: PipelineSchedule) -> None:
    per_rank = 1 if schedule in SINGLE_STAGE_SCHEDULES else 2
    assert splits_backward(table(schedule, 4, 8, per_rank)) is (schedule in SPLIT)


@st.composite
def pipelines(draw: st.DrawFn) -> Parallelism:
    """Pipelines that are flushed in every step, and that the rules let through."""
    schedule = draw(st.sampled_from([name for name in PipelineSchedule if name not in FLUSHLESS_SCHEDULES]))
    degree = draw(st.integers(2, 5))
    settings = Pipeline(schedule=schedule, microbatches=draw(st.none() | st.integers(1, 12)))
    parallelism = Parallelism(pipeline_parallel_degree=degree, pipeline=settings)
    spec = JobSpec(workers=Workers(replicas=degree), parallelism=parallelism)
    if any(rule.problem(spec) for rule in PIPELINE_RULES):
        microbatches = microbatches_of(parallelism)
        stages = stages_of(parallelism)
        # Refused for one of the two reasons that a number of microbatches can have.
        assert microbatches < stages or microbatches % rounds_of(microbatches, degree)
        return draw(pipelines())
    return parallelism


@settings(max_examples=examples(60), deadline=None)
@given(pipelines())
def test_every_pipeline_that_is_accepted_has_a_whole_table(parallelism: Parallelism) -> None:
    assert parallelism.pipeline.schedule is not None
    degree = parallelism.pipeline_parallel_degree or 1
    stages, microbatches = stages_of(parallelism), microbatches_of(parallelism)
    found = table(parallelism.pipeline.schedule, degree, microbatches, stages // degree)
    actions = Counter(action for rank in found.values() for action in rank)
    assert set(actions.values()) == {1}
    for rank, own in found.items():
        assert {index_of_stage(parallelism)[action.stage] for action in own} == {rank}
    for stage in range(stages):
        for number in range(microbatches):
            kinds = {kind for kind in Kind if Action(kind, stage, number) in actions}
            assert kinds in ({Kind.FORWARD, Kind.BACKWARD}, {Kind.FORWARD, Kind.INPUTS, Kind.PARAMETERS})
    assert len(end_times(found, equal())) == len(actions)


def test_actions_that_wait_for_each_other_are_reported() -> None:
    wrong = {0: [Action(Kind.BACKWARD, 0, 0), Action(Kind.FORWARD, 0, 0)], 1: [Action(Kind.FORWARD, 1, 0)]}
    with pytest.raises(ValueError, match="wait for each other"):
        end_times(wrong, equal())
