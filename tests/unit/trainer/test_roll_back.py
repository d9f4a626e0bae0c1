"""`skipSteps.onMostInRow: RollBack`: the next attempt trains as if the samples that cannot be used were not there."""

from pathlib import Path
from typing import Any

import pytest

from disttrain_trainer.roll_back import MARK_FILE
from tests.unit.trainer.comparisons import require_same, require_same_bits
from tests.unit.trainer.layouts import LOCAL
from tests.unit.trainer.worlds import run_cases, small

DATA = ("spoilt_steps", "spoilt_rows")
# Steps 5 and 6 cannot be used, and the last checkpoint before them is that of step 3.
SPOILT = {"first": 5, "last": 6}


def training(data: str, on_most: str = "RollBack", **config: Any) -> dict[str, Any]:
    return small(
        data={"entrypoint": f"tests.unit.trainer.loading_code:{data}", "config": SPOILT | config},
        skipSteps={"mostInRow": 1, "onMostInRow": on_most},
        steps=7,
        checkpoint={"interval": 3, "asynchronous": False},
        logging={"interval": 1},
    )


def twice(case: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"training": case}, {"training": case}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    cases = {data: twice(training(data)) for data in DATA}
    # As if steps 4 to 6 had never had samples.
    cases |= {f"{data}, without": [{"training": training(data, passed_over=(3, 3))}] for data in DATA}
    cases["Fail"] = twice(training("spoilt_steps", "Fail"))
    early = {"first": 1, "last": 2}
    cases["no checkpoint"] = twice(training("spoilt_steps", **early))
    cases["no checkpoint, without"] = [{"training": training("spoilt_steps", **early, passed_over=(0, 2))}]
    # The second attempt takes the samples of steps 6 and 7 at steps 4 and 5, and skips these, too.
    cases["twice"] = [{"training": training("spoilt_steps", first=4, last=7) | {"steps": 5}}] * 3
    cases["a later checkpoint"] = [
        *twice(training("spoilt_steps") | {"steps": 6}),
        {"training": training("spoilt_steps")},
    ]
    at_once = {data: again_and_again(data) for data in DATA}
    cases |= {f"{data}, at once": [{"training": case}] * 4 for data, case in at_once.items()}
    cases["stopped"] = [*cases["spoilt_steps, at once"][:3], {"training": at_once["spoilt_steps"], "stop_after": 3}]
    cases["stopped"] += cases["spoilt_steps, at once"][:1]
    cases |= {f"{data}, at once, without": [{"training": again_and_again(data, passed_over=(1, 5))}] for data in DATA}
    cases |= {name: case(*given) for name, (given, _) in APART.items()}
    return run_cases(folder, 1, cases)


# What is spoilt, after which attempts stop, and how many checkpoints are kept -> where the attempts begin.
APART: dict[str, tuple[tuple[list[int], list[int | None], int], list[int]]] = {
    "another failure, long after a roll-back": (([2, 6], [None, 4, None, None], 3), [0, 1, 4, 4]),
    "a failure after a new checkpoint": (([4, 5, 8], [None, None, None, None], 3), [0, 3, 2, 4]),
    "no earlier checkpoint": (([4, 5], [None, None, None], 1), [0, 3, 3]),
}


def case(spoilt: list[int], stops: list[int | None], kept: int) -> list[dict[str, Any]]:
    given = again_and_again("spoilt_apart") | {"steps": 6}
    given["data"] = {"entrypoint": "tests.unit.trainer.loading_code:spoilt_apart", "config": {"steps": spoilt}}
    given["checkpoint"] = given["checkpoint"] | {"keepLatest": kept}
    # A stop comes after so many steps of its own.
    return [{"training": given} | ({} if stop is None else {"stop_after": stop - 1}) for stop in stops]


@pytest.mark.parametrize("name", APART)
def test_a_checkpoint_is_set_aside_only_where_nothing_was_gained_since_the_roll_back_to_it(
    alone: dict[str, dict[str, Any]], name: str
) -> None:
    assert [one.began for one in alone[name]["began"]] == APART[name][1]
    assert alone[name]["errors"][-1] is None
    assert alone[name]["report"].step == 6


def again_and_again(data: str, **config: Any) -> dict[str, Any]:
    """The samples of steps 4 to 6 cannot be used, and no such step is skipped."""
    case = training(data, first=4, last=6, **config) | {"steps": 5}
    case["skipSteps"] |= {"mostInRow": 0}
    return case | {"checkpoint": {"interval": 1, "asynchronous": False}}


