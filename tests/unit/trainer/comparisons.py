"""What a run says of its steps, and what two runs must have in common."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

LOSS = "loss_metrics/global_avg_loss"
HELD_OUT_LOSS, ACCURACY = "validation_metrics/global_avg_loss", "validation_metrics/accuracy"


def series(result: dict[str, Any], key: str = LOSS) -> list[Any]:
    """This figure of every line of a run that has it."""
    return [line[key] for line in result["metrics"] if key in line]


def model_at(storage: Path, step: int) -> dict[str, Any]:
    """Parameters of a complete checkpoint, by torch's own converter."""
    target = storage / f"step-{step}.pt"
    dcp_to_torch_save(storage / "test" / f"step-{step}", target)
    model: dict[str, Any] = torch.load(target, weights_only=False)["model"]
    return model


def require_same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    """Fails where a parameter differs by more, in parts of its 2-norm."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        size = torch.linalg.vector_norm(value)
        assert size > 0, f"{name} is zero: nothing to compare with"
        distance = torch.linalg.vector_norm(found[name] - value) / size
        assert distance <= tolerance, f"{name} differs by {distance}"


def require_same_gradients(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 1e-10) -> None:
    """`require_same` of all but keys' biases: added to all scores alike, they have gradients of rounding alone."""
    rounding = {name for name in expected if name.endswith("key.bias")}
    whole = torch.stack([torch.linalg.vector_norm(value) for value in expected.values()]).norm()
    for name in rounding:
        for gradients in (found, expected):
            assert torch.linalg.vector_norm(gradients[name]) <= tolerance * whole, f"{name} is not zero"
    rest, of_one = ({name: one[name] for name in one.keys() - rounding} for one in (found, expected))
    require_same(rest, of_one, tolerance)


def require_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Fails where a parameter differs in any bit."""
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


def require_same_figures(
    found: dict[str, Any], expected: dict[str, Any], keys: Iterable[str], *, steps: int | None = None,
    tolerance: float = 1e-10,
) -> None:  # fmt: skip
    """Fails where a figure of a step differs by more, or the expected run has none; `steps`: or not so many.

    A run of so many steps is evaluated once.
    """
    for key in keys:
        values = series(expected, key)
        assert values, key
        assert steps is None or len(values) == (1 if key.startswith("validation") else steps), key
        assert series(found, key) == pytest.approx(values, rel=tolerance, abs=1e-14), key
