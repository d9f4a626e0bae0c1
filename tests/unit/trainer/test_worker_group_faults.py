"""Groups of ranks that lose one: real processes, as the agents of their pods start them."""

import signal
from contextlib import ExitStack, contextmanager

import pytest

from disttrain_api.names import ExitCode
from tests.soak import SOAK
from tests.unit.trainer.layouts import PIPELINE
from tests.unit.trainer.server_jobs import lines_of
from tests.unit.trainer.worlds import job, launch, small, user
from tests.waiting import GENEROUS
from tools.cluster.ports import free_port

STEPS = 20
TRAINING = small(
    model=user("double_builtin_mlp"),
    data=user("slow_samples", seconds=0.005),
    steps=STEPS,
    evaluation={"interval": 5},
    logging={"interval": 1, "tensorBoard": False},
)


class Pods:
    """Two pods of two ranks each, and one of a server."""

    def __init__(self, folder, stack, parallelism, settings):
        self.folder, self.stack = folder, stack
        self.address = f"127.0.0.1:{free_port()}"
        mode = {"mode": "ParameterServer", "parameterServer": {"groupReduce": "WithinGroup", **settings}}
        self.config = job(TRAINING, parallelism={**parallelism, "dataParallel": mode})
        self.start("server", "disttrain_trainer.parameter_server.server.main", DISTTRAIN_ROLE_INDEX="0")
        self.ranks = [rank for number in range(2) for rank in self.pod(number)]

    def pod(self, number, life=1):
        """The ranks of a pod."""
        reports = str(self.folder / f"pod-{number}-life-{life}" / "reports")
        return [
            self.start(
                f"rank-{2 * number + local}-life-{life}", "disttrain_trainer", RANK=str(2 * number + local),
                LOCAL_RANK=str(local), DISTTRAIN_REPORT_DIR=reports,
            )
            for local in range(2)
        ]  # fmt: skip

    def start(self, name, module, **environment):
        folder = self.folder / name
        folder.mkdir()
        (folder / "token").write_text("a-token")
        variables = {
            "WORLD_SIZE": "4",
            "LOCAL_WORLD_SIZE": "2",
            "DISTTRAIN_PS_ADDRESSES": self.address,
            "DISTTRAIN_TERMINATION_LOG": str(folder / "termination-log"),
            **environment,
        }
        return self.stack.enter_context(
            launch(folder, self.config, 1, self.folder / "storage", module=module, **variables)
        )

    def reached(self, step):
        self.ranks[0].wait_until(lambda: any(line["step"] >= step for line in self.lines()))

    def lines(self):
        lines = lines_of(self.folder / "storage" / "test" / "metrics.jsonl")
        return [line for line in lines if "loss_metrics/global_avg_loss" in line]


@contextmanager
def two_pods(folder, parallelism, **settings):
    with ExitStack() as stack:
        yield Pods(folder, stack, parallelism, settings)


def code(rank):
    """The exit code of a rank, None where it does not end."""
    return rank.processes[0].wait(GENEROUS)


CASES = {
    "replicas, the leader's": ({}, "Async", 0),
    "a pipeline, another's": ({PIPELINE: 2}, "Sync", 1),
    "replicas, another's": ({}, "BoundedStaleness", 1),
    "a pipeline, the leader's": ({PIPELINE: 2}, "Sync", 0),
}
# Two of them in every run, all in the long one.
TRIED = list(CASES)[: None if SOAK else 2]


@pytest.mark.parametrize("case", TRIED)
def test_a_group_that_loses_a_rank_ends_alone_and_may_come_back(tmp_path, case):
    parallelism, synchronization, pod = CASES[case]
    with two_pods(tmp_path, parallelism, synchronization=synchronization) as running:
        running.reached(5)
        first, second = running.ranks[2 * pod : 2 * pod + 2]
        second.processes[0].send_signal(signal.SIGKILL)
        assert code(first) == ExitCode.PEER_LOST
        others = running.ranks[2 - 2 * pod : 4 - 2 * pod]
        assert [rank.processes[0].poll() for rank in others] == [None, None]
        again = running.pod(pod, life=2)
        assert [code(rank) for rank in (*others, *again)] == [ExitCode.DONE] * 4
        assert [line["step"] for line in running.lines()] == list(range(1, STEPS + 1))
        if synchronization == "Sync":
            assert running.lines()[-1]["servers/version_max"] == STEPS
