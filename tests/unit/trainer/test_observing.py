"""Traces and event files, as other programs read them."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.unit.trainer.worlds import job, run_ranks, small


@pytest.fixture(scope="module")
def observed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("observed")
    training = small(
        profiling={"firstStep": 3, "steps": 2, "allRanks": True}, logging={"interval": 1}, evaluation={"interval": 6}
    )
    ended = run_ranks(folder, job(training), ranks=2, DISTTRAIN_METRICS_DIR=str(folder / "metrics"))
    assert [rank.code for rank in ended] == [0, 0], ended[0].err
    return folder / "metrics"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_holds_the_steps_that_were_asked_for(observed, rank):
    trace = json.loads((observed / "profile" / f"rank-{rank}-step-3.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if "name" in event]
    assert {name for name in names if name.startswith("ProfilerStep#")} == {"ProfilerStep#2", "ProfilerStep#3"}
    assert "aten::addmm" in names


def test_event_files_say_what_metrics_say(observed):
    lines = [json.loads(line) for line in (observed / "metrics.jsonl").read_text().splitlines()]
    key = "loss_metrics/global_avg_loss"
    expected = {line["step"]: line[key] for line in lines if key in line}
    found = EventAccumulator(str(observed / "tensorboard")).Reload()
    assert {event.step: event.value for event in found.Scalars(key)} == pytest.approx(expected)
    assert found.Scalars("validation_metrics/accuracy")


def test_no_event_files_where_they_are_not_wanted(tmp_path):
    training = small(logging={"tensorBoard": False})
    assert run_ranks(tmp_path, job(training), DISTTRAIN_METRICS_DIR=str(tmp_path / "metrics"))[0].code == 0
    assert [path.name for path in (tmp_path / "metrics").iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"logging": {"tensorBoard": True}}, "logging.tensorBoard"), ({"profiling": {"firstStep": 2}}, "profiling")],
)
def test_what_has_no_place_is_refused(tmp_path, changes, field):
    (rank,) = run_ranks(tmp_path, job(small(**changes)))
    assert rank.code == 80
    assert f"`training.{field}` needs a volume in `spec.storage`" in rank.err
