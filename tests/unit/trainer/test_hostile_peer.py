"""A stranger that knows host and port of a rank cannot join, run code, or change or stop what is trained."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from disttrain_api.names import ExitCode
from tests import hostile_peer
from tests.unit.trainer.worlds import World, job, launch, run_ranks, small
from tools.cluster.ports import free_port

STEPS = 12
MIDDLE = 5
RANKS = 3
LOSS = "loss_metrics/global_avg_loss"


def training(folder: Path) -> dict[str, Any]:
    """A job that waits in its middle for `go` in the folder."""
    # A global batch of 24 on 3 ranks is 8 samples of each; DDP learns from one more, before the first step.
    data = {
        "entrypoint": "tests.unit.trainer.gated_code:gated_samples",
        "config": {"folder": str(folder), "after": 8 * (MIDDLE + 1) + 4},
    }
    return small(steps=STEPS, data=data, checkpoint={"interval": 4}, logging={"interval": 1})


def curve(storage: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of every line."""
    lines = (storage / "test" / "metrics.jsonl").read_text().splitlines()
    steps = [line for line in map(json.loads, lines) if LOSS in line]
    return [(line["step"], line[LOSS], line["grad_norm"]) for line in steps]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    assert [rank.code for rank in run_ranks(folder, job(training(folder)), RANKS, storage=folder)] == [0] * RANKS
    found = curve(folder)
    assert [step for step, _, _ in found] == list(range(1, STEPS + 1))
    return found


@contextmanager
def stranger(folder: Path, port: int, *arguments: str) -> Iterator[subprocess.Popen]:
    """The hostile peer as a process of its own."""
    with (folder / "-".join(["stranger", *arguments]).replace("/", "_")).open("wb") as out:
        command = [sys.executable, hostile_peer.__file__, "127.0.0.1", str(port), *arguments]
        environment = {**os.environ, "HOSTILE_MARK": str(folder / "code-has-run")}
        process = subprocess.Popen(command, stdout=out, env=environment)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def attack(folder: Path, port: int, *attacks: str) -> list[dict[str, Any]]:
    """Run these attacks to their end, each once; all of them where none is named."""
    with stranger(folder, port, *attacks) as process:
        assert process.wait(hostile_peer.CONNECTIONS) == 0
    return [json.loads(line) for line in (folder / "-".join(["stranger", *attacks])).read_text().splitlines()]


def listeners(world: World) -> set[tuple[str, int]]:
    """Address and port of every TCP socket on which a rank listens."""
    found = set()
    for rank in world.processes:
        for one in psutil.Process(rank.pid).net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                found.add((one.laddr.ip, one.laddr.port))
    return found


def test_a_stranger_changes_nothing(tmp_path: Path, undisturbed: list[tuple[int, float, float]]) -> None:
    """Attacked while ranks meet, while they train, and all the time by half-open connections."""
    port = free_port()
    config = job(training(tmp_path))
    options = {"module": "tests.unit.trainer.gated_joiner", "GATE": str(tmp_path)}
    with launch(tmp_path, config, RANKS, storage=tmp_path, port=port, **options) as world:
        world.wait_until(lambda: ("127.0.0.1", port) in listeners(world))
        for outcome in attack(tmp_path, port):
            assert outcome["connections"] > 0, outcome
        with stranger(tmp_path, port, "half-open", "--hold", "--held", str(tmp_path / "held")):
            world.wait_until((tmp_path / "held").exists)
            (tmp_path / "join").touch()
            world.wait_until(lambda: world.reached(MIDDLE - 1))
            for outcome in attack(tmp_path, port):
                assert outcome["sent"] < 2**27, f"a stranger's bytes were taken in: {outcome}"
            assert not world.reached(STEPS - 1), "the attack came too late"
            (tmp_path / "go").touch()
            ended = world.ended()
    assert [rank.code for rank in ended] == [0] * RANKS, [rank.err for rank in ended]
    assert curve(tmp_path) == undisturbed, "the loss curve is another, in at least one bit"
    assert "rendezvous: refused a connection from 127.0.0.1: it speaks another protocol" in ended[0].err
    assert not (tmp_path / "code-has-run").exists()


def test_ranks_of_a_local_run_listen_on_the_loopback_interface_alone(tmp_path: Path) -> None:
    with launch(tmp_path, job(training(tmp_path)), RANKS, storage=tmp_path) as world:
        world.wait_until(lambda: world.reached(MIDDLE - 1))
        found = listeners(world)
    # The gateway, the store behind it, two forwarders, and gloo's of each rank.
    assert len(found) >= 3 + RANKS
    assert {ip for ip, _ in found} == {"127.0.0.1"}


@pytest.mark.parametrize(
    ("before", "now"),
    [({"attempt": 1}, {"attempt": 2}), ({"DISTTRAIN_GENERATION": "0"}, {"DISTTRAIN_GENERATION": "1"})],
    ids=["attempt", "generation"],
)
def test_ranks_of_another_attempt_do_not_meet(tmp_path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Rank 1 has the token, but is of the attempt before, or of the generation before in the same attempt. Red where
    the key is the same for all of them."""
    port = free_port()
    older, newer = tmp_path / "older", tmp_path / "newer"
    with launch(newer, job(small()), 1, port=port, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2", **now) as rank_0:
        rank_0.wait_until(lambda: ("127.0.0.1", port) in listeners(rank_0))
        environment = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        with launch(older, job(small()), 1, port=port, **environment, **before) as rank_1:
            errors = older / "rank-1.err"
            sentence = f"rendezvous: 127.0.0.1:{port}: what listens there does not know the token of this attempt"
            rank_1.wait_until(lambda: errors.exists() and sentence in errors.read_text())
        refusal = "it left before it proved that it knows the token of this attempt"
        rank_0.wait_until(lambda: refusal in rank_0.text(0, "err"))


@pytest.mark.parametrize(("token", "found"), [("", "is empty"), (None, "cannot be read")])
def test_beyond_this_machine_a_token_is_required(tmp_path: Path, token: str | None, found: str) -> None:
    """Without end where no token is asked for: the ranks start."""
    (tmp_path / "job.json").write_text(json.dumps(job(small())))
    if token is not None:
        (tmp_path / "token").write_text(token)
    for ended in run_ranks(tmp_path, None, 2, MASTER_ADDR="worker-0.job"):
        assert ended.code == ExitCode.INVALID_CONFIGURATION
        assert f"{tmp_path}/token {found}" in ended.err
