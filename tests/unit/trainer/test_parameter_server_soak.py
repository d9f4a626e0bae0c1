"""Kills and stops of workers, servers and the manager while a job learns the digits: it ends, and has learned as much.

What is killed is started again, as the operator does with RestartPod; what is stopped wakes up. Two plans in every run,
twenty seeded ones in the long one.
"""

import random
import signal
import threading

import pytest

from tests.soak import SOAK
from tests.unit.trainer.server_jobs import SERVER, a_job, ended, signalled
from tests.unit.trainer.worlds import small, user
from tests.waiting import GENEROUS

STEPS = 240
INTERVAL = 20
SERVERS = 2
TRAINING = small(
    model={"name": "mlp", "config": {"inputSize": 64, "outputSize": 10}},
    data=user("slow_digits", seconds=0.0008),
    optimizer={"name": "SGD", "learningRate": 0.1},
    lrSchedule={"name": "Cosine", "warmupSteps": 10},
    steps=STEPS,
    globalBatchSize=64,
    seed=1,
    checkpoint={"interval": 60},
    logging={"interval": 10, "tensorBoard": False},
)
# Of the held-out digits that a run without faults recognises.
TOLERANCE = 0.03
MANAGER, SERVER_1, LEADER, WORKER_1 = ("server", 0), ("server", 1), ("worker", 0), ("worker", 1)
"""Who may be hit. The manager, which schedules the tasks, is server 0."""


def short_plans():
    """Before which step (in percent of all), whom, and how: a kill, or seconds of sleep."""
    return {
        "manager, then a worker": ("Async", [(20, MANAGER, None), (55, WORKER_1, None)]),
        "manager asleep, then a server": ("BoundedStaleness", [(20, MANAGER, 3.0), (55, SERVER_1, None)]),
    }


def seeded_plan(seed):
    chance = random.Random(seed)
    faults = []
    for begin in (10, 40):
        # A worker is silent for too long after 10 s, a server is called anew.
        asleep = chance.choice([None, None, 3.0, 13.0])
        faults.append((begin + chance.randrange(25), chance.choice([MANAGER, SERVER_1, LEADER, WORKER_1]), asleep))
    return chance.choice(["Async", "BoundedStaleness"]), faults


PLANS = short_plans()
if SOAK:
    PLANS |= {f"seed {seed}": seeded_plan(seed) for seed in range(20)}


class Faults:
    """Does to a running job what a plan says."""

    def __init__(self, running):
        self.running = running
        self.members = {("server", index): world for index, world in enumerate(running.servers)}
        self.members |= {("worker", rank): world for rank, world in enumerate(running.workers)}
        self.server_deaths = self.leader_deaths = 0

    def at(self, percent, who, asleep):
        leader = self.members[LEADER]
        leader.wait_until(lambda: leader.reached(STEPS * percent // 100))
        if asleep is None:
            self.kill(*who)
        else:
            victim = self.members[who]
            signalled(victim, signal.SIGSTOP)
            waking = threading.Timer(asleep, signalled, (victim, signal.SIGCONT))
            waking.start()
            waking.join()

    def kill(self, role, index):
        victim = self.members[role, index]
        signalled(victim, signal.SIGKILL)
        assert victim.processes[0].wait(GENEROUS) == -signal.SIGKILL
        name = f"{role}-{index}-again-{self.server_deaths}-{self.leader_deaths}-{len(self.members)}"
        if role == "server":
            self.server_deaths += 1
            again = self.running.start(name, 1, SERVER, DISTTRAIN_ROLE_INDEX=str(index))
        else:
            self.leader_deaths += index == 0
            again = self.running.worker(index, f"{name}-{victim.folder.name}")
        self.members[role, index] = again


def run(folder, synchronization, plan):
    """Accuracy on the held-out digits after all faults."""
    settings = {"synchronization": synchronization, "snapshotInterval": INTERVAL}
    with a_job(folder, TRAINING, servers=SERVERS, parameterServer=settings) as running:
        faults = Faults(running)
        if plan:
            snapshots = folder / "storage" / "test" / "servers"
            files = [snapshots / f"server-{index}.snapshot" for index in range(SERVERS)]
            running.workers[0].wait_until(lambda: all(file.exists() for file in files))
        for fault in plan:
            faults.at(*fault)
        for rank in range(2):
            code, report = ended(faults.members["worker", rank], rank)
            assert code == 0, f"worker {rank}: {report and report.error}"
            if rank == 0:
                assert (report.step, report.done) == (STEPS, True)
                accuracy = report.metrics["accuracy"]
        last = running.last()
        assert last["servers/incarnations"] == SERVERS + faults.server_deaths
        assert last["servers/lost_pushes"] <= faults.server_deaths * 2 * INTERVAL
        lost = last["servers/version_max"] - last["servers/version_min"]
        assert lost <= faults.server_deaths * 2 * INTERVAL
        return accuracy


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return run(tmp_path_factory.mktemp("undisturbed"), "Async", [])


@pytest.mark.parametrize("name", PLANS)
def test_a_job_learns_as_much_with_faults(tmp_path, undisturbed, name):
    accuracy = run(tmp_path, *PLANS[name])
    print(f"{name} {PLANS[name]}: {accuracy:.4f}, undisturbed {undisturbed:.4f}")
    assert accuracy >= undisturbed - TOLERANCE
