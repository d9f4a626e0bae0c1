"""What programs of one's own find in their environment, and what scripts that look at it make of it."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from tests.builders import a_claim_template

from .conftest import Workplace, own, script

ENVIRONMENT_PAGE = (Path(__file__).parents[2] / "docs" / "environment.md").read_text()
# How nanoGPT's train.py finds out whether it is one of many; its command line overrides the rest.
NANOGPT = """
import os
import sys
import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

backend, device = "nccl", "cuda"
for argument in sys.argv[1:]:
    key, value = argument.removeprefix("--").split("=")
    globals()[key] = value

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend=backend)
    ddp_rank, ddp_local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    if "cuda" in device:
        device = f"cuda:{ddp_local_rank}"
        torch.cuda.set_device(device)
else:
    ddp_rank, ddp_world_size = 0, 1
model = torch.nn.Linear(4, 1).to(device)
if ddp:
    model = DDP(model)
model(torch.ones(2, 4, device=device)).sum().backward()
print(f"trained as rank {ddp_rank} of {ddp_world_size}, ddp {ddp}", flush=True)
if ddp:
    destroy_process_group()
"""


def test_a_script_that_trains_alone_unless_it_has_a_rank_trains_alone_with_one(workplace: Workplace) -> None:
    run = workplace.run(own(workplace, "python", script(workplace, NANOGPT), "--device=cpu"))
    assert run.exit_code == 0, run.stderr + run.log(0, 1)
    assert "trained as rank 0 of 1, ddp False" in run.log(0, 1)


@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_a_script_that_looks_for_a_rank_trains_with_its_peers(workplace: Workplace, launcher: str) -> None:
    program = script(workplace, NANOGPT)
    run = workplace.run(own(workplace, launcher, program, "--device=cpu", "--backend=gloo", replicas=2))
    assert run.exit_code == 0, run.stderr + run.log(0, 1)
    for rank in range(2):
        assert f"trained as rank {rank} of 2, ddp True" in run.log(rank, 1)


def test_the_environment_is_the_users_with_the_contract_laid_over_it(workplace, monkeypatch):
    monkeypatch.setenv("MINE", "kept")
    monkeypatch.setenv("RANK", "77")
    monkeypatch.setenv("PET_NNODES", "77")
    monkeypatch.setenv("DISTTRAIN_ATTEMPT", "77")
    program = script(
        workplace,
        "import json, os, sys; json.dump([dict(os.environ), sys.argv, os.getcwd(), sys.executable], open('seen', 'w'))",
    )
    env = [
        {"name": "DATA", "value": "$(DISTTRAIN_STORAGE)/data $(UNKNOWN) $$(HOME)"},
        {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    ]
    path = own(
        workplace,
        "python3",
        program,
        container={"args": ["--node=$(NODE_RANK)"], "env": env},
        storage=a_claim_template(),
        managedBy="kueue.x-k8s.io/multikueue",
        runPolicy={"schedulingPolicy": {"gangScheduler": "Gate"}},
    )
    run = workplace.run(path)
    assert run.exit_code == 0, run.stderr
    seen, arguments, folder, python = json.loads((workplace.folder / "seen").read_text())
    storage = run.home / "storage"
    assert arguments == [program, "--node=0"]
    assert Path(folder) == workplace.folder
    assert python == sys.executable
    expected = {
        "MINE": "kept",
        "RANK": None,
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "PET_NNODES": "1",
        "DISTTRAIN_ATTEMPT": "1",
        "DISTTRAIN_STORAGE": str(storage),
        "DATA": f"{storage}/data $(UNKNOWN) $(HOME)",
        "HOME": os.environ["HOME"],
        "CUDA_VISIBLE_DEVICES": "",
    }
    assert {name: seen.get(name) for name in expected} == expected
    documented = re.findall(r"^\| `(\w+)` \|", ENVIRONMENT_PAGE, re.MULTILINE)
    here = re.findall(r"^\| `(\w+)` \|", ENVIRONMENT_PAGE.partition("## With `disttrain run`")[2], re.MULTILINE)
    assert set(here) <= set(seen)
    # Python and readline set some in the environment of their own process, past os.environ.
    assert set(seen) - set(os.environ) - {"DATA", "LC_CTYPE", "COLUMNS", "LINES"} <= set(documented)
    assert storage.is_dir()
    assert "not part of a local run: schedulingPolicy; managedBy; " in run.stderr
    assert "; the values of SECRET (set them in your shell)\n" in run.stderr
