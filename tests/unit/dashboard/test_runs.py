"""Runs of this machine as a source of pages: their folders are read, and nothing in them or beside them is changed."""

import fcntl
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from disttrain.dashboard import metrics_file
from disttrain.dashboard import runs as module
from disttrain.dashboard.metrics_file import MetricsFile
from disttrain.dashboard.runs import LocalRuns
from disttrain.local.folder import METRICS_FILE, STATUS_FILE, RunFolder, new_run
from disttrain_agent.environment import report_dir
from disttrain_agent.reports import report_path
from disttrain_api import manifest
from disttrain_api.names import TOKEN_FILE, Role
from disttrain_api.report import RankReport
from disttrain_dashboard.source import SourceError, UnknownJobError
from disttrain_operator.plan.identity import pod_name
from tests.builders import a_manifest
from tests.unit.cli.fake_api import a_condition
from tests.unit.dashboard.jobs import TIME, a_status

Run = Callable[..., RunFolder]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Make the folder of a run with a status."""

    def make(name: str = "digits", *conditions: dict[str, Any], **status: Any) -> RunFolder:
        folder, raw = new_run(tmp_path / "runs", manifest.of_object(a_manifest(name)))
        ends = [a_condition("Finished")] if status.get("phase") in ("Succeeded", "Failed") else []
        raw["status"] = a_status(conditions=[*conditions, *ends], **status)
        folder.write_job(raw)
        return folder

    return make


@pytest.fixture
def runs(tmp_path: Path) -> LocalRuns:
    return LocalRuns(tmp_path / "runs")


def pod_of(folder: RunFolder, index: int = 0) -> str:
    metadata = folder.read_job()["metadata"]
    return pod_name(metadata["name"], metadata["uid"], Role.WORKER, index, 1)


def phases(runs: LocalRuns) -> dict[str, str | None]:
    return {job.raw["metadata"]["name"]: job.phase or job.status.phase for job in runs.jobs().jobs}


class TestList:
    def test_no_folder_is_no_runs(self, runs: LocalRuns) -> None:
        assert runs.jobs().jobs == []

    def test_the_last_changed_is_first_and_other_folders_are_none(
        self, run: Run, runs: LocalRuns, tmp_path: Path
    ) -> None:
        for number, name in enumerate(("one", "two", "three")):
            os.utime(run(name, phase="Succeeded").status_file, ns=(0, 10**9 * (number + 1)))
        (tmp_path / "runs" / "claims").mkdir()
        (tmp_path / "runs" / "notes.txt").write_text("a")
        assert list(phases(runs)) == ["three", "two", "one"]

    def test_a_status_is_read_again_when_it_has_changed_alone(self, run: Run, runs: LocalRuns, monkeypatch) -> None:
        folder = run(phase="Suspended")
        read: list[Path] = []
        original = RunFolder.read_job
        monkeypatch.setattr(RunFolder, "read_job", lambda self: (read.append(self.path), original(self))[1])
        assert [phases(runs) for _ in range(3)] == [{"digits": "Suspended"}] * 3
        assert read == [folder.path]
        raw = original(folder)
        raw["status"]["phase"] = "Restarting"
        folder.write_job(raw)
        assert phases(runs) == {"digits": "Interrupted"}
        for _ in range(3):
            runs.job(folder.path.name)
        assert read == [folder.path] * 2
        raw["status"]["phase"] = "Suspended"
        folder.write_job(raw)
        assert [runs.job(folder.path.name).job.status.phase for _ in range(3)] == ["Suspended"] * 3
        assert read == [folder.path] * 3

    def test_thousands_of_runs_are_read_bit_by_bit(self, run: Run, tmp_path: Path) -> None:
        for number in range(7):
            run(f"job{number}", phase="Succeeded")
        times = iter(range(1000))
        runs = LocalRuns(tmp_path / "runs", clock=lambda: next(times) * module.FIRST_SECONDS / 3)
        first, second = runs.jobs(), runs.jobs()
        assert (len(first.jobs), first.more) == (2, "5 of 7 runs are still to be read.")
        assert (len(second.jobs), second.more) == (7, "")  # fmt: skip

    def test_a_run_that_was_deleted_is_gone(self, run: Run, runs: LocalRuns) -> None:
        folder = run(phase="Succeeded")
        assert phases(runs) == {"digits": "Succeeded"}
        folder.status_file.unlink()
        assert phases(runs) == {}

    @pytest.mark.parametrize("text", ["a: [", "kind: Pod", "\x00", "&a [*a, *a]", "x" * 3 * 2**20], ids=range(5))
    def test_a_damaged_status_costs_its_own_row_alone(self, run: Run, runs: LocalRuns, text: str) -> None:
        damaged = run("bad")
        damaged.status_file.write_text(text)
        run("good", phase="Succeeded")
        assert phases(runs) == {"good": "Succeeded", damaged.path.name: "Unreadable"}
        assert runs.job(damaged.path.name).why.endswith("cannot be read.")

    def test_a_run_that_nobody_works_on_is_interrupted(self, run: Run, runs: LocalRuns) -> None:
        folder = run()
        assert phases(runs) == {"digits": "Interrupted"}
        with folder.locked():
            assert phases(runs) == {"digits": "Running"}
        assert runs.job(folder.path.name).todo == [f"`disttrain run --resume {folder.path}` resumes it"]

    def test_looking_never_takes_the_lock(self, run: Run, runs: LocalRuns, monkeypatch) -> None:
        folder = run()
        monkeypatch.setattr(fcntl, "flock", lambda *_: pytest.fail("took a lock"))
        runs.jobs(), runs.job(folder.path.name)

    def test_looking_changes_no_file(self, run: Run, runs: LocalRuns, tmp_path: Path) -> None:
        folder = run(phase="Succeeded")
        before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
        runs.jobs(), runs.job(folder.path.name), runs.log(folder.path.name, 0, 5)
        assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


class TestJob:
    def test_ranks_of_a_run_are_what_they_report(self, run: Run, runs: LocalRuns) -> None:
        folder = run()
        for rank, report in enumerate((RankReport(rank=0, step=41, total_steps=100, loss=0.25), None)):
            reports = report_dir(folder.scratch(pod_of(folder, rank)))
            reports.mkdir(parents=True)
            if report is not None:
                report_path(reports, rank).write_text(report.model_dump_json(by_alias=True))
        with folder.locked():
            seen = runs.job(folder.path.name)
        assert [(rank.state, rank.step) for rank in seen.ranks.values()] == [("running", 41), ("waiting", None)]
        assert (seen.job.step, seen.job.loss) == (41, 0.25)
        assert seen.why.startswith("digits ")

    @pytest.mark.parametrize(
        ("conditions", "verdict", "states"),
        [
            ([a_condition("Complete"), a_condition("Finished")], None, ["done", "done"]),
            (
                [a_condition("Failed"), a_condition("Finished")],
                {"reason": "R", "message": "m", "rank": 1},
                ["stopped", "failed"],
            ),
            ([a_condition("Suspended")], None, ["stopped", "stopped"]),
        ],
    )
    def test_ranks_of_a_run_that_has_ended(self, run: Run, runs: LocalRuns, conditions, verdict, states) -> None:
        attempt = {"number": 1, "startTime": "2026-01-01T12:00:00Z", "verdict": verdict}
        folder = run("digits", *conditions, phase="Suspended" if len(conditions) == 1 else "Ended", attempts=[attempt])
        assert [rank.state for rank in runs.job(folder.path.name).ranks.values()] == states

    def test_a_program_that_names_no_rank_fails_with_its_pod(self, run: Run, runs: LocalRuns) -> None:
        folder = run("digits", phase="Failed")
        raw = folder.read_job()
        verdict = {"reason": "RankFailed", "message": "m", "pod": pod_of(folder, 1)}
        raw["status"]["attempts"] = [{"number": 1, "startTime": TIME, "verdict": verdict}]
        folder.write_job(raw)
        assert [rank.state for rank in runs.job(folder.path.name).ranks.values()] == ["stopped", "failed"]

    def test_a_suspended_run_says_how_it_is_resumed(self, run: Run, runs: LocalRuns) -> None:
        folder = run("digits", a_condition("Suspended"), phase="Suspended")
        assert runs.job(folder.path.name).todo == [f"`disttrain run --resume {folder.path}` resumes it"]

    def test_curves_are_those_of_metrics_jsonl(self, run: Run, runs: LocalRuns) -> None:
        folder = run()
        folder.metrics.mkdir()
        (folder.metrics / METRICS_FILE).write_text('{"step": 1, "loss_metrics/global_avg_loss": 2.5}\n')
        (panel,) = runs.job(folder.path.name).panels
        assert panel["lines"][0]["points"] == [(1, 2.5)]

    @pytest.mark.parametrize(
        "key", ["", ".", "..", "../runs", "claims", "none-12345", "/etc", "a/../digits", "digits\x00", "~", "A" * 300]
    )
    def test_no_key_leads_elsewhere(self, run: Run, runs: LocalRuns, tmp_path: Path, key: str) -> None:
        run()
        (tmp_path / STATUS_FILE).write_text("a: 1")
        for ask in (runs.job, lambda name: runs.log(name, 0, 5)):
            with pytest.raises(UnknownJobError):
                ask(key)


class TestLog:
    def test_a_ranks_own_last_lines(self, run: Run, runs: LocalRuns) -> None:
        folder = run()
        raw = folder.read_job()
        raw["spec"]["workers"]["processesPerPod"] = 2
        folder.write_job(raw)
        lines = [f"[rank {number % 2}] line {number}" for number in range(9)] + ["[agent] over"]
        folder.log(pod_of(folder)).write_text("\n".join(lines) + "\n")
        assert runs.log(folder.path.name, 0, 2) == ["line 6", "line 8"]

    def test_only_the_end_of_a_long_log_is_read(self, run: Run, runs: LocalRuns, monkeypatch) -> None:
        monkeypatch.setattr(module, "LOG_BYTES", 64)
        folder = run()
        folder.log(pod_of(folder)).write_text("".join(f"[rank 0] {number:055}\n" for number in range(9)))
        assert runs.log(folder.path.name, 0, 100) == []
        monkeypatch.setattr(module, "LOG_BYTES", 100)
        assert runs.log(folder.path.name, 0, 100) == [f"{8:055}"]

    def test_a_name_in_a_status_leads_nowhere_else(self, run: Run, runs: LocalRuns, tmp_path: Path) -> None:
        folder = run()
        raw = folder.read_job()
        raw["metadata"]["name"] = "../../../secret"
        folder.write_job(raw)
        with pytest.raises(UnknownJobError):
            runs.log(folder.path.name, 0, 5)

    def test_stacks_are_asked_of_the_agents_of_a_run_that_goes_on(self, run: Run, runs: LocalRuns) -> None:
        folder, over = run(phase="Running"), run("over", phase="Succeeded")
        for place, sentence in ((over, "the run has ended"), (folder, "worker 0 has no agent")):
            with pytest.raises(SourceError, match=sentence):
                runs.stacks(place.path.name, 0)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        folder.write_support({TOKEN_FILE: "t"}, None, [port])
        for rank, sentence in ((0, "the agent of worker 0 does not answer"), (5, "worker 5 has no agent")):
            with pytest.raises(SourceError, match=sentence):
                runs.stacks(folder.path.name, rank)

    def test_no_log_is_no_lines(self, run: Run, runs: LocalRuns) -> None:
        assert runs.log(run().path.name, 7, 5) == []


class TestMetricsFile:
    def write(self, path: Path, *steps: int, end: str = "\n") -> None:
        with path.open("a") as file:
            file.write(
                "\n".join(json.dumps({"step": step, "loss_metrics/global_avg_loss": step}) for step in steps) + end
            )

    def steps(self, file: MetricsFile) -> list[int]:
        return [step for panel in file.panels() for step, _ in panel["lines"][0]["points"]]

    def test_it_goes_on_where_it_was(self, tmp_path: Path) -> None:
        path = tmp_path / "m"
        file = MetricsFile(path)
        assert self.steps(file) == []
        self.write(path, 1, 2, end='\n{"step": 3, "loss_metrics/')
        assert self.steps(file) == [1, 2]
        with path.open("a") as more:
            more.write('global_avg_loss": 3}\nno json\n[1]\n\xff\n')
        self.write(path, 4)
        assert self.steps(file) == [1, 2, 3, 4]

    def test_another_file_of_that_name_is_begun_anew(self, tmp_path: Path) -> None:
        path = tmp_path / "m"
        file = MetricsFile(path)
        self.write(path, 1, 2)
        assert self.steps(file) == [1, 2]
        path.write_text("")
        self.write(path, 9)
        assert self.steps(file) == [9]

    def test_one_look_reads_a_bounded_part(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(metrics_file, "MAX_BYTES", 100)
        path = tmp_path / "m"
        self.write(path, *range(1, 6))
        file = MetricsFile(path)
        assert [len(self.steps(file)) for _ in range(4)] == [2, 4, 5, 5]

    def test_a_line_without_an_end_takes_no_memory(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setattr(metrics_file, "MAX_LINE", 100)
        path = tmp_path / "m"
        file = MetricsFile(path)
        for _ in range(5):
            with path.open("a") as more:
                more.write("x" * 1000)
            file.panels()
            assert len(file._rest) <= 100
        self.write(path, end="\n")
        self.write(path, 7)
        assert self.steps(file) == [7]
