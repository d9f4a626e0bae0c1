"""Losses of examples: recorded with what they depend on, and compared to the last bit."""

import json
import math
from pathlib import Path

import pytest

from tools import same_losses
from tools.cluster.paths import REPOSITORY
from tools.same_losses import Figures, Machine, examples, main, processor_of, record_of, recorded, this_machine, verdict

HERE = Machine("2.13.0", "A Processor @ 2.5GHz")
LOSSES: dict[str, Figures] = {"ddp": [(1, 0.1 + 0.2, None), (2, math.pi / 3, 1e-300)]}


def written(machine: Machine) -> dict[str, object]:
    """A record, as it is read from a file."""
    read: dict[str, object] = json.loads(json.dumps(record_of(machine, LOSSES)))
    return read


def test_a_record_has_every_bit() -> None:
    assert recorded(written(HERE), HERE, "losses.json") == LOSSES


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (Machine("2.11.0", HERE.processor), "the torch 2.11.0, and here is 2.13.0"),
        (Machine(HERE.torch, "Another"), "the processor Another, and here is A Processor @ 2.5GHz"),
    ],
)
def test_a_record_of_another_machine_is_refused(there: Machine, message: str) -> None:
    with pytest.raises(SystemExit) as refused:
        recorded(written(there), HERE, "losses.json")
    assert refused.value.code == f"losses.json was recorded with {message}: losses differ; record them anew"


@pytest.mark.parametrize(
    ("last", "again", "found"),
    [
        (0.3, True, "same (1 lines)"),
        (math.nextafter(0.3, 1), True, "differs"),
        (math.nextafter(0.3, 1), False, "differs by chance"),
    ],
)
def test_losses_are_compared_to_the_last_bit(last: float, again: bool, found: str) -> None:
    assert verdict([(1, 0.3)], [(1, last)], lambda: again) == found


def test_the_processor_is_the_one_that_the_kernel_names() -> None:
    cpuinfo = "processor\t: 0\nmodel\t\t: 85\nmodel name\t: Xeon(R) CPU @ 2.50GHz: x\n\nmodel name\t: other\n"
    assert processor_of(cpuinfo) == "Xeon(R) CPU @ 2.50GHz: x"
    assert processor_of("processor\t: 0\n") is None
    assert this_machine().torch


def test_examples_are_those_that_train_here() -> None:
    found = examples(REPOSITORY)
    assert {"ddp", "fsdp", "tasks/masked"} <= set(found)
    assert same_losses.LEFT_OUT.isdisjoint(found)


def test_a_record_is_held_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, losses = str(tmp_path / "losses.json"), {"ddp": 0.3, "fsdp": 0.4}
    monkeypatch.setattr(same_losses, "figures", lambda checkout, name: [(1, losses[name])])
    assert main(["--record", file, "ddp", "fsdp"]) == 0
    assert main(["--check", file]) == 0
    losses["fsdp"] = math.nextafter(0.4, 1)
    assert main(["--check", file, "ddp"]) == 0
    assert main(["--check", file]) == 1
    lines = ["ddp: 1 lines", "fsdp: 1 lines", "ddp: same (1 lines)", "fsdp: same (1 lines)", "ddp: same (1 lines)"]
    assert capsys.readouterr().out.splitlines() == [*lines, "ddp: same (1 lines)", "fsdp: differs"]
    with pytest.raises(SystemExit, match="has no losses of moe: record them anew"):
        main(["--check", file, "moe"])
