"""Workers that die, hang and come back, servers that lose what they held: real processes, as their pods run them."""

import signal
from pathlib import Path

import pytest
import zmq

from disttrain_api.names import ExitCode
from disttrain_api.report import decode_pod_report
from disttrain_trainer.parameter_server.protocol.sockets import connect
from disttrain_trainer.parameter_server.protocol.wire import key_of, key_with
from tests.unit.trainer.server_jobs import SERVER, a_job, ended, signalled
from tests.unit.trainer.worlds import TOKEN, small, user
from tests.waiting import GENEROUS, until

STEPS = 30
# 50 samples in batches of 24 for two workers: 2, 2 and 1 parts with samples per epoch of three steps.
UPDATES = STEPS // 3 * 5
INTERVAL = 5
TRAINING = small(
    data=user("slow_samples", seconds=0.003),
    optimizer={"name": "SGD", "learningRate": 0.05},
    steps=STEPS,
    evaluation={"interval": 10},
    logging={"interval": 1, "tensorBoard": False},
)


@pytest.mark.parametrize("synchronization", ["Sync", "BoundedStaleness"])
def test_a_worker_that_dies_stops_nobody_and_one_that_comes_back_is_taken_in(tmp_path, synchronization):
    with a_job(tmp_path, TRAINING, parameterServer={"synchronization": synchronization}) as running:
        running.reached(5)
        signalled(running.workers[1], signal.SIGKILL)
        running.workers[1].processes[0].wait(GENEROUS)
        again = running.worker(1, "worker-1-again")
        code, report = ended(running.workers[0], 0)
        assert (code, report.step, report.done) == (0, STEPS, True)
        assert ended(again, 1)[0] == 0
        version = running.last()["servers/version_max"]
        assert version == (STEPS if synchronization == "Sync" else UPDATES)
        steps = [line["step"] for line in running.lines() if "loss_metrics/global_avg_loss" in line]
        assert steps == list(range(1, STEPS + 1))


def test_the_leader_comes_back_to_where_the_others_are(tmp_path):
    with a_job(tmp_path, TRAINING, servers=2, parameterServer={"synchronization": "Async"}) as running:
        running.reached(5)
        signalled(running.workers[0], signal.SIGKILL)
        running.workers[0].processes[0].wait(GENEROUS)
        again = running.worker(0, "worker-0-again")
        code, report = ended(again, 0)
        assert (code, report.step, report.done) == (0, STEPS, True)
        assert ended(running.workers[1], 1)[0] == 0
        assert running.last()["servers/version_min"] == running.last()["servers/version_max"] == UPDATES


def test_a_worker_that_hangs_is_done_without_and_may_wake_up(tmp_path):
    with a_job(tmp_path, TRAINING, parameterServer={"synchronization": "Sync"}) as running:
        running.reached(5)
        signalled(running.workers[1], signal.SIGSTOP)
        assert ended(running.workers[0], 0)[0] == 0
        signalled(running.workers[1], signal.SIGCONT)
        assert ended(running.workers[1], 1)[0] == 0
        assert running.last()["servers/version_max"] == STEPS


def test_a_server_that_was_started_anew_ends_the_workers_and_what_cannot_be_read_is_counted(tmp_path):
    with a_job(tmp_path, TRAINING, servers=2) as running:
        running.reached(3)
        context = zmq.Context()
        stranger = connect(context, running.addresses[0], key_with(0, key_of(TOKEN, running.config["uid"], 1)))
        stranger.send_multipart([b"0" * 32, b'{"kind":"finish","fields":{},"tensors":[]}'])
        running.workers[0].wait_until(lambda: running.last().get("servers/dropped_messages") == 1.0)
        stranger.close(linger=0)
        context.term()
        signalled(running.servers[1], signal.SIGKILL)
        running.servers[1].processes[0].wait(GENEROUS)
        running.start("server-1-again", 1, SERVER, DISTTRAIN_ROLE_INDEX="1")
        for rank, worker in enumerate(running.workers):
            code, report = ended(worker, rank)
            assert code == ExitCode.PEER_LOST
            assert "parameter server 1" in report.error.message


