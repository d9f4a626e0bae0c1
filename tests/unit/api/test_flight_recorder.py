"""The last collective calls of a rank are read within bounds, whatever a pod writes."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.flight_recorder import HEADER, MAX_BYTES, Collective, collectives_below, collectives_in, lines_of
from disttrain_api.stacks import STOPPED, main_thread, main_thread_first, with_collectives, without_collectives

MAIN = 'Current thread 0x1 (most recent call first):\n  File "/a.py", line 3 in f'
OTHER = 'Thread 0x2 (most recent call first):\n  File "/b.py", line 1 in other'


def entry(number: int, *, done: bool = True, group: str = "0", name: str = "gloo:all_reduce") -> dict[str, Any]:
    """What torch 2.13 records of a call, as far as it is read."""
    return {
        "collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "input_sizes": [[8, 2]], "retired": done,
        "process_group": [group, "default_pg" if group == "0" else "undefined"], "profiling_name": name,
        "state": "scheduled",
    }  # fmt: skip


def dump(*entries: Any) -> str:
    return json.dumps({"version": "2.10", "entries": list(entries)})


def test_the_last_calls_of_each_group_and_the_first_that_is_not_done_are_kept() -> None:
    found = collectives_in(
        dump(*(entry(number, done=number not in (3, 9)) for number in range(1, 10)), entry(1, group="mesh/dp"))
    )
    assert [(one.group, one.number, one.pending) for one in found] == [
        ("0", 3, True), ("0", 6, False), ("0", 7, False), ("0", 8, False), ("0", 9, True), ("mesh_dp", 1, False)
    ]  # fmt: skip
    assert lines_of(found).splitlines()[1] == "  group 0 (default_pg), call 3: gloo:all_reduce of 8x2, pending"
    assert lines_of(found).splitlines()[-1] == "  group mesh_dp, call 1: gloo:all_reduce of 8x2, done"
    assert collectives_below(lines_of(found)) == found


def test_a_call_that_a_device_has_done_is_not_pending_and_backends_are_counted_apart() -> None:
    nccl = entry(9, done=False, name="nccl:all_reduce") | {"state": "completed"}
    found = collectives_in(dump(nccl, entry(4, done=False)))
    assert [(one.counted, one.pending) for one in found] == [
        (("0", "nccl", False), False), (("0", "gloo", False), True)
    ]  # fmt: skip


@pytest.mark.parametrize(
    "odd",
    [
        {"collective_seq_id": True}, {"collective_seq_id": -1}, {"collective_seq_id": 10**30}, {"process_group": "0"},
        {"process_group": ["", ""]}, {"profiling_name": ""}, {"input_sizes": [["x"]]}, {"input_sizes": 3},
    ],
    ids=str,
)  # fmt: skip
def test_an_odd_call_is_left_out(odd: dict[str, Any]) -> None:
    assert [one.number for one in collectives_in(dump(entry(1) | odd, 7, None, entry(2)))] == [2]


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "7", '{"entries": 3}', "{}", "[" * 10**5])
def test_what_is_no_record_has_no_calls(text: str) -> None:
    assert collectives_in(text) == []


def test_whatever_ranks_record_is_written_in_few_lines_that_can_be_read() -> None:
    many = (entry(number, done=False, group=f"{'g' * 40}{number % 20}\n") for number in range(2000))
    found = collectives_in(dump(*many))
    text = lines_of(found)
    assert len(found) <= 40
    assert len(text) < MAX_BYTES
    assert collectives_below(text) == found


def test_of_many_groups_those_are_kept_in_which_a_rank_waits() -> None:
    found = collectives_in(dump(entry(1, done=False, group="first"), *(entry(1, group=f"{at}") for at in range(90))))
    assert found[0].group == "first"
    shown = collectives_below(main_thread(with_collectives(MAIN, found), 1))
    assert [one.group for one in shown] == ["first", "87", "88", "89"]


@given(st.text(), st.text(max_size=40))
def test_any_text_below_stacks_is_bounded_and_holds_no_frames(text: str, name: str) -> None:
    shown = main_thread(f"{MAIN}\n\n{lines_of([Collective('0', '', 1, 'x', '', pending=True)])}\n{name}\n{text}", 1)
    assert shown.startswith(f"{MAIN}\n\n")
    assert 'File "' not in shown.partition("\n\n")[2]
    assert len(shown) < MAX_BYTES


def test_the_main_thread_keeps_where_each_group_is_and_the_calls_stay_last() -> None:
    calls = collectives_in(dump(*(entry(number, done=number != 7) for number in range(1, 10))))
    text = with_collectives(f"{OTHER}\n\n{MAIN}\n", calls)
    shown = main_thread(text, 8)
    assert shown.startswith(MAIN)
    assert [(one.number, one.pending) for one in collectives_below(shown)] == [(7, True), (9, False)]
    assert main_thread_first(text).startswith(MAIN)
    assert collectives_below(main_thread_first(text)) == calls
    assert without_collectives({"0": shown, "1": STOPPED}) == {"0": MAIN, "1": STOPPED}
    assert with_collectives(STOPPED, []) == STOPPED


def test_lines_of_another_form_and_texts_beyond_the_bound_have_no_calls() -> None:
    line = lines_of([Collective("0", "", 4, "x", "", pending=True)]).splitlines()[1]
    odd = [f"{line}\x1b[31m", f" {line}", line.replace("4", "٤"), line.replace("pending", "lost"), f"{line}\r"]
    assert [one.number for one in collectives_below("\n".join([HEADER, *odd, line]))] == [4]
    assert len(collectives_below("\n".join([HEADER, *odd]))) == 0
    assert collectives_below("\n".join([HEADER, *[line] * MAX_BYTES])) == []
