"""Who computes what when in a pipeline: drawn from the schedules' own tables and from the simulator of the trainer."""

from types import SimpleNamespace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from disttrain_api.parallelism import PipelineSchedule
from disttrain_trainer.parallel.pipedream.stage_schedule import Plan, Weights
from disttrain_trainer.parallel.pipeline.schedule import build_schedule, table_of
from disttrain_trainer.parallel.pipeline.simulate import Action, Kind, Seconds, Table, end_times, idle_part
from tools.figures.style import BLUE, GREEN, GREY, INK, LIGHT, ORANGE, PURPLE

RANKS = 4
COLOURS = {Kind.FORWARD: BLUE, Kind.BACKWARD: GREEN, Kind.INPUTS: ORANGE, Kind.PARAMETERS: PURPLE}
WORDS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward (gradients of inputs and parameters)",
    Kind.INPUTS: "gradients of inputs",
    Kind.PARAMETERS: "gradients of parameters",
}
_SHOWN = (
    (PipelineSchedule.GPIPE, 1),
    (PipelineSchedule.ONE_F_ONE_B, 1),
    (PipelineSchedule.INTERLEAVED_1F1B, 2),
    (PipelineSchedule.LOOPED_BFS, 2),
    (PipelineSchedule.INTERLEAVED_ZERO_BUBBLE, 2),
    (PipelineSchedule.ZBV_ZERO_BUBBLE, 2),
)


def table(schedule: PipelineSchedule, microbatches: int, per_rank: int) -> Table:
    """Return what each rank computes, in order."""
    stages = [
        SimpleNamespace(num_stages=RANKS * per_rank, group_size=RANKS, group_rank=0, submod=None, stage_index=number)
        for number in range(per_rank)
    ]
    built = build_schedule(schedule, stages, microbatches, lambda outputs, number: outputs)  # type: ignore[arg-type]
    return table_of(built, schedule, RANKS, microbatches)


def times(per_rank: int) -> Seconds:
    """Return what an action takes: a backward pass twice a forward pass, all stages of a rank together 3 units."""
    length = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.INPUTS: 1.0, Kind.PARAMETERS: 1.0}
    return {(kind, stage): one / per_rank for kind, one in length.items() for stage in range(RANKS * per_rank)}


def draw() -> Figure:
    """Return the schedules below each other, on one scale of time."""
    figure = Figure(figsize=(9, 9.6), layout="constrained")
    axes = figure.subplots(len(_SHOWN), 1, sharex=True)
    for one, (schedule, per_rank) in zip(axes, _SHOWN, strict=True):
        actions, seconds = table(schedule, 8, per_rank), times(per_rank)
        idle = idle_part(actions, seconds)
        stages = "1 stage" if per_rank == 1 else f"{per_rank} stages"
        _panel(one, actions, seconds, f"{schedule.value}: {stages} per rank, bubble {idle:.0%} of the step")
    axes[-1].set_xlabel("time, in forward passes of all stages of a rank")
    figure.legend(handles=_legend(Kind), loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def draw_full() -> Figure:
    """Return 1F1B over three steps beside PipeDream, which updates without draining."""
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    axes = figure.subplots(2, 1, sharex=True)
    flushed = _three_steps(table(PipelineSchedule.ONE_F_ONE_B, 4, 1))
    plans = [Plan(Weights.STASHED, stage, RANKS) for stage in range(RANKS)]
    full = {plan.stage: list(plan.actions(lambda number: number < 12)) for plan in plans}
    _panel(
        axes[0], flushed, times(1), "1F1B, three steps of 4 microbatches: each update waits until the pipeline is empty"
    )
    _panel(axes[1], full, times(1), "PipeDream, the same 12 microbatches: each stage updates after every backward pass")
    axes[1].set_xlabel("time, in forward passes of a stage")
    handles = _legend((Kind.FORWARD, Kind.BACKWARD))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _three_steps(one: Table) -> dict[int, list[Action]]:
    """Return the actions of three steps after each other; the microbatches are counted on."""
    return {
        rank: [Action(each.kind, each.stage, each.microbatch + 4 * step) for step in range(3) for each in actions]
        for rank, actions in one.items()
    }


def _panel(axes: Axes, actions: Table, seconds: Seconds, title: str) -> None:
    ends = end_times(actions, seconds)
    step = max(ends.values())
    for rank, row in actions.items():
        axes.add_patch(Rectangle((0, rank - 0.42), step, 0.84, facecolor=LIGHT[GREY], edgecolor="none"))
        for action in row:
            took = seconds[action.kind, action.stage]
            begin = ends[action] - took
            colour = LIGHT[COLOURS[action.kind]] if action.stage < RANKS else COLOURS[action.kind]
            axes.add_patch(Rectangle((begin, rank - 0.42), took, 0.84, facecolor=colour, edgecolor=INK, linewidth=0.4))
            label = axes.text(begin + took / 2, rank, str(action.microbatch), ha="center", va="center", fontsize=6)
            # It lies within the axes: to measure hundreds of them for the layout takes longer than to draw them.
            label.set_in_layout(False)
    axes.set_title(title, fontsize=9, loc="left")
    axes.set_ylim(RANKS - 0.5, -0.5)
    axes.set_xlim(0, max(step, axes.get_xlim()[1]))
    axes.set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _legend(kinds: object) -> list[Patch]:
    shown = [Patch(facecolor=LIGHT[COLOURS[kind]], edgecolor=INK, label=WORDS[kind]) for kind in kinds]  # type: ignore[attr-defined]
    return [*shown, Patch(facecolor=LIGHT[GREY], edgecolor="none", label="bubble")]
