import json
from pathlib import Path

from matplotlib.image import imread

from disttrain.local.plots import draw, restarted_at, series


def write(folder: Path, *lines: object) -> None:
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_a_step_done_again_counts_as_its_last_attempt_has_it():
    lines = [{"step": 1, "x": 5}, {"step": 2, "x": 4}, {"step": 2, "x": 3}, {"step": 3, "x": None}, {"step": 4}]
    assert series(lines, "x") == ([1, 2], [5.0, 3.0])


def test_an_attempt_and_a_restart_in_place_begin_at_the_first_step_that_they_log():
    lines = [
        {"attempt": 1, "step": 10},
        {"attempt": 1, "step": 20},
        {"attempt": 2, "step": 15},
        {"attempt": 2, "generation": 1, "step": 16},
        {"attempt": 4, "step": 25},
    ]
    assert restarted_at(lines) == [15, 16, 25]
    assert restarted_at(lines[:2]) == restarted_at([]) == []


def test_figures_of_ones_own_have_a_plot(tmp_path: Path):
    write(tmp_path, {"step": 1, "task/a": -1.0, "reward": 2, "lr": 1, "grad_norm": 1, "time_metrics/end_to_end(s)": 1})
    assert [path.name for path in draw(tmp_path)] == ["figures.png"]
    two = imread(tmp_path / "figures.png").shape[0]
    write(tmp_path, {"step": 1, "attempt": 1, "reward": 2}, {"step": 1, "attempt": 2, "generation": 1, "reward": 3})
    draw(tmp_path)
    assert imread(tmp_path / "figures.png").shape[0] < two, "a panel for each"


def test_plots_are_pictures(tmp_path: Path):
    loss = "loss_metrics/global_avg_loss"
    write(
        tmp_path,
        {"step": 1, loss: 2.0, "throughput(sps)": 10},
        {"step": 2, loss: 1.0, "throughput(sps)": 12},
        {"step": 2, "validation_metrics/global_avg_loss": 1.5},
    )
    drawn = draw(tmp_path)
    assert [path.name for path in drawn] == ["loss.png", "throughput.png"]
    for path in drawn:
        picture = imread(path)
        assert picture.shape[0] > 100
        # Something is drawn: not all of it is the white of the paper.
        assert picture[..., :3].min() < 0.5


def test_a_line_that_a_kill_cut_off_is_passed_over(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss_metrics/global_avg_loss": 2.0}\n{"step": 2, "lo')
    assert [path.name for path in draw(tmp_path)] == ["loss.png"]


def test_without_metrics_nothing_is_drawn(tmp_path: Path):
    assert draw(tmp_path) == []
    write(tmp_path, {"step": 1})
    assert draw(tmp_path) == []
