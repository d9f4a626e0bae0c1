"""Plans of pipelines without flush: whole, in an order that can be followed, each version there while it is used."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_trainer.parallel.pipedream.stage_schedule import Plan, Weights
from disttrain_trainer.parallel.pipeline.simulate import Action, Kind, end_times


@st.composite
def pipelines(draw: st.DrawFn) -> list[Plan]:
    """The plans of all stages; PipeDream-2BW takes at least as many microbatches for an update as there are stages."""
    weights, stages = draw(st.sampled_from(Weights)), draw(st.integers(2, 6))
    least = stages if weights is Weights.DOUBLE_BUFFERED else 1
    return [
        Plan(weights, stage, stages, per_update)
        for per_update in [draw(st.integers(least, 8))]
        for stage in range(stages)
    ]


def actions_of(plan: Plan, steps: int) -> list[Action]:
    return list(plan.actions(lambda number: number < steps * plan.per_update))


def equal(stages: int) -> dict[tuple[Kind, int], float]:
    return {
        (kind, stage): seconds
        for kind, seconds in ((Kind.FORWARD, 1.0), (Kind.BACKWARD, 2.0))
        for stage in range(stages)
    }


@given(pipelines(), st.integers(0, 8))
def test_every_microbatch_passes_every_stage_once_each_way(plans: list[Plan], steps: int) -> None:
    for plan in plans:
        expected = Counter(
            Action(kind, plan.stage, number)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for number in range(steps * plan.per_update)
        )
        assert Counter(actions_of(plan, steps)) == expected


@given(pipelines(), st.integers(1, 8))
def test_the_plans_can_be_followed_together(plans: list[Plan], steps: int) -> None:
    table = {plan.stage: actions_of(plan, steps) for plan in plans}
    assert len(end_times(table, equal(len(plans)))) == sum(map(len, table.values()))


@given(pipelines(), st.integers(1, 8))
def test_a_version_is_there_whenever_it_is_used(plans: list[Plan], steps: int) -> None:
    """Followed as the flow does: after an update only what `needed` names is kept, and the newest."""
    for plan in plans:
        held, newest, most = {0}, 0, 1
        for action in actions_of(plan, steps):
            assert plan.version(action.microbatch) in held
            if action.kind is Kind.BACKWARD and plan.ends_update(action.microbatch):
                held = {*plan.needed(newest), newest + 1}
                newest += 1
                most = max(most, len(held))
        assert most <= plan.versions
        full = 2 * plan.stages * plan.per_update
        if steps * plan.per_update >= full:
            assert most == plan.versions


@given(pipelines(), st.integers(0, 60))
def test_versions_are_those_of_the_papers(plans: list[Plan], number: int) -> None:
    versions = [plan.version(number) for plan in plans]
    first, last = plans[0], plans[-1]
    match first.weights:
        case Weights.STASHED:
            # The newest that the stage has when the microbatch comes: so many updates as there were backward passes.
            for plan, version in zip(plans, versions, strict=True):
                actions = actions_of(plan, number // plan.per_update + 1)
                before = actions[: actions.index(Action(Kind.FORWARD, plan.stage, number))]
                passes = sum(action.kind is Kind.BACKWARD for action in before)
                assert version == passes // plan.per_update
            assert versions[-1] == number // last.per_update
        case Weights.VERTICAL_SYNC:
            stashed = Plan(Weights.STASHED, 0, first.stages, first.per_update)
            assert set(versions) == {stashed.version(number)}
        case Weights.DOUBLE_BUFFERED:
            step = number // first.per_update
            assert set(versions) == {step - min(step, 1)}


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_the_number_of_versions(stages: int) -> None:
    def versions(weights: Weights, per_update: int) -> list[int]:
        return [Plan(weights, stage, stages, per_update).versions for stage in range(stages)]

    assert versions(Weights.STASHED, 1) == [stages - stage for stage in range(stages)]
    assert versions(Weights.VERTICAL_SYNC, 1) == [stages] * stages
    assert versions(Weights.DOUBLE_BUFFERED, stages) == [2] * stages


@given(pipelines())
def test_what_a_rank_says_of_a_step_is_known_when_the_first_stage_admits_another(plans: list[Plan]) -> None:
    """So a wish to stop needs no waiting: `lag` steps later every rank has said it."""
    first = plans[0]
    steps = 3 * first.lag + 3
    ends = end_times({plan.stage: actions_of(plan, steps) for plan in plans}, equal(len(plans)))
    for step in range(first.lag + 1, steps):
        begin = ends[Action(Kind.FORWARD, 0, step * first.per_update)] - 1.0
        acknowledged = (step - first.lag) * first.per_update - 1
        assert max(ends[Action(Kind.BACKWARD, plan.stage, acknowledged)] for plan in plans) <= begin


@pytest.mark.parametrize(("stages", "batch"), [(2, 2), (4, 4), (4, 8)])
def test_a_full_pipeline_loses_no_time(stages: int, batch: int) -> None:
    """With a flush after each batch of m microbatches it would take (m + p - 1) / m of the time."""
    steps = 50
    plans = [Plan(Weights.DOUBLE_BUFFERED, stage, stages, batch) for stage in range(stages)]
    took = max(end_times({plan.stage: actions_of(plan, steps) for plan in plans}, equal(stages)).values())
    assert took == pytest.approx(3.0 * (steps * batch + stages - 1))


def test_nothing_is_admitted_after_the_first_refusal() -> None:
    asked = []

    def admitted(number: int) -> bool:
        asked.append(number)
        return number < 2

    actions = list(Plan(Weights.STASHED, 0, 4).actions(admitted))
    assert asked == [0, 1, 2]
    assert [(action.kind, action.microbatch) for action in actions] == [
        (Kind.FORWARD, 0),
        (Kind.FORWARD, 1),
        (Kind.BACKWARD, 0),
        (Kind.BACKWARD, 1),
    ]
