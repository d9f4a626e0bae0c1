"""Who sends what to whom: all-reduces as the trainer plans them, parameter servers, replicas that meet now and then."""

from math import cos, pi, sin

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from disttrain_api.mesh import Mesh
from disttrain_trainer.collectives.schedules import Schedule, central, ring, tree
from tools.figures.style import BLUE, GREEN, GREY, INK, ORANGE, PURPLE, Point, arrow, box, disc, frame, limits, sheet

RANKS = 4
_CHUNKS = (BLUE, ORANGE, GREEN, PURPLE)


def draw_all_reduce() -> Figure:
    """Return a row per algorithm, a picture per round: arrows in the colour of the chunk that they carry."""
    shown = (("Ring", ring(RANKS)), ("Tree", tree(RANKS)), ("Central", central(RANKS)))
    width = max(len(schedule.rounds) for _, schedule in shown)
    figure, (axes,) = sheet(9.4, 6.2)
    limits(axes, -1.5, width * 3.2 - 1.6, -10.4, 2.2)
    for row, (name, schedule) in enumerate(shown):
        axes.text(-1.4, 1.6 - row * 4.2, _cost(name, schedule), fontsize=9)
        for number in range(len(schedule.rounds)):
            _round(axes, schedule, number, (number * 3.2, -row * 4.2))
    return figure


def _cost(name: str, schedule: Schedule) -> str:
    size = 1200
    busiest = max(schedule.sent(rank, size, 1) for rank in range(RANKS)) / size
    return f"{name}: {len(schedule.rounds)} rounds, the busiest rank sends {busiest:g} times the gradients"


def _round(axes: Axes, schedule: Schedule, number: int, middle: Point) -> None:
    angles = [pi / 2 - 2 * pi * rank / RANKS for rank in range(RANKS)]
    places = [(middle[0] + cos(angle), middle[1] + sin(angle)) for angle in angles]
    for transfer in schedule.rounds[number]:
        colour = _CHUNKS[transfer.chunk] if schedule.chunks > 1 else INK
        style = "solid" if transfer.adds else "dashed"
        arrow(axes, places[transfer.source], places[transfer.target], colour, linestyle=style, gap=11)
    for rank, place in enumerate(places):
        disc(axes, place, GREY, str(rank), radius=0.3)
    axes.text(middle[0], middle[1] - 1.75, f"round {number + 1}", ha="center", va="bottom", fontsize=8)


def draw_parameter_servers() -> Figure:
    """Return servers above workers, with what goes up and down."""
    figure, (axes,) = sheet(8, 3.7)
    limits(axes, -0.2, 9.2, -0.9, 4.0)
    servers = [(2.5, 3.0), (6.5, 3.0)]
    workers = [(1.0 + 2.35 * number, 0.2) for number in range(4)]
    for worker in workers:
        for number, server in enumerate(servers):
            colour = (BLUE, ORANGE)[number]
            arrow(axes, worker, server, colour, bend=0.06, gap=32)
            arrow(axes, server, worker, colour, bend=0.06, gap=32, linestyle="dashed", linewidth=0.9)
    for number, server in enumerate(servers):
        disc(axes, server, (BLUE, ORANGE)[number], f"server\n{number}", radius=0.55)
        axes.text(server[0], server[1] + 0.65, f"half {number} of the numbers, its optimizer", ha="center", fontsize=8)
    for number, worker in enumerate(workers):
        disc(axes, worker, GREY, f"worker\n{number}", radius=0.5)
    axes.text(
        4.5,
        -0.75,
        "solid: gradients of a half are pushed; dashed: parameters are pulled; no worker talks to a worker",
        ha="center",
        fontsize=8,
    )
    return figure