@pytest.mark.parametrize("case", ["spoilt_steps, at once", "spoilt_rows, at once", "stopped"])
def test_an_attempt_that_fails_after_a_roll_back_is_followed_by_one_from_an_earlier_checkpoint(
    alone: dict[str, dict[str, Any]], case: str
) -> None:
    """After the first each attempt fails at the samples that it begins with; the fourth has only the checkpoint of
    step 1 before it, and then a checkpoint of its own."""
    *failed, last = (alone[case]["errors"][number] for number in (0, 1, 2, -1))
    begins = "NonFiniteLoss: the gradient of step {} is not used, whose "
    assert [one.startswith(begins.format(step)) for one, step in zip(failed, (4, 4, 3), strict=True)] == [True] * 3
    assert last is None
    assert (alone[case]["report"].step, alone[case]["report"].skipped_steps, alone[case]["report"].roll_backs) == (
        5,
        3,
        3,
    )
    first, *others = alone[case]["began"][:4]
    assert (first.began, first.skipped_steps, first.roll_backs) == (0, 0, None)
    found = [(one.began, one.skipped_steps, one.roll_backs) for one in others]
    assert found == [(3, 1, 1), (2, 2, 2), (1, 3, 3)], "who reads the counts sees none of them twice"
    data = "spoilt_rows" if "rows" in case else "spoilt_steps"
    require_same_bits(alone[case]["parameters"], alone[f"{data}, at once, without"]["parameters"])


@pytest.mark.parametrize("data", DATA)
def test_the_next_attempt_trains_as_if_the_samples_were_not_there(alone: dict[str, dict[str, Any]], data: str) -> None:
    first, second = alone[data]["errors"]
    assert first.startswith("NonFiniteLoss: 2 steps in a row have a gradient that is not used, the last of them step 6")
    assert "the next attempt passes over the samples up to this step, and should it fail, too, another one" in first
    assert second is None
    assert alone[data]["report"].step == 7
    require_same_bits(alone[data]["parameters"], alone[f"{data}, without"]["parameters"])


@pytest.mark.parametrize(
    ("case", "skipped"),
    [
        ("spoilt_steps", 2),
        ("no checkpoint", 2),
        # The attempt that resumes from it has counted them.
        ("a later checkpoint", 2),
        ("twice", 4),
        # Nothing is rolled back: the same steps come again.
        ("Fail", 1),
    ],
)
def test_steps_that_were_rolled_back_stay_counted(alone: dict[str, dict[str, Any]], case: str, skipped: int) -> None:
    assert alone[case]["report"].skipped_steps == skipped


def test_without_it_the_next_attempt_fails_at_the_same_step(alone: dict[str, dict[str, Any]], folder: Path) -> None:
    first, second = alone["Fail"]["errors"]
    assert first == second
    assert not (folder / "Fail" / "test" / MARK_FILE).exists()


def test_before_the_first_checkpoint_the_beginning_is_passed_over(alone: dict[str, dict[str, Any]]) -> None:
    first, second = alone["no checkpoint"]["errors"]
    assert first is not None
    assert second is None
    require_same_bits(alone["no checkpoint"]["parameters"], alone["no checkpoint, without"]["parameters"])


def test_a_checkpoint_behind_the_mark_is_resumed_as_it_is(alone: dict[str, dict[str, Any]]) -> None:
    """Red where samples are passed over once more."""
    assert alone["a later checkpoint"]["errors"][1:] == [None, None]
    require_same_bits(alone["a later checkpoint"]["parameters"], alone["spoilt_steps, without"]["parameters"])


def test_two_replicas_pass_over_the_same_samples(alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    summed, local = twice(training("spoilt_steps")), twice(training("spoilt_steps"))
    local = [one | {"parallelism": LOCAL} for one in local]
    for result in run_cases(tmp_path, 2, {"summed": summed, "alone": local}).values():
        assert result["errors"][1] is None
        require_same(result["parameters"], alone["spoilt_steps"]["parameters"])


def test_what_is_no_mark_of_the_job_is_passed_by(alone: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    texts = ["", "[]", "{", '{"uid": "another", "step": 6, "epoch": 0, "position": 144}', "9" * 5000]
    for number, text in enumerate(texts):
        place = tmp_path / str(number) / "test"
        place.mkdir(parents=True)
        (place / MARK_FILE).write_text(text)
    case = [{"training": training("spoilt_steps", passed_over=(3, 3))}]
    found = run_cases(tmp_path, 1, {str(number): case for number in range(len(texts))})
    for result in found.values():
        require_same_bits(result["parameters"], alone["spoilt_steps, without"]["parameters"])
