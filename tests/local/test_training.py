"""The trainer through `disttrain run`: real ranks, real kills."""

import json
import re
import signal
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from disttrain import CommandError, LocalClient
from tests.builders import a_claim_template

from .conftest import Run, Workplace, held_digits

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp.yaml"
PNG = b"\x89PNG\r\n\x1a\n"
STORED = a_claim_template()
LONG = {"steps": 160, "microBatchSize": 16, "checkpoint": {"interval": 50}, "optimizer": {"learningRate": 0.003}}


def figure(status: dict[str, Any], name: str) -> float:
    return next(metric["value"] for metric in status["progress"]["metrics"] if metric["name"] == name)


def checkpoints(run: Run) -> list[int]:
    """Steps of the complete checkpoints."""
    found = run.folder.glob("disttrain-runs/*/storage/*/step-*/.metadata")
    names = [path.parent.name.removeprefix("step-") for path in found]
    return sorted(int(name) for name in names if name.isdigit())


def logged_steps(log: str) -> list[int]:
    return [int(step) for step in re.findall(r"\bstep: (\d+)", log)]


def long(workplace: Workplace) -> dict[str, Any]:
    """A training that waits in the middle, with two checkpoints behind it, until something happens to it."""
    return LONG | held_digits(workplace, samples=120 * 16)


def until_mid_run(run: Run) -> None:
    run.until(lambda: len(checkpoints(run)) > 1, "two checkpoints are written")


def test_the_ddp_example_learns_the_digits(workplace: Workplace) -> None:
    run = workplace.run(EXAMPLE)
    assert run.exit_code == 0, run.stderr
    status = run.status
    assert status["phase"] == "Succeeded"
    assert figure(status, "accuracy") >= 0.97
    assert (status["attempt"], status["restarts"], status["worldSize"], status["mesh"]) == (1, 0, 2, "dp2")
    assert status["progress"]["step"] == status["progress"]["totalSteps"] == 200
    assert status["progress"]["samplesPerSecond"] > 0
    assert {entry["type"]: entry["status"] for entry in status["conditions"]} == {
        "Running": "False",
        "Suspended": "False",
        "Restarting": "False",
        "Complete": "True",
        "Failed": "False",
        "Finished": "True",
        "Straggling": "False",
        "HangSuspected": "False",
    }
    last_line = run.stderr.splitlines()[-1]
    assert re.match(
        r"Succeeded · accuracy 0\.9\d+ · .*200 steps · loss [\d.]+ · [\d,]+ samples/s · logs \S+", last_line
    )
    assert "\x1b" not in run.stderr + run.stdout, "no control codes without a terminal"
    stored = yaml.safe_load((run.home / "status.yaml").read_text())
    assert stored["status"] == status
    assert stored["metadata"]["uid"].startswith(run.home.name.removeprefix("ddp-"))
    assert not (run.home / "pods").exists(), "scratch space dies with the pods"
    for name in ("loss.png", "throughput.png"):
        picture = (run.home / "metrics" / name).read_bytes()
        assert picture.startswith(PNG)
        width, height = struct.unpack(">II", picture[16:24])
        assert (width > 400, height > 200, len(picture) > 5000) == (True, True, True), name


WITNESS = """
import json, os, signal, sys
from torch import nn

def links(pid):
    found = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            found.add(os.readlink(f"/proc/{pid}/fd/{name}"))
        except OSError:
            pass
    return {link for link in found if link.startswith(("pipe", "socket"))}

def make():
    seen = {
        "environment": {name: os.environ[name] for name in ("RANK", "LOCAL_RANK", "OMP_NUM_THREADS")},
        "argv": sys.argv[1:], "main": sys.modules["__main__"].__spec__.name,
        "folders": [os.getcwd(), sys.path[0]], "name": open("/proc/self/comm").read().strip(),
        "input": os.readlink("/proc/self/fd/0"), "output": os.readlink("/proc/self/fd/1"),
        "shared": sorted(links(os.getpid()) & links(os.getppid())),
        "group": os.getpgrp() == os.getpid(), "parent": os.getppid(),
        "broken pipes are errors": signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN,
    }
    with open(f"seen-{os.environ['RANK']}.json", "w") as file:
        json.dump(seen, file)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
"""


