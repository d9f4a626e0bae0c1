"""Losses of examples: recorded with what they depend on, and compared to the last bit."""

import math

import pytest

from tools import same_losses
from tools.same_losses import main


def test_a_record_is_held_to(tmp_path, monkeypatch, capsys):
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
