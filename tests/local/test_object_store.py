"""A job whose checkpoints lie in an object store, through `disttrain run`."""

import re
import signal
from collections.abc import Iterator

import pytest
import yaml
from s3fs import S3FileSystem

from tests.object_store import object_store
from tools.cluster.ports import free_port

from .conftest import Workplace, held_digits

BUCKET = "checkpoints"
TRAINING = {"steps": 260, "microBatchSize": 16, "checkpoint": {"interval": 50}, "logging": {"interval": 50}}


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3FileSystem]:
    """Of a store whose address and keys are in the environment."""
    with object_store(free_port()) as settings:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        client = S3FileSystem(use_listings_cache=False, skip_instance_cache=True)
        client.mkdir(BUCKET)
        yield client


def committed(client: S3FileSystem) -> list[int]:
    """Steps whose checkpoints are complete: their manifest is written last."""
    found = (re.search(r"/step-(\d+)\.[^/]+/manifest\.json$", path) for path in client.find(BUCKET))
    return sorted(int(match[1]) for match in found if match)


def test_a_job_killed_and_stopped_goes_on_from_the_object_store(workplace: Workplace, client: S3FileSystem) -> None:
    storage = {"url": f"s3://{BUCKET}/runs"}
    # Both attempts wait in the middle: at steps 120 and 220.
    training = TRAINING | held_digits(workplace, samples=120 * 16, attempts=2)
    run = workplace.start(workplace.write(workers={"replicas": 1}, training=training, storage=storage))
    run.until(lambda: len(committed(client)) > 1, "two checkpoints are written", pause=0.3)
    victim = run.find("rank 0")
    assert victim is not None
    victim.kill()
    run.until(lambda: "resuming after step" in run.log(0, attempt=2), "attempt 2 goes on")
    resumed = re.search(r"resuming after step (\d+) from (\S+)", run.log(0, attempt=2))
    assert resumed
    assert int(resumed[1]) >= 100
    assert resumed[2].startswith(storage["url"])

    run.until(lambda: committed(client)[-1] > int(resumed[1]), "attempt 2 saves, too", pause=0.3)
    run.below()
    run.signal(signal.SIGINT)
    assert run.wait() == 130, run.stderr
    saved = committed(client)[-1]
    assert run.status["phase"] == "Suspended"
    assert (run.status["checkpoint"]["step"], run.status["restarts"]) == (saved, 1)

    again = workplace.run("--resume", run.home)
    assert again.exit_code == 0, again.stderr
    assert f"resuming after step {saved} from {storage['url']}" in again.log(0, attempt=3)
    assert again.status["progress"]["step"] == TRAINING["steps"]
    assert committed(client)[-1] == TRAINING["steps"]
    assert yaml.safe_load((run.home / "status.yaml").read_text())["status"]["phase"] == "Succeeded"
    assert not list(run.home.glob("storage/*")), "nothing is kept on this machine"
