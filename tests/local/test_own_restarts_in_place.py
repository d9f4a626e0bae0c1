"""Commands of your own that start again in their pods, by `disttrain run`: real kills, and no step that differs."""

import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.builders import a_claim_template

from .conftest import Run, Workplace, script

STEPS, INTERVAL, SEEN = 24, 5, 12
SESSION = f"""
import hashlib, os, pathlib, random, sys, time
import torch
import disttrain

class Noisy:
    def __len__(self):
        return 96

    def __getitem__(self, index):
        return torch.full((6,), index / 96) + 0.1 * torch.randn(6), torch.tensor([index / 96])

released = pathlib.Path(sys.argv[1])
with disttrain.session(steps={STEPS}, checkpoint_interval={INTERVAL}) as session:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    model, optimizer = session.prepare(model, torch.optim.Adam(model.parameters(), lr=0.01))
    batches = session.loader(Noisy(), batch_size=4)
    session.restore(model=model, optimizer=optimizer)
    for inputs, targets in batches:
        loss = (model(inputs) - targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with open(f"losses-{{session.rank}}", "a") as file:
            print(session.completed + 1, loss.item(), random.random(), file=file)
        session.step(loss=loss)
        if session.completed == {SEEN}:
            pathlib.Path(f"held-{{session.rank}}").write_text(str(os.getpid()))
            while not released.exists():
                time.sleep(0.01)
    # A state that was loaded may be in another order.
    moments = [optimizer.state[each][name] for each in model.parameters() for name in ("step", "exp_avg", "exp_avg_sq")]
    state = [*model.state_dict().values(), *moments]
    digest = hashlib.sha256(b"".join(one.numpy().tobytes() for one in state)).hexdigest()
    pathlib.Path(f"final-{{session.rank}}").write_text(f"{{digest}} {{random.random()}}")
"""


def job(place: Workplace, *command: str, pods: int = 1, **policy: Any) -> Path:
    return place.write(
        "own",
        training=None,
        workers={"replicas": pods, "processesPerPod": 1, "command": list(command)},
        storage=a_claim_template(),
        runPolicy={"restartStrategy": "InPlace", "restartBackoffSeconds": 0, **policy},
    )


def curve(run: Run) -> dict[tuple[str, int], set[str]]:
    """Loss and random number of each step of each rank, as often as it was done."""
    seen = defaultdict(set)
    for path in run.folder.glob("losses-*"):
        for line in path.read_text().splitlines():
            step, _, figures = line.partition(" ")
            seen[path.name, int(step)].add(figures)
    return dict(seen)


def ends(run: Run) -> dict[str, str]:
    """What the parameters, the optimizer and the random state of each rank have become."""
    return {path.name: path.read_text() for path in run.folder.glob("final-*")}


@pytest.mark.parametrize(
    ("launcher", "pods"), [("python", 1), ("python", 2), ("torchrun", 2)], ids=["python", "two pods", "torchrun"]
)
def test_a_killed_rank_of_a_session_goes_on_below_the_same_agents_as_if_it_had_not_been_killed(
    workplace: Workplace, launcher: str, pods: int
) -> None:
    program, released = script(workplace, SESSION), workplace.folder / "released"
    run = workplace.start(job(workplace, launcher, program, str(released), pods=pods))
    held = [run.folder / f"held-{rank}" for rank in range(pods)]

    def all_wait() -> bool:
        if not all(path.exists() and path.read_text() for path in held):
            return False
        return pods == 1 or f"all {pods} workers are connected" in run.log(0, 1)

    run.until(all_wait, "all ranks wait between two checkpoints")
    former = [int(path.read_text()) for path in held]
    for path in held:
        path.unlink()
    run.below()
    os.kill(former[-1], signal.SIGKILL)
    run.until(all_wait, "all ranks have come there again")
    released.touch()
    assert run.wait() == 0, run.stderr + run.log(0, 1)

    undisturbed = workplace.beside("undisturbed")
    other = undisturbed.run(job(undisturbed, launcher, program, str(released), pods=pods))
    assert other.exit_code == 0, other.stderr
    assert curve(run) == curve(other)
    assert sorted({step for _, step in curve(run)}) == list(range(1, STEPS + 1))
    assert {len(figures) for figures in curve(run).values()} == {1}
    assert ends(run) == ends(other)
    assert len(ends(run)) == pods

    status = run.status
    assert (status["phase"], status["attempt"], status["restarts"]) == ("Succeeded", 1, 0)
    assert status["checkpoint"]["step"] == STEPS
    (attempt,) = status["attempts"]
    assert attempt["restartsInPlace"] == 1
    why = attempt["lastRestartInPlace"]
    assert why.startswith(f"rank {pods - 1} (pod "), why
    assert "was killed by signal 9" in why
    assert f"resuming after step {2 * INTERVAL} " in run.log(0, 1)
    assert not run.left()


def test_used_up_restarts_in_place_recreate_the_pods(workplace: Workplace) -> None:
    program = script(
        workplace,
        """
        import os, sys
        life = os.environ["DISTTRAIN_ATTEMPT"], os.environ["DISTTRAIN_GENERATION"]
        print("life", *life, flush=True)
        sys.exit(0 if life == ("2", "1") else 7)
        """,
    )
    run = workplace.run(job(workplace, "python", program, maxRestarts=1))
    assert run.exit_code == 0, run.stderr
    status = run.status
    assert (status["attempt"], status["restarts"]) == (2, 1)
    assert [attempt["restartsInPlace"] for attempt in status["attempts"]] == [1, 1]
    message = status["attempts"][0]["verdict"]["message"]
    assert "exited with code 7" in message
    assert message.endswith("no restart in place: 1 restarts in place without a new checkpoint are used up")
    for attempt in (1, 2):
        lines = [line for line in run.log(0, attempt).splitlines() if line.startswith("life")]
        assert lines == [f"life {attempt} 0", f"life {attempt} 1"]