@pytest.mark.parametrize(("index", "synchronization"), [(0, "BoundedStaleness"), (1, "Async")])
def test_a_server_goes_on_from_its_snapshot_and_what_it_lost_is_counted(tmp_path, index, synchronization):
    settings = {"synchronization": synchronization, "snapshotInterval": INTERVAL}
    with a_job(tmp_path, TRAINING, servers=2, parameterServer=settings) as running:
        snapshot = tmp_path / "storage" / "test" / "servers" / f"server-{index}.snapshot"
        running.workers[0].wait_until(snapshot.exists)
        running.reached(5)
        signalled(running.servers[index], signal.SIGKILL)
        running.servers[index].processes[0].wait(GENEROUS)
        again = running.start(f"server-{index}-again", 1, SERVER, DISTTRAIN_ROLE_INDEX=str(index))
        code, report = ended(running.workers[0], 0)
        assert (code, report.step, report.done) == (0, STEPS, True)
        assert ended(running.workers[1], 1)[0] == 0
        assert "resumes from its snapshot" in again.text(0, "out")
        last = running.last()
        assert last["servers/version_max"] == UPDATES
        assert 0 <= UPDATES - last["servers/version_min"] <= last["servers/lost_pushes"] < 2 * INTERVAL
        # Two servers began, one of them twice.
        assert last["servers/incarnations"] == 3
        steps = [line["step"] for line in running.lines() if "loss_metrics/global_avg_loss" in line]
        assert steps == list(range(1, STEPS + 1))


def test_a_killed_server_has_reported_the_newest_checkpoint(tmp_path):
    training = {**TRAINING, "checkpoint": {"interval": INTERVAL}, "steps": 1000}
    settings = {"synchronization": "Async", "snapshotInterval": INTERVAL}
    with a_job(tmp_path, training, parameterServer=settings) as running:
        server, follower = running.servers[0], running.workers[1]
        last_words = server.folder / "termination-log"

        def reported_checkpoint():
            found = decode_pod_report(last_words.read_text()) if last_words.exists() else None
            return found.progress.checkpoint if found else None

        def followed():
            report = follower.report(1)
            return report.checkpoint if report else None

        server.wait_until(lambda: reported_checkpoint() and reported_checkpoint().step >= 2 * INTERVAL)
        follower.wait_until(lambda: followed() and followed().step >= 2 * INTERVAL)
        for killed in (server, follower):
            signalled(killed, signal.SIGKILL)
            killed.processes[0].wait(GENEROUS)
        for found in (reported_checkpoint(), followed()):
            assert (found.step % INTERVAL, Path(found.path).name) == (0, f"step-{found.step}")
        assert follower.report(1).step >= followed().step


def test_all_are_asked_to_stop_and_the_checkpoint_is_that_of_a_whole_step(tmp_path):
    with a_job(tmp_path, TRAINING, servers=2, parameterServer={"synchronization": "Async"}) as running:
        running.reached(5)
        for world in (*running.servers, *running.workers):
            signalled(world, signal.SIGTERM)
        codes = [ended(worker, rank)[0] for rank, worker in enumerate(running.workers)]
        assert codes == [ExitCode.STOPPED, ExitCode.STOPPED]
        assert [server.processes[0].wait(GENEROUS) for server in running.servers] == [0, 0]
        report = running.workers[0].report(0)
        assert 5 <= report.checkpoint.step == report.step < STEPS


def test_servers_asked_to_stop_do_not_wait_for_workers_that_are_gone(tmp_path):
    """As after a failure: nobody is left to write the last checkpoint, and the rest of the grace would be idle."""
    with a_job(tmp_path, TRAINING, servers=2) as running:
        running.reached(5)
        for worker in running.workers:
            signalled(worker, signal.SIGKILL)
        for server in running.servers:
            signalled(server, signal.SIGTERM)
        # At the end of the grace they would end with another code.
        assert [server.processes[0].wait(GENEROUS) for server in running.servers] == [0, 0]


def test_data_that_differs_between_workers_is_refused(tmp_path):
    with a_job(tmp_path, {**TRAINING, "data": user("unlike_samples")}) as running:
        # Who comes first says how many samples there are, and trains; the other one is refused.
        def refused_ranks():
            codes = [worker.processes[0].wait(0.1) for worker in running.workers]
            return [rank for rank, code in enumerate(codes) if code == ExitCode.DATA_NOT_FOUND]

        refused = until(refused_ranks)[0]
        assert "training samples, others find" in running.workers[refused].report(refused).error.message


def test_a_model_with_experts_is_refused(tmp_path):
    experts = {"model": user("double_moe_gpt"), "data": user("double_tokens")}
    with a_job(tmp_path, {**TRAINING, **experts}) as running:
        ends = [ended(worker, rank) for rank, worker in enumerate(running.workers)]
        assert {code for code, _ in ends} == {ExitCode.INVALID_CONFIGURATION}
        assert all("Gpt has layers with experts" in report.error.message for _, report in ends)
