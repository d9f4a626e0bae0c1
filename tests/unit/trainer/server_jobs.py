"""Jobs whose parameters lie on servers, in real processes as their pods run them, which tests kill and start again."""

import json
from contextlib import ExitStack, contextmanager

from tests.unit.trainer.worlds import job, launch
from tests.waiting import GENEROUS
from tools.cluster.ports import free_port

SERVER = "disttrain_trainer.parameter_server.server.main"


def lines_of(file):
    """What the lines of a file hold that is being written: the last one may not be whole yet."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


class Job:
    """A job of two ranks, each a worker or both one, and one or more servers, each pod in a folder of its own."""

    def __init__(
        self, folder, stack, servers, settings, training, module="disttrain_trainer", ranks_per_pod=1, degrees=None,
        **environment,
    ):  # fmt: skip
        """module, environment: of the workers. degrees: of a worker's ranks."""
        self.folder, self.stack, self.module, self.environment = folder, stack, module, environment
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(servers)]
        parallelism = {"dataParallel": {"mode": "ParameterServer", **settings}, **(degrees or {})}
        self.config = job(training, parallelism=parallelism)
        self.ranks_per_pod = ranks_per_pod
        self.servers = [
            self.start(f"server-{index}", 1, SERVER, DISTTRAIN_ROLE_INDEX=str(index)) for index in range(servers)
        ]
        if ranks_per_pod == 1:
            self.workers = [self.worker(rank) for rank in range(2)]
        else:
            self.workers = [self.start("worker", ranks_per_pod, module, **environment)]

    def start(self, name, ranks, module, **environment):
        folder = self.folder / name
        folder.mkdir()
        variables = {
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": str(self.ranks_per_pod),
            "DISTTRAIN_PS_ADDRESSES": ",".join(self.addresses),
            "DISTTRAIN_TERMINATION_LOG": str(folder / "termination-log"),
            **environment,
        }
        storage = self.folder / "storage"
        return self.stack.enter_context(launch(folder, self.config, ranks, storage, module=module, **variables))

    def worker(self, rank, name=None):
        return self.start(name or f"worker-{rank}", 1, self.module, RANK=str(rank), LOCAL_RANK="0", **self.environment)

    def reached(self, step):
        self.workers[0].wait_until(lambda: self.workers[0].reached(step))

    def lines(self):
        return lines_of(self.folder / "storage" / "test" / "metrics.jsonl")

    def last(self):
        """The last line that says something of the servers; empty before the first one."""
        return next((line for line in reversed(self.lines()) if "servers/version_max" in line), {})


@contextmanager
def a_job(folder, training, servers=1, workers=None, **settings):
    """A running job; `settings` are those of data parallelism, `workers` what a Job is given for its workers."""
    with ExitStack() as stack:
        yield Job(folder, stack, servers, settings, training, **(workers or {}))


def signalled(world, number):
    """Send the only process of a world a signal."""
    world.processes[0].send_signal(number)


def ended(world, rank, within=GENEROUS):
    """Exit code and report of a worker; None as the code where it has not ended within so many seconds."""
    code = world.processes[0].wait(within)
    return code, world.report(rank)