def draw_local_sgd() -> Figure:
    """Return when the replicas talk to each other: in each step, in each period, in pods and between pods."""
    rows = (
        ("AllReduce", [(step, 0, 4, BLUE) for step in range(1, 17)]),
        ("LocalSGD, period 4", [(step, 0, 4, ORANGE) for step in (4, 8, 12, 16)]),
        (
            "period 4, globalPeriod 8",
            [(step, low, low + 2, GREEN) for step in (4, 12) for low in (0, 2)]
            + [(step, 0, 4, ORANGE) for step in (8, 16)],
        ),
    )
    figure, axes = sheet(8.4, 4.3, 1, 3)
    for one, (name, meetings) in zip(axes, rows, strict=True):
        limits(one, -2.2, 16.6, -0.3, 4.6)
        one.set_aspect("auto")
        one.set_title(name, fontsize=9, loc="left", pad=2)
        for replica in range(4):
            one.text(-0.2, replica + 0.5, f"replica {replica}", ha="right", va="center", fontsize=8)
            for step in range(16):
                box(one, (step + 0.06, replica + 0.12), (0.76, 0.76), GREY)
        for step, low, high, colour in meetings:
            box(one, (step - 0.16, low + 0.1), (0.2, high - low - 0.2), colour)
    axes[-1].text(
        8,
        -0.9,
        "16 steps; blue: gradients are summed, orange: all average their parameters, green: those of a pod do",
        ha="center",
        fontsize=8,
    )
    return figure


def draw_experts() -> Figure:
    """Return four ranks that send tokens to the ranks of their experts and get the results back."""
    figure, (axes,) = sheet(8, 3.4)
    limits(axes, -1.6, 9.8, -0.7, 4.7)
    columns: tuple[tuple[float, str], ...] = (
        (0.0, "tokens of rank"),
        (4.0, "experts of rank"),
        (8.0, "tokens of rank"),
    )
    for at, word in columns:
        for rank in range(4):
            text = f"{word} {rank}" if word.startswith("tokens") else f"experts {2 * rank}, {2 * rank + 1}"
            box(axes, (at - 0.9, 3.6 - rank * 1.1), (1.8, 0.7), _CHUNKS[rank] if at == 4.0 else GREY, text, fontsize=7)
    chosen = ((0, 1), (0, 3), (1, 0), (1, 2), (2, 2), (2, 1), (3, 0), (3, 3))
    for source, expert in chosen:
        left: Point = (0.9, 3.95 - source * 1.1)
        middle: Point = (3.1, 3.95 - expert * 1.1)
        arrow(axes, left, middle, _CHUNKS[expert], gap=1)
        arrow(axes, (4.9, middle[1]), (7.1, left[1]), _CHUNKS[expert], gap=1, linestyle="dashed")
    axes.text(2.0, -0.45, "all-to-all: each token to its experts", ha="center", fontsize=8)
    axes.text(6.0, -0.45, "all-to-all: back again", ha="center", fontsize=8)
    return figure


def draw_groups() -> Figure:
    """Return the ranks of pp2 x dp2 x fsdp2 x tp2 in pods, with the groups that talk to each other."""
    mesh = Mesh(pipeline=2, replicate=2, shard=2, tensor=2)
    figure, (axes,) = sheet(8.4, 3.6)
    limits(axes, -0.6, 11.9, -0.9, 4.4)
    for rank in range(mesh.world_size):
        where = mesh.coordinates(rank)
        x = where["pipeline"] * 6 + where["shard"] * 2.6 + where["tensor"] * 0.9 + 0.4
        disc(axes, (x, 2.8 - where["replicate"] * 2.2), (BLUE, GREEN)[where["shard"]], str(rank), radius=0.36)
    for pipeline in range(2):
        for replica in range(2):
            for shard in range(2):
                frame(axes, (pipeline * 6 + shard * 2.6 - 0.1, 2.3 - replica * 2.2), (1.9, 1.0), "")
            axes.text(pipeline * 6 + 2.15, 3.42 - replica * 2.2, f"replica {replica}", ha="center", fontsize=8)
        axes.text(pipeline * 6 + 2.15, 4.05, f"stage {pipeline}", ha="center", fontsize=9)
    axes.text(
        5.4,
        -0.7,
        "dashed: a tensor group; same colour: the same shard of a stage; its copy is in the other replica",
        ha="center",
        fontsize=8,
    )
    return figure
