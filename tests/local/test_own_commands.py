"""Programs that know nothing of us, and how their processes live and end."""

import signal
from typing import Any

import psutil
import pytest

from tests.waiting import until

from .conftest import DISTTRAIN, Run, Workplace, command, own, runs, script

TORCHRUN_SCRIPT = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(4, 1))
loss = model(torch.ones(2, 4) * (dist.get_rank() + 1)).sum()
loss.backward()
print(f"rank {dist.get_rank()} of {dist.get_world_size()}, local {os.environ['LOCAL_RANK']}: "
      f"{model.module.weight.grad.mean().item():.3f}", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
STAY = "import time; time.sleep(1000)"


@pytest.mark.parametrize("replicas", [1, 2])
def test_an_unmodified_torchrun_script_runs_without_arguments(workplace: Workplace, replicas: int) -> None:
    program = script(workplace, TORCHRUN_SCRIPT)
    path = own(workplace, "torchrun", program, replicas=replicas, workers={"processesPerPod": 2})
    run = workplace.run(path)
    logs = "".join(run.log(worker, 1) for worker in range(replicas))
    assert run.exit_code == 0, run.stderr + logs
    size = 2 * replicas
    mean = 2 * sum(range(1, size + 1)) / size
    for rank in range(size):
        assert f"rank {rank} of {size}, local {rank % 2}: {mean:.3f}" in logs


@pytest.mark.parametrize(
    ("failure", "class_", "text"),
    [
        ("raise ValueError('a sample that cannot be read')", "Program", "ValueError: a sample that cannot be read"),
        ("os.kill(os.getpid(), 9)", "Killed", "was killed by signal 9"),
    ],
)
def test_the_verdict_names_the_rank_that_made_torchrun_fail(
    workplace: Workplace, failure: str, class_: str, text: str
) -> None:
    program = script(workplace, TORCHRUN_SCRIPT.replace("loss = ", f"if dist.get_rank() == 3: {failure}\nloss = "))
    policy = {"maxRestarts": 0}
    run = workplace.run(own(workplace, "torchrun", program, workers={"processesPerPod": 4}, runPolicy=policy))
    assert run.exit_code == 1, run.stderr
    verdict = run.status["attempts"][-1]["verdict"]
    assert (verdict["class"], verdict["rank"]) == (class_, 3), verdict
    assert text in verdict["message"]
    assert text in run.stderr


def test_a_program_may_stand_beside_the_template(workplace: Workplace) -> None:
    program = script(workplace, "import os, sys; print(sys.argv[1], os.environ['RANK'], os.environ['MINE'])")
    workers = {
        "replicas": 2,
        "image": "registry.example.com/me/train:1",
        "command": ["python", program],
        "args": ["rank"],
        "env": [{"name": "MINE", "value": "of $(DISTTRAIN_JOB_NAME)"}],
    }
    run = workplace.run(workplace.write("beside", training=None, workers=workers))
    assert run.exit_code == 0, run.stderr
    assert [run.log(index, 1).strip() for index in range(2)] == ["rank 0 of beside", "rank 1 of beside"]


def test_parameter_servers_are_reached_by_their_addresses_and_end_with_the_workers(workplace: Workplace) -> None:
    server = script(
        workplace,
        """
        import os, socketserver
        class Echo(socketserver.StreamRequestHandler):
            def handle(self):
                self.wfile.write(os.environ["DISTTRAIN_ROLE_INDEX"].encode())
        addresses = os.environ["DISTTRAIN_PS_ADDRESSES"].split(",")
        port = int(addresses[int(os.environ["DISTTRAIN_ROLE_INDEX"])].split(":")[1])
        socketserver.TCPServer(("127.0.0.1", port), Echo).serve_forever()
        """,
        "server.py",
    )
    worker = script(
        workplace,
        """
        import os, socket, time
        for index, address in enumerate(os.environ["DISTTRAIN_PS_ADDRESSES"].split(",")):
            host, port = address.split(":")
            while True:
                try:
                    connection = socket.create_connection((host, int(port)))
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)
            assert connection.recv(10) == str(index).encode()
        """,
        "worker.py",
    )
    path = own(
        workplace, "python", worker, replicas=2, parameterServers={"replicas": 2, "template": command("python", server)}
    )
    run = workplace.run(path)
    assert run.exit_code == 0, run.stderr + run.log(0, 1)
    assert not run.left()


def test_a_failing_program_fails_the_job_with_its_pod_exit_code_and_last_words(workplace: Workplace) -> None:
    program = script(
        workplace,
        "import os, sys, time; print('bad luck'); sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(1000)",
    )
    run = workplace.run(own(workplace, "python", program, replicas=2, runPolicy={"maxRestarts": 1}))
    assert run.exit_code == 1
    condition = run.condition("Failed")
    assert condition["reason"] == "RestartsExhausted"
    assert "worker 1" in condition["message"]
    assert "exited with code 7: bad luck" in condition["message"]
    assert (run.status["attempt"], run.status["restarts"]) == (2, 1)
    lines = run.stderr.splitlines()
    assert lines[lines.index("Failed: RestartsExhausted") + 3] == "    bad luck"
    assert lines[-1] == f"  log: disttrain-runs/{run.home.name}/logs/{run.home.name}-worker-1-a2.log"
    assert not run.left()


def test_a_program_that_does_not_exist_is_named(workplace: Workplace) -> None:
    run = workplace.run(own(workplace, "no-such-program", runPolicy={"maxRestarts": 0}))
    assert run.exit_code == 1
    assert "cannot start: no such program: no-such-program" in run.condition("Failed")["message"]


def test_a_deadline_ends_the_job_and_its_processes(workplace: Workplace) -> None:
    # What there is to be ended they say themselves: to be looked at, too, they have too little time.
    program = script(
        workplace,
        "import os, time\nopen(f'alive-{os.getpid()}-{os.getppid()}', 'w').close()\ntime.sleep(1000)",
    )
    run = workplace.run(own(workplace, "python", program, replicas=2, activeDeadlineSeconds=2))
    assert run.exit_code == 1
    assert run.condition("Failed")["reason"] == "DeadlineExceeded"
    pids = [int(pid) for path in workplace.folder.glob("alive-*") for pid in path.name.split("-")[1:]]
    assert not [pid for pid in pids if psutil.pid_exists(pid) and runs(psutil.Process(pid))]


@pytest.mark.parametrize("policy", ["Running", "All", "None"])
def test_no_pod_outlives_the_command_whatever_its_clean_pod_policy(workplace: Workplace, policy: str) -> None:
    worker = script(workplace, "import os, time\nwhile not os.path.exists('go'):\n    time.sleep(0.01)")
    servers = {"replicas": 1, "template": command("python", "-c", STAY)}
    path = own(workplace, "python", worker, parameterServers=servers, runPolicy={"cleanPodPolicy": policy})
    run = workplace.start(path)
    run.until(lambda: len(run.below()) == 4, "keepers and programs run")
    (workplace.folder / "go").touch()
    assert run.wait() == 0, run.stderr
    assert not run.left()


def test_a_job_that_is_made_suspended_says_so_and_ends(workplace: Workplace) -> None:
    run = workplace.run(own(workplace, "python", "-c", "", suspend=True))
    assert run.exit_code == 0, run.stderr
    assert run.status["phase"] == "Suspended"
    assert run.status["attempt"] == 0
    assert "resume with: disttrain run --resume disttrain-runs/own-" in run.stderr
    again = workplace.run("--resume", run.home)
    assert again.exit_code == 0, again.stderr
    assert again.status["phase"] == "Succeeded"


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    # A daemon with a session of its own, and its child: as hard to find as a process can be.
    subprocess.Popen([sys.executable, __file__, "daemon"], start_new_session=True)
elif sys.argv[1] == "daemon":
    if os.fork():
        os._exit(0)
    os.setsid()
    subprocess.Popen([sys.executable, __file__, "child"])
open(f"alive-{os.getpid()}", "w").close()
time.sleep(1000)
"""


def stubborn(workplace: Workplace, **spec: Any) -> Run:
    """A run of one pod with processes that hide, all of them seen."""
    run = workplace.start(own(workplace, "python", script(workplace, STUBBORN), **spec))

    def all_alive() -> bool:
        written = {int(path.name.partition("-")[2]) for path in workplace.folder.glob("alive-*")}
        return len(written) == 3 and written <= {process.pid for process in run.below()}

    run.until(all_alive, "three stubborn processes run")
    return run


def nothing_left(run: Run) -> None:
    until(lambda: not run.left(), run.left)


def test_no_process_outlives_a_runner_that_was_killed(workplace: Workplace) -> None:
    run = stubborn(workplace)
    run.signal(signal.SIGKILL)
    run.wait()
    nothing_left(run)


def test_a_second_ctrl_c_stops_at_once(workplace: Workplace) -> None:
    run = stubborn(workplace)
    run.signal(signal.SIGINT)
    run.until(lambda: "suspending" in run.stderr, "the first one is heard")
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert run.status["phase"] == "Suspended"
    assert not run.left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_sigterm_and_a_closed_terminal_suspend_as_ctrl_c_does(workplace: Workplace, number: signal.Signals) -> None:
    run = workplace.start(own(workplace, "python", "-c", STAY))
    run.until(lambda: len(run.below()) == 2, "the program runs")
    run.signal(number)
    assert run.wait() == 128 + number
    assert "resume with: disttrain run --resume" in run.stderr
    assert not run.left()


def test_a_pod_that_does_not_stop_is_killed_when_its_grace_ends(workplace: Workplace) -> None:
    template = command("python", script(workplace, STUBBORN))
    template["spec"]["terminationGracePeriodSeconds"] = 1
    run = workplace.start(workplace.write("own", training=None, workers={"replicas": 1, "template": template}))
    run.until(lambda: len(list(workplace.folder.glob("alive-*"))) == 3, "three stubborn processes run")
    run.below()
    run.signal(signal.SIGINT)
    assert run.wait() == 130
    assert not run.left()


def test_a_killed_keeper_is_a_failed_pod_and_leaves_nothing(workplace: Workplace) -> None:
    program = script(
        workplace,
        "import os, time\n"
        "if os.environ['DISTTRAIN_ATTEMPT'] == '1':\n"
        "    open('ready', 'w').close()\n"
        "    time.sleep(1000)",
    )
    run = workplace.start(own(workplace, "python", program))
    run.until((workplace.folder / "ready").exists, "the program runs")
    run.below()
    (keeper,) = psutil.Process(run.process.pid).children()
    keeper.kill()
    assert run.wait() == 0, run.stderr
    assert run.status["restarts"] == 1
    nothing_left(run)


def test_runs_of_one_manifest_side_by_side_do_not_meet(workplace: Workplace) -> None:
    program = script(workplace, "import os, time; print(os.environ['MASTER_PORT']); time.sleep(1)")
    path = own(workplace, "python", program, replicas=2)
    places = [workplace.beside(name) for name in ("a", "b", "c")]
    begun = [place.start(path, "--runs", workplace.folder / "disttrain-runs") for place in places]
    codes = [run.wait() for run in begun]
    assert codes == [0, 0, 0], [run.stderr for run in begun]
    logs = list((workplace.folder / "disttrain-runs").glob("*/logs/*-worker-0-a1.log"))
    assert len({log.parent.parent.name for log in logs}) == 3


def test_a_run_that_is_under_way_is_not_resumed_a_second_time(workplace: Workplace) -> None:
    run = workplace.start(own(workplace, "python", "-c", STAY))
    run.until(lambda: len(run.below()) == 2, "the program runs")
    again = workplace.beside("other").run("--resume", run.home)
    assert again.exit_code == 2
    assert "another disttrain run works on this job" in again.stderr
    assert run.process.poll() is None


def test_the_runner_never_imports_torch(workplace: Workplace) -> None:
    code = "import sys\nfrom disttrain.main import main\ncode = main()\nprint('torch' in sys.modules, file=sys.stderr)"
    path = own(workplace, "python", "-c", "")
    run = workplace.run(path, command=[DISTTRAIN[0], "-c", code])
    assert run.stderr.splitlines()[-1] == "False"
