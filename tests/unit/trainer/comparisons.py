"""What a run says of its steps, and what two runs must have in common."""

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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


def stored(checkpoint: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors that a checkpoint holds below `prefix`, read from its files."""
    reader = dcp.FileSystemReader(checkpoint)
    found = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in reader.read_metadata().state_dict_metadata.items()
        if key.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(found, storage_reader=reader, no_dist=True)
    return {key.removeprefix(prefix): value for key, value in found.items()}


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


def require_same_training(
    found: dict[str, Any], expected: dict[str, Any], *figures: str, adapters_alone: bool = False,
    tolerance: float = 1e-10,
) -> None:  # fmt: skip
    """Fails where two evaluated runs differ in errors, gradients, parameters, or losses, norms and `figures` of steps;
    adapters_alone: or where anything else has a gradient."""
    assert found["errors"] == expected["errors"] == [None]
    trained = {name for name in expected["parameters"] if not adapters_alone or ".lora_" in name}
    assert expected["gradients"].keys() == trained
    require_same(found["gradients"], expected["gradients"], tolerance)
    require_same(found["parameters"], expected["parameters"], tolerance)
    require_same_figures(found, expected, (LOSS, "grad_norm", HELD_OUT_LOSS, *figures), tolerance=tolerance)
