"""Figures of a training, read from the lines that its rank 0 prints. Pure."""

import math
import re
from collections.abc import Iterable
from typing import TypeAlias

Row: TypeAlias = dict[str, float | None]
"""Figures of a step by the names of metrics.jsonl; None where one is not finite, and JSON has none."""

_PAIR = re.compile(r"([a-z][\w/]*): (-?(?:[\d,]+(?:\.\d+)?(?:e[-+]\d+)?|nan|inf))(GiB|%)?")
# Words of a line -> the names in metrics.jsonl.
_STEP = {
    "loss": "loss_metrics/global_avg_loss",
    "memory": "memory(GiB)",
    "samples/s": "throughput(sps)",
    "tps": "throughput(tps)",
    "mfu": "mfu(%)",
}
_EVALUATION = {"loss": "validation_metrics/global_avg_loss"}


def rows_of(lines: Iterable[str]) -> list[Row]:
    """Return a row for each line of a step or of an evaluation; others are passed over."""
    return [row for line in lines if (row := _row(line)) is not None]


def _row(line: str) -> Row | None:
    kind = line.partition(":")[0]
    if kind not in ("step", "evaluation"):
        return None
    parts = line.split("  ")
    pairs = [match.groups() for part in parts if (match := _PAIR.fullmatch(part)) is not None]
    if len(pairs) != len(parts) or len(pairs) < 2 or not pairs[0][1].isdigit():
        return None
    row: Row = {"step": int(pairs[0][1])}
    for word, text, _ in pairs[1:]:
        value = float(text.replace(",", ""))
        key = _STEP.get(word, word) if kind == "step" else _EVALUATION.get(word, f"validation_metrics/{word}")
        row[key] = value if math.isfinite(value) else None
    return row
