"""Programs that know nothing of us, and how their processes live and end."""

import signal
from typing import Any

import pytest

import disttrain
from tests.waiting import until

from .conftest import DISTTRAIN, GENEROUS, Run, Workplace, command, own, script

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


@disttrain.train(workers=2, processes=2)
def summed(rate: float) -> None:
    """Report the sum of what the ranks have."""
    import torch
    import torch.distributed as dist

    import disttrain

    dist.init_process_group("gloo")
    value = torch.tensor(rate * (dist.get_rank() + 1))
    dist.all_reduce(value)
    disttrain.report(step=1, total=1, loss=value.item())
    dist.destroy_process_group()


def test_a_function_runs_on_each_rank(workplace: Workplace) -> None:
    client = disttrain.LocalClient(runs=workplace.folder / "runs")
    job = client.submit(summed.job(rate=0.5))
    try:
        assert job.name.startswith("summed-")
        assert client.wait(job.name, timeout=GENEROUS).phase == "Succeeded", "\n".join(client.logs(job.name))
        assert [row["loss_metrics/global_avg_loss"] for row in client.metrics(job.name)] == [5.0]
    finally:
        client.delete(job.name)


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
