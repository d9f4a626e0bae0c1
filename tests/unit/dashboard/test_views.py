"""Page data: objects of any content -> JSON of bounded size."""

import copy
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.status import JobStatus
from disttrain_dashboard.source import INTERRUPTED, Job, Listing, Rank, Seen
from disttrain_dashboard.views import bounded
from disttrain_dashboard.views.curves import MAX_CURVES, MAX_POINTS, Curve, Curves, place_of
from disttrain_dashboard.views.listing import MAX_JOBS, listing, row, strategy
from disttrain_dashboard.views.page import MAX_ATTEMPTS, MAX_EVENTS, goodput, page
from disttrain_dashboard.views.ranks import MAX_RANKS, degrees, grid, ranks_of_pods
from tests.builders import a_job, a_raw_job, a_raw_pod, ended, running
from tests.unit.api.test_escape import WITHOUT_A_SHAPE
from tests.unit.cli.hostile_world import a_full_job, poisoned, strings
from tests.unit.dashboard.jobs import EVIL, TIME, a_dashboard_job, a_status

any_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just(EVIL),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


class TestRow:
    def test_a_job_that_runs(self) -> None:
        assert row(a_dashboard_job()) == {
            "key": "default/digits", "name": "digits", "namespace": "default", "phase": "Running", "strategy": "dp2",
            "ranks": 2, "step": 30, "total": 100, "loss": 0.5, "rate": 7.0, "left": None, "leftAt": TIME,
            "goodput": 80, "restarts": 0, "created": TIME, "finished": "", "deleted": False,
        }  # fmt: skip

    def test_what_a_runner_knows_is_newer_than_the_status(self) -> None:
        job = Job("a", a_raw_job(status=a_status()), step=31, loss=0.4, rate=9.0, left_seconds=5.0, phase="Running")
        found = row(job)
        assert [found[name] for name in ("step", "loss", "rate", "left", "leftAt", "phase")] == [
            31, 0.4, 9.0, 5.0, "", "Running",
        ]  # fmt: skip

    def test_before_its_first_step_a_job_has_the_steps_of_its_spec(self) -> None:
        found = row(Job("a", a_raw_job()))
        assert (found["phase"], found["step"], found["total"], found["loss"]) == ("Pending", None, 100, None)

    @pytest.mark.parametrize(("phase", "left"), [("Running", 9), ("Succeeded", None), ("Suspended", None)])
    def test_time_is_left_of_a_job_that_runs(self, phase: str, left: int | None) -> None:
        known = {"step": 30, "totalSteps": 100, "remainingSeconds": 9, "updateTime": TIME}
        assert row(a_dashboard_job(phase=phase, progress=known))["left"] == left

    @pytest.mark.parametrize(
        ("spec", "mesh", "words"),
        [
            ({}, "dp2", "dp2"),
            ({"parallelism": {"dataParallel": {"mode": "LocalSGD"}}}, "dp2", "dp2, LocalSGD"),
            ({"parallelism": {"dataParallel": {"mode": "AllReduce"}}}, None, ""),
            ({"parallelism": {"pipeline": {"schedule": "1F1B"}}}, "pp2", "pp2, 1F1B"),
            ({"training": None, "workers": {"command": ["a"]}}, "dp2", "dp2, own program"),
        ],
    )
    def test_the_strategy_in_words(self, spec: dict[str, Any], mesh: str | None, words: str) -> None:
        assert strategy(a_raw_job(**spec), mesh) == words

    def test_more_jobs_than_are_shown_are_counted(self) -> None:
        found = listing(Listing([Job(str(number), {}) for number in range(MAX_JOBS + 3)]), "t")
        assert (len(found["jobs"]), found["more"]) == (MAX_JOBS, "3 more jobs are not shown.")


