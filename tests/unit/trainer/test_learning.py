"""That jobs learn what they are meant to, and tell it."""

import json

import pytest

from tests.unit.trainer.worlds import job, of_example, run_ranks, small, user

STEPS = 60


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A part of examples/ddp.yaml, which tests/local runs as it is, in processes as the agent starts them."""
    folder = tmp_path_factory.mktemp("digits")
    config = job(of_example("ddp", steps=STEPS))
    ranks = run_ranks(folder / "run", config, ranks=2, storage=folder)
    return folder, ranks


def test_most_held_out_digits_are_recognised(digits):
    _, ranks = digits
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].err
    assert ranks[0].report.metrics["accuracy"] >= 0.8


def test_all_ranks_report_the_same(digits):
    _, (first, second) = digits
    assert first.report.done
    assert first.report.step == first.report.total_steps == STEPS
    same = {"rank", "samples_per_second", "loading_share", "phase_seconds"}
    assert first.report.model_dump(exclude=same) == second.report.model_dump(exclude=same)


def test_nothing_is_printed_on_stderr(digits):
    _, ranks = digits
    assert [rank.err for rank in ranks] == ["", ""]


def test_metrics_have_torchtitans_names(digits):
    folder, ranks = digits
    lines = [json.loads(line) for line in (folder / "test" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == list(range(10, STEPS + 1, 10))
    keys = {
        "attempt",
        "step",
        "loss_metrics/global_avg_loss",
        "loss_metrics/global_max_loss",
        "grad_norm",
        "lr",
        "throughput(sps)",
        "time_metrics/end_to_end(s)",
        "time_metrics/data_loading(s)",
        "time_metrics/own_median(s)",
        "time_metrics/own_max(s)",
        "memory/max_resident(GiB)",
        "comm/gradient_bytes",
    }
    assert all(line.keys() == keys for line in steps)
    assert steps[-1]["loss_metrics/global_avg_loss"] == ranks[0].report.loss
    assert steps[-1]["throughput(sps)"] == ranks[0].report.samples_per_second
    waited, whole = (steps[-1][f"time_metrics/{name}(s)"] for name in ("data_loading", "end_to_end"))
    assert ranks[0].report.loading_share == pytest.approx(waited / whole)
    assert lines[-1]["validation_metrics/accuracy"] == ranks[0].report.metrics["accuracy"]


def test_rank_0_alone_logs(digits):
    _, (first, second) = digits
    assert f"step: {STEPS}  loss: " in first.out
    assert second.out == ""


def test_each_held_out_sample_is_read_by_one_rank_per_evaluation(tmp_path):
    data = user("counting_samples", folder=str(tmp_path))
    training = small(steps=4, data=data, evaluation={"interval": 2, "batchSize": 2})
    ranks = run_ranks(tmp_path / "run", job(training), ranks=3)
    assert [rank.code for rank in ranks] == [0, 0, 0], ranks[0].err
    read = [int(line) for path in tmp_path.glob("read-*") for line in path.read_text().split()]
    # After steps 2 and 4, the latter being the last. Three ranks share 11 samples: one fills up with sample 0.
    assert sorted(read) == sorted(2 * [0, *range(11)])


def test_a_global_batch_that_is_larger_than_the_data_is_reported(tmp_path):
    (rank,) = run_ranks(tmp_path, job(small(steps=1, globalBatchSize=96)))
    assert rank.code == 0, rank.err
    assert "globalBatchSize 96 is larger than the data, which has 50 training samples" in rank.out
