"""The bubble of a pipeline: what is measured, what the schedule has, and that both are logged at every logged step.

Clocks here stand still unless a test moves them; what real ones say is held only against what no machine can change.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from disttrain_api.parallelism import Parallelism
from disttrain_trainer.parallel.pipeline import measure
from disttrain_trainer.parallel.pipeline.bubble import Measured, bubbles_of
from disttrain_trainer.parallel.pipeline.clock import StageClock
from disttrain_trainer.parallel.pipeline.measure import seconds_of_layers
from disttrain_trainer.parallel.pipeline.simulate import Action, Kind, end_times
from disttrain_trainer.parallel.pipeline.split import split_layers
from disttrain_trainer.runtime.device import Device
from tests.unit.trainer.worlds import run_cases, small, user

BUBBLE, OF_SCHEDULE = "pipeline/bubble(%)", "pipeline/bubble_of_schedule(%)"
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUTS, Kind.PARAMETERS  # noqa: E741


class Clock:
    """A device whose time passes only where a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def mark(self):
        return self.now

    def synchronize(self):
        pass

    def seconds(self, begin, end):
        return end - begin

    def work(self, seconds):
        """Something that takes so long, whatever it is given."""

        def worked(*arguments, **options):
            self.now += seconds

        return worked


def stage_of(clock, index=0, forward=3.0, backward=5.0, parameters=2.0):
    return SimpleNamespace(
        stage_index=index,
        forward_one_chunk=clock.work(forward),
        backward_one_chunk=clock.work(backward),
        backward_weight_one_chunk=clock.work(parameters),
    )


class TestStageClock:
    def test_computing_is_counted_by_kind_and_stage_and_waiting_belongs_to_the_step_alone(self):
        device = Clock()
        clock, stages = StageClock(device), [stage_of(device, index) for index in (1, 3)]
        for stage in stages:
            clock.watch(stage)
        with clock.step():
            device.now += 7
            stages[0].forward_one_chunk(0)
            stages[1].forward_one_chunk(0)
            stages[1].forward_one_chunk(1)
            stages[1].backward_one_chunk(0, full_backward=True)
            stages[1].backward_one_chunk(1, full_backward=False)
            device.now += 1
            stages[1].backward_weight_one_chunk(1)
        device.now += 100
        with clock.step():
            stages[0].backward_one_chunk(0)
        assert clock.take() == Measured(
            seconds=7 + 3 * 3 + 2 * 5 + 1 + 2 + 5,
            actions={(F, 1): (3, 1), (F, 3): (6, 2), (B, 3): (5, 1), (I, 3): (5, 1), (W, 3): (2, 1), (B, 1): (5, 1)},
        )
        assert clock.take() == Measured(0, {}), "what was taken is not taken again"

    def test_the_loss_is_a_part_of_its_forward_pass(self):
        device = Clock()
        clock, stage = StageClock(device), stage_of(device)
        clock.watch(stage)
        with clock.step():
            for number in range(2):
                stage.forward_one_chunk(number)
                device.now += 4
                clock.prolong_forward(0)
        assert clock.take() == Measured(14, {(F, 0): (14, 2)})


# GPipe with two stages and two microbatches.
TABLE = {rank: [Action(kind, rank, number) for kind in (F, B) for number in (0, 1)] for rank in (0, 1)}


def followed(seconds, transfer=0.0):
    """What ranks measure that follow TABLE as soon as they can, each beginning later by the time of a transfer."""
    ends, measured = end_times(TABLE, seconds), []
    for rank, actions in TABLE.items():
        device = Clock()
        clock = StageClock(device)
        stage = stage_of(device, rank, seconds[F, rank], seconds[B, rank])
        clock.watch(stage)
        with clock.step():
            for action in actions:
                device.now = ends[action] - seconds[action.kind, rank] + transfer
                work = stage.forward_one_chunk if action.kind is F else stage.backward_one_chunk
                work(action.microbatch)
            device.now = max(ends.values()) + transfer
        measured.append(clock.take())
    return measured