class TestHostileObjects:
    """Whatever stands in a job, its pages are JSON of bounded size, and their texts have shapes alone."""

    @given(any_json)
    def test_anything_at_all(self, anything: Any) -> None:
        for raw in ({"status": anything}, {"spec": anything, "metadata": anything}, {"status": {"progress": anything}}):
            job = Job("a", raw)
            check(listing(Listing([job]), "t"))
            check(page(Seen(job, "why", events=[raw])))

    @pytest.mark.parametrize("state", ["Failed", "Running", "Suspended", "Succeeded"])
    def test_every_text_of_a_job(self, state: str) -> None:
        world = {"job": a_full_job(state)}
        paths = [path for path in strings(world) if path[-1] not in ("apiVersion", "kind")]
        for path in paths:
            job = Job("a", poisoned(world, EVIL, [path])["job"])
            check(page(Seen(job, EVIL, [EVIL], {0: Rank(EVIL, EVIL, EVIL)}, [{"message": EVIL}], place=EVIL)))

    def test_a_page_of_much_is_of_bounded_size(self) -> None:
        status = a_status(mesh="x" * 10**6, worldSize=2)
        status["attempts"] = [
            {"number": n, "startTime": TIME, "verdict": {"reason": "r" * 10**4, "message": "m" * 10**4}}
            for n in range(100)
        ]
        seen = Seen(
            Job("a", a_raw_job(status=status)), "w" * 10**6, ["t" * 10**6] * 99, events=[{"message": "e" * 10**6}] * 999
        )
        found = page(seen)
        assert (len(found["attempts"]), len(found["events"])) == (MAX_ATTEMPTS, MAX_EVENTS)
        assert len(orjson.dumps(found)) < 2**19

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", None, True, [], {}])
    def test_what_is_no_number_is_none(self, value: Any) -> None:
        assert bounded.number(value) is None

    def test_a_number_is_one_of_javascript(self) -> None:
        assert [bounded.number(value) for value in (10**30, -(10**30), 1.5)] == [2**53, -(2**53), 1.5]


def check(answer: Any) -> None:
    """It is JSON, and its texts are shown as what they are."""
    texts = orjson.dumps(answer).decode()
    assert not (WITHOUT_A_SHAPE - {"\t"}) & set(texts)


class TestPage:
    def test_goodput_is_the_longest_first(self) -> None:
        known = goodput(JobStatus.model_validate(a_status()).goodput)
        assert known == {"percent": 80, "state": "Training", "at": TIME, "spent": [["Training", 80], ["Starting", 20]]}

    def test_the_time_of_what_was_interrupted_does_not_go_on(self) -> None:
        job = replace(a_dashboard_job(), phase=INTERRUPTED)
        assert page(Seen(job, ""))["goodput"]["state"] == ""
        assert (row(job)["phase"], row(job)["left"]) == (INTERRUPTED, None)

    def test_an_attempt_has_its_verdict(self) -> None:
        ended_ = {"number": 1, "startTime": TIME, "endTime": TIME, "checkpointStep": 20, "restartsInPlace": 2}
        ended_ |= {"verdict": {"reason": "OOMKilled", "message": "rank 1 ran out of memory", "class": "OutOfMemory"}}
        (found,) = page(Seen(a_dashboard_job(attempts=[ended_]), ""))["attempts"]
        assert found == {
            "number": 1, "start": TIME, "running": "", "end": TIME, "reason": "OOMKilled",
            "message": "rank 1 ran out of memory", "failed": True, "checkpoint": 20, "inPlace": 2,
        }  # fmt: skip

    def test_an_attempt_that_ended_well_has_not_failed(self) -> None:
        verdict = {"reason": "WorkersSucceeded", "message": "all 2 workers succeeded"}
        (found,) = page(Seen(a_dashboard_job(attempts=[{"number": 1, "startTime": TIME, "verdict": verdict}]), ""))[
            "attempts"
        ]
        assert (found["reason"], found["failed"]) == ("WorkersSucceeded", False)

    def test_an_event_has_the_time_that_it_has(self) -> None:
        raw = {"eventTime": TIME, "reason": "Scheduled", "involvedObject": {"name": "p"}, "message": "m", "count": 3}
        (found,) = page(Seen(a_dashboard_job(), "", events=[raw]))["events"]
        assert found == {"time": TIME, "type": "", "reason": "Scheduled", "about": "p", "message": "m", "count": 3}

    def test_facts_name_what_is_trained(self) -> None:
        facts = dict(page(Seen(a_dashboard_job(), "", place="/runs/a"))["facts"])
        assert facts == {
            "Mesh": "dp2", "Pods ready": "2/2", "Model": "mlp", "Data": "digits", "Restarts": "0", "Kept in": "/runs/a",
        }  # fmt: skip

    def test_a_job_that_runs_says_when_its_last_step_was(self) -> None:
        known = {"step": 4, "totalSteps": 9, "lastStepTime": "2026-01-01T11:59:20Z", "updateTime": TIME}
        assert ["Last step", "2026-01-01T11:59:20Z"] in page(Seen(a_dashboard_job(progress=known), ""))["facts"]
        ended = a_dashboard_job(progress=known, completionTime=TIME)
        assert "Last step" not in dict(page(Seen(ended, ""))["facts"])