def test_ranks_are_processes_of_their_own_whatever_they_are_forked_from(workplace: Workplace) -> None:
    (workplace.folder / "witness.py").write_text(WITNESS)
    training = {"model": {"name": None, "entrypoint": "witness:make"}, "steps": 1}
    run = workplace.start(workplace.write(workers={"replicas": 2, "processesPerPod": 2}, training=training))
    assert run.wait() == 0, run.stderr
    seen = [json.loads((workplace.folder / f"seen-{rank}.json").read_text()) for rank in range(4)]
    for rank, found in enumerate(seen):
        assert found["environment"] == {"RANK": str(rank), "LOCAL_RANK": str(rank % 2), "OMP_NUM_THREADS": "1"}
        assert (found["main"], found["argv"]) == ("disttrain_trainer.__main__", [])
        assert found["folders"] == [str(workplace.folder)] * 2
        assert found["broken pipes are errors"]
        assert (found["name"], found["group"]) == (f"rank {rank}", True)
        assert (found["input"], found["shared"]) == ("/dev/null", [found["output"]]), "nothing else of the agent's"
    assert len({found["parent"] for found in seen}) == 2
    assert not run.left()


def resumed_and_succeeded(run: Run) -> None:
    """Attempt 2 went on from a checkpoint of attempt 1, and ended well."""
    status = run.status
    assert run.wait() == 0, run.stderr
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 1)
    assert status["progress"]["step"] == LONG["steps"]
    resumed = re.search(r"resuming after step (\d+)", run.log(0, attempt=2))
    assert resumed, run.log(0, attempt=2)
    step = int(resumed[1])
    interval = LONG["checkpoint"]["interval"]  # type: ignore[index]
    assert step >= 2 * interval
    assert step % interval == 0
    assert logged_steps(run.log(0, attempt=2))[0] > step, "the counter goes on where the checkpoint stands"
    assert step <= logged_steps(run.log(0, attempt=1))[-1] + interval, "and that is where attempt 1 had come to"


def test_a_killed_rank_restarts_the_gang_from_the_checkpoint(workplace: Workplace) -> None:
    run = workplace.start(workplace.write(workers={"replicas": 2}, training=long(workplace), storage=STORED))
    until_mid_run(run)
    victim = run.find("rank 1")
    victim.kill()
    run.wait()
    resumed_and_succeeded(run)
    verdict = run.status["attempts"][0]["verdict"]
    assert (verdict["rank"], verdict["signal"], verdict["exitCode"]) == (1, 9, 137)
    assert "restarts 1" in run.stderr
    assert not run.left()


def test_ctrl_c_suspends_after_a_checkpoint_and_resume_goes_on(workplace: Workplace) -> None:
    run = workplace.start(workplace.write(workers={"replicas": 2}, training=long(workplace), storage=STORED))
    until_mid_run(run)
    run.below()
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert not run.left()
    assert run.status["phase"] == "Suspended"
    assert run.condition("Suspended")["status"] == "True"
    saved = checkpoints(run)[-1]
    assert run.status["checkpoint"]["step"] == saved
    interval = LONG["checkpoint"]["interval"]  # type: ignore[index]
    assert saved == logged_steps(run.log(0, attempt=1))[-1] or saved % interval, "written because of the signal"
    uid = yaml.safe_load((run.home / "status.yaml").read_text())["metadata"]["uid"]
    hint = run.stderr.splitlines()[-1]
    assert f"Suspended · checkpoint at step {saved} · resume with: disttrain run --resume " in hint

    again = workplace.run("--resume", hint.rpartition(" ")[2])
    assert again.exit_code == 0, again.stderr
    status = again.status
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 2, 0)
    assert f"resuming after step {saved} " in again.log(0, attempt=2)
    assert yaml.safe_load((again.home / "status.yaml").read_text())["metadata"]["uid"] == uid


def test_a_run_whose_runner_was_killed_is_resumed(workplace: Workplace) -> None:
    run = workplace.start(workplace.write(workers={"replicas": 1}, training=long(workplace), storage=STORED))
    until_mid_run(run)
    run.below()
    run.signal(signal.SIGKILL)
    run.wait()
    again = workplace.run("--resume", run.home)
    assert again.exit_code == 0, again.stderr
    resumed_and_succeeded(again)


def test_a_run_writes_a_checkpoint_that_is_asked_for_and_goes_on(workplace: Workplace) -> None:
    training = {"steps": 1_000_000, "checkpoint": {"interval": 1_000_000}}
    run = workplace.start(workplace.write("asked", workers={"replicas": 2}, training=training, storage=STORED))
    client = LocalClient(runs=run.folder / "disttrain-runs")

    def asked() -> bool:
        # Nobody takes it before they train.
        with suppress(CommandError):
            client.checkpoint("asked")
            return True
        return False

    run.until(asked, "the ranks take the request")
    run.until(lambda: checkpoints(run), "there is a checkpoint")
    (step,) = checkpoints(run)
    run.until(lambda: any(at > step for at in logged_steps(run.log(0, 1))), "it trains on")
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert (step, run.status["attempt"]) == (min(checkpoints(run)), 1)
