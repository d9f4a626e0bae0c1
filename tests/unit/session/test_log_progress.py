"""Progress that is read from lines: what counts as a line, what is read from one, and what costs nothing."""

from collections.abc import Callable

import pytest

from disttrain_api.log_rules import compiled
from disttrain_session.log_progress import LINES_PER_SECOND, MAX_LINE_BYTES, Lines, LogProgress
from disttrain_session.reported_values import Figures

NANO = r"iter (?P<step>\d+): loss (?P<loss>\S+), time (?P<ms>[0-9.]+)ms"
BAR = r"\| (?P<step>\d+)/(?P<totalSteps>\d+) \["
DICT = r"'loss': '?(?P<loss>[^,']+)"


def progress(*patterns: str, total: int | None = 600, clock: Callable[[], float] = lambda: 0.0) -> LogProgress:
    return LogProgress([compiled(pattern) for pattern in patterns], total, clock)


def lines(*parts: bytes) -> list[str]:
    stream = Lines()
    return [line for part in parts for line in stream.feed(part)] + list(stream.finish())


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([b"a\nb\n"], ["a", "b"]),
        ([b"iter 12", b"0: loss", b" 3\nx"], ["iter 120: loss 3", "x"]),
        ([b"\r 10%|", b"# | 1/9\r 20%|# | 2/9\n"], ["10%|# | 1/9", "20%|# | 2/9"]),
        ([b"a\r\nb\r\n\n"], ["a", "b"]),
        ([b"\x1b[1;31mloss\x1b[0m 2\n", b"\x1b]0;title\x07x\x1b]8;;http://a\x1b\\y\n"], ["loss 2", "xy"]),
        ([b"\xff\xfe loss 3\n", "µ 1".encode()[:1], "µ 1".encode()[1:]], ["\ufffd\ufffd loss 3", "µ 1"]),
        ([b""], []),
    ],
)
def test_lines_end_at_a_line_feed_and_where_a_bar_overwrites_itself(parts, expected):
    assert lines(*parts) == expected


def test_of_a_line_without_end_its_beginning_is_kept_and_the_next_line_is_whole() -> None:
    stream = Lines()
    for _ in range(10 * 1024):
        assert list(stream.feed(b"x" * 1024)) == []
        assert len(stream._rest) <= MAX_LINE_BYTES
    assert list(stream.feed(b"\nloss 1\n")) == ["x" * MAX_LINE_BYTES, "loss 1"]


def test_the_line_of_nanogpt_is_progress() -> None:
    reader = progress(NANO)
    assert reader.read("step 0: train loss 10.9, val loss 10.9") is None
    assert reader.read("iter 120: loss 3.4000, time 250.12ms, mfu 12.00%") == Figures(
        120, 600, 3.4, None, {"ms": 250.12}
    )


def test_a_bar_and_a_line_without_steps_add_up() -> None:
    reader = progress(BAR, DICT, total=None)
    assert reader.read("{'loss': 2.5, 'epoch': 0.1}") is None, "no step is known yet"
    assert reader.read("10%|# | 10/90 [00:01<00:09, 9.1it/s]") == Figures(10, 90, 2.5, None, {})
    assert reader.read("{'loss': '1.5', 'grad_norm': '2.0'}") == Figures(10, 90, 1.5, None, {})


def test_all_rules_look_at_a_line_and_the_known_names_are_the_status_own() -> None:
    reader = progress(r"step (?P<step>\d+)", r"sps (?P<samplesPerSecond>\S+)")
    assert reader.read("step 3 sps 12.5") == Figures(3, 600, None, 12.5, {})


def test_a_group_that_is_left_out_says_nothing() -> None:
    reader = progress(r"step (?P<step>\d+)( loss (?P<loss>\S+))?")
    reader.read("step 1 loss 2.0")
    assert reader.read("step 2") == Figures(2, 600, 2.0, None, {})


@pytest.mark.parametrize(
    "line",
    [
        "iter x: loss 3, time 1ms",
        f"iter {'9' * 33}: loss 3, time 1ms",
        f"iter {2**53 + 1}: loss 3, time 1ms",
        "iter 601: loss 3, time 1ms",
        "iter -1: loss 3, time 1ms",
    ],
)
def test_a_step_that_cannot_be_is_passed_by(line: str) -> None:
    reader = progress(NANO.replace(r"\d+", ".+", 1))
    assert reader.read(line) is None
    found = reader.read("iter 5: loss 3, time 1ms")
    assert found.step == 5
    assert reader.read(line) is None, "its other numbers are none of the step before"


def test_a_loss_that_is_not_finite_takes_the_place_of_the_last_one() -> None:
    reader = progress(NANO)
    reader.read("iter 1: loss 3.0, time 1ms")
    found = reader.read("iter 2: loss nan, time 1ms")
    assert str(found.loss) == "nan", "a report leaves it out, as disttrain.report does"
    found = reader.read("iter 3: loss 1e9999, time 1ms")
    assert str(found.loss) == "nan", "what is no number says nothing"


def test_more_lines_than_a_second_has_room_for_are_passed_by() -> None:
    now = 0.0
    reader = progress(NANO, clock=lambda: now)
    for _ in range(LINES_PER_SECOND):
        assert reader.read("iter 1: loss 1, time 1ms") is not None
    assert reader.read("iter 2: loss 1, time 1ms") is None
    now = 1.0
    assert reader.read("iter 3: loss 1, time 1ms") is not None


def test_figures_are_as_many_as_a_report_holds() -> None:
    reader = progress("(?P<step>1)" + "".join(f"(?P<f{number}>.)" for number in range(65)))
    assert reader.read("1" * 66) is None
