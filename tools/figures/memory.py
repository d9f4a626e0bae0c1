"""What a rank keeps: parts of parameters, gradients and optimizer state, and the bits of a number."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, arrow, box, limits, sheet

RANKS = 4
# Parameter, gradient and the two moments of AdamW, each in FP32: 4, 4 and 8 bytes per parameter.
PARTS = (("parameters", 4, BLUE), ("gradients", 4, GREEN), ("optimizer state", 8, ORANGE))
# Bits of the sign, the exponent and the mantissa.
FORMATS = (("FP32", 1, 8, 23), ("TF32", 1, 8, 10), ("BF16", 1, 8, 7), ("FP16", 1, 5, 10))
# Bytes per number of a gradient that `compression` sends; OneBit and Int8 with a scale of 4 bytes per 256 numbers.
SENT = (
    ("none", 4.0),
    ("FP16, BF16", 2.0),
    ("Int8", 1 + 4 / 256),
    ("OneBit", 1 / 8 + 4 / 256),
    ("TopK 1 %", 0.01 * 8),
    ("RandomK 1 %", 0.01 * 4),
)


def draw_shards() -> Figure:
    """Return what each of four ranks keeps with replicas, with shards, and with two copies of two shards."""
    figure, axes = sheet(9, 3.9, 3, 1)
    layouts = (("replicas", 1), ("4 shards", 4), ("2 replicas of 2 shards", 2))
    for one, (name, shards) in zip(axes, layouts, strict=True):
        limits(one, -0.4, 5.2, -3.6, 16.8)
        one.set_aspect("auto")
        one.set_title(f"{name}: {sum(size for _, size, _ in PARTS) / shards:g} bytes", fontsize=9)
        for rank in range(RANKS):
            _kept(one, rank, shards)
    words = "      ".join(
        f"{colour}: {name}" for (name, _, _), colour in zip(PARTS, ("blue", "green", "orange"), strict=True)
    )
    axes[1].text(2.4, -3.3, f"bytes per parameter with AdamW in FP32.      {words}", ha="center", fontsize=8)
    return figure


def _kept(axes: Axes, rank: int, shards: int) -> None:
    bottom, left = 0.0, rank * 1.25
    for _, size, colour in PARTS:
        box(axes, (left, bottom), (1.0, size), "#ffffff")
        part = size / shards
        box(axes, (left, bottom + part * (rank % shards)), (1.0, part), colour)
        bottom += size
    axes.text(left + 0.5, -0.9, f"rank {rank}", ha="center", va="center", fontsize=8)


def draw_tensor() -> Figure:
    """Return a feed-forward network cut over two ranks: the first matrix by columns, the second by rows."""
    figure, (axes,) = sheet(8.4, 3.4)
    limits(axes, -1.3, 12.6, -0.6, 5.0)
    box(axes, (-1.1, 1.4), (1.4, 1.6), GREY, "input\n(whole)")
    for rank, colour in enumerate((BLUE, ORANGE)):
        low = 2.7 - rank * 2.5
        box(axes, (2.0, low), (1.9, 1.5), colour, f"columns {rank}\nof matrix 1")
        box(axes, (4.9, low + 0.35), (1.5, 0.8), colour, "activations")
        box(axes, (7.4, low), (1.9, 1.5), colour, f"rows {rank}\nof matrix 2")
        axes.text(5.6, low + 1.75, f"rank {rank}", ha="center", fontsize=9)
        arrow(axes, (0.3, 2.2), (2.0, low + 0.75), gap=1)
        arrow(axes, (3.9, low + 0.75), (4.9, low + 0.75), gap=1)
        arrow(axes, (6.4, low + 0.75), (7.4, low + 0.75), gap=1)
        arrow(axes, (9.3, low + 0.75), (10.6, 2.2), colour, gap=1)
    box(axes, (10.6, 1.4), (1.8, 1.6), GREEN, "sum\n(all-reduce)")
    return figure


def draw_formats() -> Figure:
    """Return the bits of the formats: sign, exponent, mantissa."""
    figure, (axes,) = sheet(8, 2.6)
    limits(axes, -4.5, 33, -5.6, 1.2)
    axes.set_aspect("auto")
    for row, (name, *widths) in enumerate(FORMATS):
        axes.text(-0.5, -row * 1.3 + 0.45, name, ha="right", va="center", fontsize=9)
        at = 0
        for width, colour in zip(widths, (RED, BLUE, GREEN), strict=True):
            for bit in range(width):
                box(axes, (at + bit, -row * 1.3), (1, 0.9), colour)
            at += width
    axes.text(
        16, -5.4, "red: sign    blue: exponent, the range    green: mantissa, the digits", ha="center", fontsize=8
    )
    return figure


def draw_sent() -> Figure:
    """Return what each compression sends per number, beside FP32."""
    figure = Figure(figsize=(7, 2.6), layout="constrained")
    axes = figure.subplots()
    names, sizes = [name for name, _ in SENT], [size for _, size in SENT]
    axes.barh(range(len(SENT)), sizes, color=BLUE, height=0.65)
    for row, size in enumerate(sizes):
        axes.text(size + 0.04, row, f"{size:.3g} bytes, 1/{4 / size:.0f}", va="center", fontsize=8)
    axes.set_yticks(range(len(SENT)), names, fontsize=8)
    axes.set_xlim(0, 5)
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bytes that a rank hands over per number of a gradient", fontsize=8)
    return figure


def draw_offload() -> Figure:
    """Return what lies on a GPU and what in the host's memory, with and without offload."""
    figure, axes = sheet(8.4, 3.2, 2, 1)
    rows = (
        (
            "offload off",
            (("parameters", BLUE), ("gradients", GREEN), ("optimizer state", ORANGE), ("activations", PURPLE)),
            (),
        ),
        (
            "offload.parameters, offload.activations",
            (("one layer's parameters", BLUE), ("one layer's activations", PURPLE)),
            (("parameters", BLUE), ("gradients", GREEN), ("optimizer state", ORANGE), ("activations", PURPLE)),
        ),
    )
    for one, (name, device, host) in zip(axes, rows, strict=True):
        limits(one, -0.3, 6.3, -0.8, 4.6)
        one.set_aspect("auto")
        one.set_title(name, fontsize=9)
        for at, word, kept in ((0.0, "GPU", device), (3.3, "host", host)):
            one.text(at + 1.35, -0.5, word, ha="center", fontsize=9)
            box(one, (at, 0.0), (2.7, 4.3), "#ffffff")
            for row, (text, colour) in enumerate(kept):
                box(one, (at + 0.1, 0.1 + row * 1.04), (2.5, 0.95), colour, text)
        if host:
            arrow(one, (3.35, 2.9), (2.65, 2.9), gap=0)
            arrow(one, (2.65, 2.5), (3.35, 2.5), gap=0)
    return figure
