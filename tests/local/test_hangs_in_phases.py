"""Real ranks that hang in an evaluation, or while they save a checkpoint: the operator's own code asks their agents,
whose clocks are thirty times as fast here, and names the rank; all start again in their pods, and no step differs."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.local_agents import asking, world_of
from disttrain.local.folder import AGENTS_FILE
from disttrain_api.agent_token import agent_token
from disttrain_api.names import TOKEN_FILE
from disttrain_api.report import RankPhase
from disttrain_operator.agent_client import STATUS_PATH, Agent, Ask
from disttrain_operator.agents import Agents
from disttrain_operator.decide.live import Stall
from tests.builders import a_claim_template

from .conftest import Run, Workplace
from .held_phases import EVERY, INTERVAL
from .test_hangs_in_place import ordered
from .test_restarts_in_place import STEPS, curve, is_next_life, ranks_of

FASTER = 30


def job(place: Workplace, released: Path, phase: RankPhase) -> Path:
    """Two pods with a rank each, of which rank 1 is held in its second evaluation or checkpoint."""
    shutil.copy(Path(__file__).with_name("held_phases.py"), place.folder)
    file, evaluates = {"file": str(released)}, phase is RankPhase.EVALUATING
    data = {"name": None, "entrypoint": "held_phases:digits", "config": file if evaluates else {}}
    training: dict[str, Any] = {
        "steps": STEPS,
        "microBatchSize": 16,
        "checkpoint": {"interval": INTERVAL, "asynchronous": False},
        "evaluation": {"interval": EVERY},
        "logging": {"interval": 1},
        "data": data,
        "model": {"name": "mlp", "config": {"inputSize": 64, "outputSize": 10}},
        "callbacks": [] if evaluates else [{"entrypoint": "held_phases:HeldSave", "config": file}],
    }
    return place.write(
        workers={"replicas": 2, "processesPerPod": 1},
        training=training,
        storage=a_claim_template(),
        runPolicy={"restartStrategy": "InPlace", "progressDeadlineSeconds": 60},
    )


def faster(ask: Ask) -> Ask:
    """Asks agents whose ranks show no sign of progress for so many times as long."""

    async def asked(agent: Agent, token: str, path: str) -> bytes:
        answer = await ask(agent, token, path)
        if path != STATUS_PATH:
            return answer
        status = json.loads(answer)
        for rank in status["ranks"]:
            if "idle" in rank:
                rank["idle"]["seconds"] *= FASTER
        return json.dumps(status).encode()

    return asked


class Operator:
    """The operator's part that asks the agents of a run, of both its pods."""

    def __init__(self, run: Run) -> None:
        config = run.home / "config"
        ports = json.loads((config / AGENTS_FILE).read_text())
        raw = yaml.safe_load((run.home / "status.yaml").read_text())
        self.uid, token = raw["metadata"]["uid"], agent_token((config / TOKEN_FILE).read_text())
        self.ask = faster(asking(lambda agent: ports[agent.index]))
        self.agents = Agents(
            world_of([raw], 2), lambda uid: token, lambda uid: None, lambda: True, interval=1, per_second=1e6
        )

    def stall(self) -> Stall | None:
        """What a round finds out."""
        asyncio.run(self._round())
        live = self.agents.live(self.uid)
        return None if live is None else live.stall

    async def _round(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            await self.agents.round(self.ask, tasks)


@pytest.mark.parametrize(
    ("phase", "step", "limit"), [(RankPhase.EVALUATING, 2 * EVERY, 300), (RankPhase.SAVING, 2 * INTERVAL, 600)]
)
def test_a_rank_that_hangs_besides_its_steps_is_named_and_all_start_again_in_their_pods(
    workplace: Workplace, phase: RankPhase, step: int, limit: float
) -> None:
    released = workplace.folder / "released"
    run = workplace.start(job(workplace, released, phase))
    run.until(lambda: list(run.folder.glob("disttrain-runs/*/status.yaml")), "it has begun")
    run.until(lambda: "all 2 workers are connected" in run.log(0, attempt=1), "the agents know each other")
    run.until(lambda: f"step: {step}  " in run.log(0, attempt=1), "the last step before it")
    operator = Operator(run)
    stall = run.until(operator.stall, "the operator finds the hang", pause=1.0)
    assert (stall.rank, stall.step, stall.phase, stall.limit_seconds) == (0, step, phase, limit)
    assert stall.seconds >= limit
    assert stall.blame is not None
    assert (stall.blame.rank, stall.blame.awaited) == (1, True), stall.blame
    assert "hold (held_phases.py" in stall.blame.why
    former = ranks_of(run)
    agents = [one.ppid() for one in former]
    run.until(lambda: ordered(run, stall.blame.rank), "the order is followed")
    released.touch()
    run.until(lambda: is_next_life(run, former, agents), "both ranks have started again below the same agents")
    assert run.wait() == 0, run.stderr
    other = workplace.beside("undisturbed")
    undisturbed = other.run(job(other, released, phase))
    assert undisturbed.exit_code == 0, undisturbed.stderr
    expected, found = curve(undisturbed), curve(run)
    assert sorted(found) == sorted(expected) == list(range(1, STEPS + 1))
    assert found == expected
    (attempt,) = run.status["attempts"]
    assert attempt["restartsInPlace"] == 1
    assert "was killed by its agent, since no rank did a step" in attempt["lastRestartInPlace"]
    assert not run.left()
