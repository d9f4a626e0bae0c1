"""A run whose disk fills up: it goes on where it can, else ends with a sentence, and leaves nothing running."""

import signal

import pytest

from disttrain_api.names import ExitCode
from tests.small_disk import fill, small_disk

from .conftest import Run, Workplace, own, script
from .test_outputs import ENDLESS, stored, until_it_trains

FULL = "No space left on device"


def until_all_agents_have_written(run: Run) -> None:
    """Wait for the termination messages of both pods: a disk that is full before an agent first writes has no room."""
    until_it_trains(run)

    def written() -> bool:
        reports = list(run.folder.glob("disttrain-runs/**/termination-log"))
        return len(reports) == 2 and all(path.stat().st_size for path in reports)

    run.until(written, "both agents have written their termination messages")


def test_a_training_goes_on_and_its_end_is_written_down(workplace: Workplace) -> None:
    path = workplace.write(workers={"replicas": 2}, training={"steps": 1000, "microBatchSize": 16})
    with small_disk(workplace.folder / "disttrain-runs", "512k") as disk:
        run = workplace.start(path)
        until_all_agents_have_written(run)
        fill(disk)
        assert run.wait() == 0, run.stderr
        assert stored(run)["status"]["phase"] == "Succeeded", "the pods' scratch space has made room"
    assert "Traceback" not in run.stderr
    assert not run.left()


def test_a_stop_writes_the_checkpoint_where_there_is_room(workplace: Workplace) -> None:
    path = workplace.write(workers={"replicas": 2}, training=ENDLESS, storage={"claimName": "roomy"})
    with small_disk(workplace.folder / "disttrain-runs", "512k") as disk, small_disk(disk / "claims" / "roomy", "64m"):
        run = workplace.start(path)
        until_all_agents_have_written(run)
        fill(disk)
        run.signal(signal.SIGTERM)
        assert run.wait() == 143, run.stderr
        status = stored(run)["status"]
        assert status == run.status
        assert status["phase"] == "Suspended"
        step = status["checkpoint"]["step"]
        assert (disk / "claims" / "roomy" / run.home.name / f"step-{step}" / ".metadata").exists()
    assert not run.left()


GREEDY = """
import contextlib, torch
def make():
    with contextlib.suppress(OSError), open("disttrain-runs/filler", "wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            continue
    {then}
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
"""
"""A model that fills the disk when it is built: before the first report."""


def greedy(workplace: Workplace, then: str) -> Run:
    (workplace.folder / "greedy.py").write_text(GREEDY.format(then=then))
    training = {"model": {"name": None, "entrypoint": "greedy:make"}, "steps": 5, "microBatchSize": 16}
    path = workplace.write(workers={"replicas": 1}, training=training, runPolicy={"maxRestarts": 0})
    with small_disk(workplace.folder / "disttrain-runs", "512k"):
        return workplace.run(path)


def test_a_rank_that_needs_room_of_its_own_ends_with_a_sentence(workplace: Workplace) -> None:
    run = greedy(workplace, 'open("disttrain-runs/more", "wb", buffering=0).write(b"x" * 4096)')
    assert run.exit_code == 1
    failed = run.condition("Failed")
    assert f"exited with code {ExitCode.DISK_FULL}" in failed["message"]
    assert "cannot write a file: No space left on device" in failed["message"]
    assert failed["message"] in run.stderr
    assert "Traceback" not in run.stderr
    assert not run.left()


def test_a_program_whose_log_finds_no_room_is_judged_with_the_reason(workplace: Workplace) -> None:
    program = script(workplace, "while True:\n    print('x' * 1000, flush=True)")
    with small_disk(workplace.folder / "disttrain-runs", "512k"):
        run = workplace.run(own(workplace, "python", program, runPolicy={"maxRestarts": 0}))
    assert run.exit_code == 1
    assert "exited with code 1: no space is left on the disk of" in run.condition("Failed")["message"]
    assert f"cannot write {workplace.folder}/disttrain-runs/" in run.stderr
    assert f"status.yaml: {FULL}; the job continues without it" in run.stderr
    assert f"status.yaml is not up to date: {FULL}" in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
    assert not run.left()


@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_run_whose_folder_finds_no_room_does_not_begin(workplace: Workplace, files: int) -> None:
    path = workplace.write(training={"steps": 5, "microBatchSize": 16})
    with small_disk(workplace.folder / "disttrain-runs", "512k", files=files):
        run = workplace.run(path)
    assert run.exit_code == 1
    assert run.stderr == (
        f"disttrain: cannot write to {workplace.folder}/disttrain-runs: {FULL}; choose another place with"
        " --runs FOLDER\n"
    )
