"""The check of collectives: what it expects, what it finds, what it tells."""

import argparse
from pathlib import Path

import pytest
import torch

from disttrain_api.collectives import bus_factor
from disttrain_api.names import Env, ExitCode
from disttrain_api.report import decode_pod_report
from disttrain_trainer.checks.collectives.__main__ import leave
from disttrain_trainer.checks.collectives.expected import PRIME, expected, given
from disttrain_trainer.checks.collectives.plan import (
    NumberFormat,
    Operation,
    Plan,
    add_arguments,
    arguments_of,
    group_ranks,
    parse_size,
    plan_of,
)
from disttrain_trainer.checks.collectives.results import Row, from_json, tables, to_json, verdict
from disttrain_trainer.runtime.errors import PeerLost, describe
from tests.unit.trainer.collectives_rank import PLAN
from tests.unit.trainer.worlds import run_ranks


def mpi(operation: Operation, given: list[list[int] | None]) -> list[list[int] | None]:
    """What MPI says that each rank holds, from what all ranks give; root and ring as in the check."""
    ranks = range(len(given))
    nothing = [None] * (len(given) - 1)

    def block(values: list[int], rank: int) -> list[int]:
        size = len(values) // len(given)
        return values[rank * size : (rank + 1) * size]

    total = [sum(column) for column in zip(*(one for one in given if one), strict=True)]
    everything = [value for one in given if one for value in one]
    return {
        Operation.BROADCAST: lambda: [given[0]] * len(given),
        Operation.SCATTER: lambda: [block(given[0], rank) for rank in ranks],
        Operation.GATHER: lambda: [everything, *nothing],
        Operation.ALL_GATHER: lambda: [everything] * len(given),
        Operation.REDUCE: lambda: [total, *nothing],
        Operation.ALL_REDUCE: lambda: [total] * len(given),
        Operation.REDUCE_SCATTER: lambda: [block(total, rank) for rank in ranks],
        Operation.ALL_TO_ALL: lambda: [[value for one in given for value in block(one, rank)] for rank in ranks],
        Operation.SEND_RECV: lambda: [given[rank - 1] for rank in ranks],
    }[operation]()


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("operation", Operation)
def test_what_is_expected_is_what_mpi_says(operation: Operation, ranks: int) -> None:
    numbers = 4 * ranks
    gives = [given(operation, rank, ranks, numbers, torch.int64) for rank in range(ranks)]
    must = mpi(operation, [None if one is None else one.tolist() for one in gives])
    for rank in range(ranks):
        found = expected(operation, rank, ranks, numbers, torch.int64)
        assert (None if found is None else found.tolist()) == must[rank]


def test_no_two_ranks_and_no_two_neighbours_give_the_same() -> None:
    values = torch.stack([given(Operation.ALL_REDUCE, rank, 8, 2 * PRIME, torch.int64) for rank in range(8)])
    assert not (values[:, 1:] == values[:, :-1]).any()
    assert all(len(set(column.tolist())) == 8 for column in values.T[:PRIME])