class TestBubbles:
    def test_ranks_that_never_wait_longer_than_they_must_have_the_bubble_of_the_schedule(self):
        alike = followed({(F, 0): 1.0, (F, 1): 1.0, (B, 0): 2.0, (B, 1): 2.0})
        # (p - 1) / (m + p - 1)
        assert bubbles_of(alike, TABLE) == pytest.approx({BUBBLE: 100 / 3, OF_SCHEDULE: 100 / 3})

    def test_stages_of_unequal_length(self):
        # Stage 1 begins at 1, computes for 12 without a pause; then stage 0 still has a microbatch of 1 to go back.
        unlike = followed({(F, 0): 1.0, (F, 1): 3.0, (B, 0): 1.0, (B, 1): 3.0})
        expected = 100 * (1 - (4 * 1 + 4 * 3) / (2 * 14))
        assert bubbles_of(unlike, TABLE) == pytest.approx({BUBBLE: expected, OF_SCHEDULE: expected})

    def test_transfers_are_in_what_is_measured_and_not_in_the_schedules(self):
        slow = followed({(F, 0): 1.0, (F, 1): 1.0, (B, 0): 2.0, (B, 1): 2.0}, transfer=3.0)
        assert bubbles_of(slow, TABLE) == pytest.approx({BUBBLE: 100 * (1 - 12 / (2 * 12)), OF_SCHEDULE: 100 / 3})

    def test_replicas_of_a_stage_count_alike(self):
        # One replica twice as fast as the other: on average the stages are alike, and half the time of the fast one is
        # idle.
        fast, slow = (
            [Measured(9 * pace, {(F, at): (2 * pace, 2), (B, at): (4 * pace, 2)}) for at in (0, 1)] for pace in (1, 2)
        )
        found = bubbles_of([fast[0], slow[0], fast[1], slow[1]], TABLE)
        assert found == pytest.approx({BUBBLE: 100 * (1 - (2 * 6 + 2 * 12) / (4 * 18)), OF_SCHEDULE: 100 / 3})

    def test_no_time_has_no_figure(self):
        assert bubbles_of([Measured(0.0, {}), Measured(0.0, {})], TABLE) == {}


class Work(torch.autograd.Function):
    """The identity, for which a clock moves on."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        layer.clock.now += layer.forward_seconds + next(layer.disturbances)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.layer.clock.now += ctx.layer.backward_seconds
        return gradient, None


class Layer(nn.Module):
    """Takes a known time: the first pass 100 s more, since it allocates, the third one 50 s, since it is disturbed."""

    def __init__(self, clock, forward_seconds, backward_seconds):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.clock, self.forward_seconds, self.backward_seconds = clock, forward_seconds, backward_seconds
        self.disturbances = iter([100.0, 0.0, 50.0, 0.0])

    def forward(self, x):
        return Work.apply(self.norm(self.linear(x)), self)


class TestSecondsOfLayers:
    """What `split: Time` goes by."""

    @pytest.fixture
    def layers(self, monkeypatch):
        clock = Clock()
        monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        return nn.Sequential(*(Layer(clock, *seconds) for seconds in [(1, 1), (1, 2), (2, 1), (3, 6), (0, 1)]))

    def test_forward_and_backward_time_of_each_layer_without_what_only_disturbs(self, layers):
        assert seconds_of_layers(layers, torch.randn(8, 4), CPU) == [2, 3, 3, 9, 1]

    def test_it_leaves_the_layers_as_they_were(self, layers):
        before = {name: value.clone() for name, value in layers.state_dict().items()}
        seconds_of_layers(layers, torch.randn(8, 4), CPU)
        assert [name for name, value in layers.state_dict().items() if not torch.equal(value, before[name])] == []
        assert all(parameter.grad is None for parameter in layers.parameters())

    def test_stages_take_about_as_long(self, layers):
        parallelism = Parallelism.model_validate({"pipelineParallelDegree": 2, "pipeline": {"split": "Time"}})
        found = split_layers(layers, parallelism, lambda own: seconds_of_layers(own, torch.randn(8, 4), CPU))
        assert [len(stage) for stage in found] == [3, 2]


CPU = Device(torch.device("cpu"), "gloo")
PIPELINES = {
    "one microbatch": {"schedule": "GPipe", "microbatches": 1},
    "1F1B": {"schedule": "1F1B"},
    "Interleaved1F1B": {"schedule": "Interleaved1F1B"},
    "ZBVZeroBubble": {"schedule": "ZBVZeroBubble"},
    "PipeDream": {"schedule": "PipeDream"},
}
STEPS = 6


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """The figures of each logged step, logged in each and in every third."""
    cases = {
        f"{name}, every {interval}": [
            {
                "training": small(
                    steps=STEPS, model=user("double_builtin_mlp", depth=5), logging={"interval": interval}
                ),
                "parallelism": {"pipelineParallelDegree": 2, "pipeline": pipeline},
            }
        ]
        for name, pipeline in PIPELINES.items()
        for interval in (1, 3)
    }
    results = run_cases(tmp_path_factory.mktemp("bubbles"), 2, cases)
    assert {name: result["errors"] for name, result in results.items()} == {name: [None] for name in cases}
    return {name: [line for line in result["metrics"] if "lr" in line] for name, result in results.items()}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("interval", [1, 3])
def test_both_figures_are_logged_at_every_logged_step(logged, name, interval):
    lines = logged[f"{name}, every {interval}"]
    assert len(lines) >= STEPS // interval
    for line in lines:
        assert 0 < line[BUBBLE] < 100
        assert 0 <= line[OF_SCHEDULE] < 100


@pytest.mark.parametrize("interval", [1, 3])
def test_with_a_single_microbatch_one_of_two_stages_is_always_idle(logged, interval):
    for line in logged[f"one microbatch, every {interval}"]:
        assert line[OF_SCHEDULE] == pytest.approx(50), "however long the passes were"
        assert line[BUBBLE] >= 50