class TestGrid:
    def test_ranks_have_states_pods_and_steps(self) -> None:
        ranks = {0: Rank("p0", "n0", "running", 5), 1: Rank("p0", "n0", "failed"), 3: Rank("p1", "n1", "done", 7)}
        found = grid({"parallelism": {"tensorParallelDegree": 2}}, 4, ranks)
        assert found is not None
        assert (found["degrees"], found["states"], found["pod"]) == ((1, 2, 1, 1, 2), "rf-d", [0, 0, -1, 1])
        assert (found["pods"], found["steps"]) == ([["p0", "n0"], ["p1", "n1"]], [5, None, None, 7])

    @pytest.mark.parametrize("world", [None, 0, -5])
    def test_no_ranks_no_grid(self, world: int | None) -> None:
        assert grid({}, world, {}) is None

    def test_too_many_ranks_are_a_number(self) -> None:
        assert grid({}, MAX_RANKS + 1, {}) == {"world": MAX_RANKS + 1, "most": MAX_RANKS}

    @pytest.mark.parametrize("spec", [{"parallelism": {"tensorParallelDegree": 3}}, {"parallelism": 7}, None, "x"])
    def test_degrees_that_cannot_be_are_those_of_replicas(self, spec: Any) -> None:
        assert degrees(spec, 4) == (1, 4, 1, 1, 1)

    def test_states_are_those_of_the_pods_programs(self) -> None:
        job = a_job(workers={"replicas": 5, "processesPerPod": 2})
        pods = [a_raw_pod(job, index=index) for index in range(5)]
        pods[0], pods[1], pods[2] = running(pods[0]), ended(pods[1], 0), ended(pods[2], 3)
        pods[3]["spec"] = {"nodeName": "node-d"}
        del pods[4]["metadata"]["labels"]
        older = running(a_raw_pod(job, index=4, attempt=2))
        raw = a_raw_job(workers={"replicas": 5, "processesPerPod": 2})
        found = ranks_of_pods([*pods, older, {"metadata": 7}], raw["spec"], 1)
        states = [found[rank].state if rank in found else "-" for rank in range(10)]
        assert states == ["running"] * 2 + ["done"] * 2 + ["failed"] * 2 + ["waiting"] * 2 + ["-"] * 2
        assert found[6].node == "node-d"


class TestCurves:
    def test_a_long_run_is_its_whole_self_in_few_points(self) -> None:
        curve = Curve(100)
        for step in range(1, 10_001):
            curve.add(step, float(step))
        assert 50 <= len(curve.points) <= 100
        assert curve.points[-1] == (10_000, 10_000.0)
        gaps = [after[0] - before[0] for before, after in zip(curve.points, curve.points[1:], strict=False)]
        assert max(gaps) <= 2 * min(gaps[1:-1])

    def test_a_step_that_is_done_again_counts_as_it_was_last(self) -> None:
        curves = Curves()
        line = {"attempt": 1, "step": 1, "loss_metrics/global_avg_loss": 3.0}
        curves.add_lines(
            [line, {**line, "step": 2}, {**line, "attempt": 2, "step": 2, "loss_metrics/global_avg_loss": 1.0}]
        )
        (panel,) = curves.panels()
        assert panel == {
            "title": "Loss",
            "lines": [{"name": "training", "points": [(1, 3.0), (2, 1.0)]}],
            "restarts": [2],
        }

    def test_loss_and_throughput_come_first_and_the_trainers_own_figures_not_at_all(self) -> None:
        curves = Curves()
        curves.add_lines(
            [{"step": 1, "reward": 1, "lr": 3, "validation_metrics/accuracy": 1, "throughput(sps)": 2,
              "loss_metrics/global_avg_loss": 1, "task/kl": 4, "validation_metrics/global_avg_loss": 1}]
        )  # fmt: skip
        titles = [panel["title"] for panel in curves.panels()]
        assert titles == ["Loss", "Samples per second", "reward", "held-out accuracy", "kl"]
        assert [line["name"] for line in curves.panels()[0]["lines"]] == ["training", "held-out"]

    @pytest.mark.parametrize("key", ["lr", "step", "time_metrics/data(s)", 7, None])
    def test_what_is_not_drawn(self, key: Any) -> None:
        assert place_of(key) is None

    @given(st.lists(any_json | st.fixed_dictionaries({"step": any_json, "loss": any_json, "attempt": any_json})))
    def test_any_lines(self, lines: list[Any]) -> None:
        curves = Curves()
        curves.add_lines(copy.deepcopy(lines))
        orjson.dumps(curves.panels())

    def test_thousands_of_figures_and_lives_are_a_bounded_number(self) -> None:
        curves = Curves()
        curves.add_lines({"step": life, "attempt": life, **{f"own{n}": 1 for n in range(30)}} for life in range(700))
        panels = curves.panels()
        assert len(panels) <= MAX_CURVES
        assert len(orjson.dumps(panels)) < MAX_CURVES * MAX_POINTS * 20