@pytest.mark.parametrize(
    ("operation", "factor"),
    [
        (Operation.ALL_REDUCE, 1.5),
        (Operation.ALL_GATHER, 0.75),
        (Operation.REDUCE_SCATTER, 0.75),
        (Operation.ALL_TO_ALL, 0.75),
        (Operation.GATHER, 0.75),
        (Operation.SCATTER, 0.75),
        (Operation.BROADCAST, 1),
        (Operation.REDUCE, 1),
        (Operation.SEND_RECV, 1),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(operation: Operation, factor: float) -> None:
    assert bus_factor(operation, 4) == factor


def a_row(**changes: object) -> Row:
    values = {
        "group": "world",
        "ranks": (0, 1, 2, 3),
        "operation": Operation.ALL_REDUCE,
        "bytes": 2_000_000,
        "seconds": 0.001,
        "wrong": 0,
        "wrong_ranks": (),
    }
    return Row(**{**values, **changes})


def test_a_table_names_what_is_wrong_and_where() -> None:
    rows = [a_row(), a_row(operation=Operation.SEND_RECV, wrong=3, wrong_ranks=(1, 3)), a_row(bytes=4_000_000)]
    text = tables(rows)
    assert text.splitlines() == [
        "# world: ranks 0-3, 2000000 bytes",
        "operation           time(us)  algbw(GB/s)  busbw(GB/s)   wrong",
        "all-reduce            1000.0        2.000        3.000       0",
        "send-recv             1000.0        2.000        2.000       3  on ranks 1,3",
        "",
        "# world: ranks 0-3, 4000000 bytes",
        "operation           time(us)  algbw(GB/s)  busbw(GB/s)   wrong",
        "all-reduce            1000.0        4.000        6.000       0",
    ]
    assert verdict(rows) == "3 checks, 1 with wrong elements"
    assert from_json(to_json(rows)) == rows


@pytest.mark.parametrize(
    ("text", "size"), [("512", 512), ("64Ki", 65536), ("1Mi", 2**20), ("2G", 2_000_000_000), ("3k", 3000)]
)
def test_sizes_have_the_units_of_kubernetes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "1KB", "-1", "0", "1.5Mi", "Mi"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size: expected bytes such as"):
        parse_size(text)


@pytest.mark.parametrize(
    ("text", "ranks"),
    [("world", tuple(range(8))), ("::2", (0, 2, 4, 6)), ("4:8", (4, 5, 6, 7)), ("7+0", (0, 7)), ("1::3", (1, 4, 7))],
)
def test_groups(text: str, ranks: tuple[int, ...]) -> None:
    assert group_ranks(text, 8) == ranks


@pytest.mark.parametrize("text", ["0+8", "3", "3+3", "7:", "hosts", "::0"])
def test_what_is_no_group_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected"):
        group_ranks(text, 8)


@pytest.mark.parametrize("size", [1, 8, 100, 4096])
@pytest.mark.parametrize("ranks", [2, 3, 7])
def test_buffers_are_cut_into_equal_blocks(size: int, ranks: int) -> None:
    numbers = Plan(number_format=NumberFormat.FLOAT64).numbers(size, ranks)
    assert numbers % ranks == 0
    assert numbers == ranks or 8 * numbers <= size < 8 * (numbers + ranks)


def test_a_plan_survives_its_words() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert plan_of(parser.parse_args(arguments_of(PLAN))) == PLAN
    assert plan_of(parser.parse_args([])) == Plan()


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return rows_of(tmp_path_factory.mktemp("right"), 0)


def rows_of(folder: Path, code: int, **environment: str) -> list[Row]:
    results = folder / "results.json"
    module = "tests.unit.trainer.collectives_rank"
    ended = run_ranks(folder, None, 4, module=module, RESULTS=str(results), **environment)
    assert [rank.code for rank in ended] == [code] * 4, "\n".join(rank.err for rank in ended)
    rows = from_json(results.read_text())
    assert ended[0].out == f"{''.join(tables(some) + chr(10) for some in by_group(rows))}{verdict(rows)}\n"
    return rows


def by_group(rows: list[Row]) -> list[list[Row]]:
    return [[row for row in rows if row.group == name] for name in PLAN.groups]


def test_every_collective_is_right_in_every_group(right: list[Row]) -> None:
    asked = [
        (group, operation, size)
        for group, ranks in (("world", 4), ("::2", 2), ("3+1+2", 3))
        for size in (PLAN.numbers(64, ranks) * 4, PLAN.numbers(4096, ranks) * 4)
        for operation in Operation
    ]
    assert [(row.group, row.operation, row.bytes) for row in right] == asked
    assert [row for row in right if row.wrong] == []
    assert all(row.seconds > 0 for row in right)


def test_a_rank_that_sends_wrong_data_is_found_wherever_its_data_go(tmp_path: Path) -> None:
    """Rank 2 changes one element, the fourth; blocks of the world are of 4 and of 256 elements."""
    rows = [row for row in rows_of(tmp_path, 1, CORRUPT="2") if row.group == "world"]
    wrong = {(row.operation, row.bytes): (row.wrong, row.wrong_ranks) for row in rows}
    everywhere = {Operation.ALL_REDUCE, Operation.ALL_GATHER}
    at_root = {Operation.GATHER, Operation.REDUCE, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL}
    for operation in Operation:
        expected_ = (0, ())
        if operation in everywhere:
            expected_ = (4, (0, 1, 2, 3))
        elif operation in at_root:
            expected_ = (1, (0,))
        elif operation is Operation.SEND_RECV:
            expected_ = (1, (3,))
        assert wrong[operation, 64] == wrong[operation, 4096] == expected_, operation


def failures(folder: Path, logs: str) -> list[tuple[int, int | None, str | None]]:
    """What the termination messages say of four ranks, of which rank 1 fails: `logs` is a name with a {} for the rank,
    or that of one pod."""
    variables = {"RESULTS": str(folder / "results"), "FAILING": "1", "LOGS": str(folder / logs), Env.JOB_UID: "uid"}
    ended = run_ranks(folder, None, 4, module="tests.unit.trainer.collectives_rank", **variables)
    assert [rank.code for rank in ended] == [1] * 4
    reports = [decode_pod_report(log.read_text()) for log in sorted(folder.glob("log*"))]
    found = [one.failure for one in reports if one is not None and one.failure is not None]
    return [(failure.rank, failure.exit_code, failure.message) for failure in found]


def test_a_rank_that_only_loses_another_says_so(tmp_path: Path) -> None:
    """Who ends first is no sign of the cause: the operator tells a symptom by what its pod has left."""
    first, second, *others = failures(tmp_path, "log-{}")
    assert second == (1, 1, "RuntimeError: no memory is left")
    assert [one[:2] for one in (first, *others)] == [(rank, ExitCode.PEER_LOST) for rank in (0, 2, 3)]


def test_a_cause_takes_the_place_of_a_symptom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    monkeypatch.setenv(Env.TERMINATION_LOG, str(log))
    lost, failed = describe(PeerLost("another rank is gone")), describe(RuntimeError("no memory is left"))
    leave(0, lost)
    assert not log.exists(), "it runs in no pod"
    monkeypatch.setenv(Env.JOB_UID, "uid")
    for rank, why, reports in ((0, lost, 0), (1, failed, 1), (2, lost, 1)):
        leave(rank, why)
        report = decode_pod_report(log.read_text())
        assert report.failure.rank == reports
