"""The cost models of `disttrain plan`, and what they are given."""

import json
from pathlib import Path

import pytest

from disttrain.errors import CommandError
from disttrain.planning.cost import (
    Bubble,
    Link,
    Machine,
    Message,
    ServerTraffic,
    StepWork,
    bubble_of_equal_stages,
    bubble_seconds,
    central_servers,
    ring_all_reduce,
    step_time,
    variance_of_mean,
)
from disttrain.planning.machine import Given, links_of, machine_of
from disttrain.views.step import formulas, sent_rows, time_rows
from disttrain_api import manifest
from disttrain_api.collectives import Operation
from disttrain_trainer.checks.collectives.results import Row, to_json
from disttrain_trainer.collectives.schedules import central, ring
from disttrain_trainer.parallel.pipeline.schedule import _fill_and_drain
from disttrain_trainer.parallel.pipeline.simulate import Kind, idle_part

EXAMPLES = Path(__file__).parents[3] / "examples"
LINK = Link(bandwidth=1e9, latency=1e-3)
MACHINE = Machine(flops=1e9, link=LINK)


def message(operation: str = "all-reduce", axis: str = "replicate", ranks: int = 4, **changes: float) -> Message:
    given = {"within_pod": False, "calls": 1, "bytes": 8e6} | changes
    return Message(Operation(operation), axis, ranks, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("operation", "ranks", "wire", "rounds"),
    [
        ("all-reduce", 2, 8e6, 2),
        ("all-reduce", 4, 12e6, 6),
        ("all-gather", 4, 6e6, 3),
        ("reduce-scatter", 8, 7e6, 7),
        ("all-to-all", 2, 4e6, 1),
        ("broadcast", 8, 8e6, 3),
        ("send-recv", 2, 8e6, 1),
    ],
)
def test_a_message_takes_its_bytes_and_its_rounds(operation: str, ranks: int, wire: float, rounds: int) -> None:
    one = message(operation, ranks=ranks)
    assert (one.wire_bytes, one.rounds) == (wire, rounds)
    (_, took) = step_time(StepWork(0, [one]), MACHINE).messages[0]
    assert took == pytest.approx(wire / 1e9 + rounds * 1e-3)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_a_ring_takes_what_its_schedule_sends(ranks: int) -> None:
    numbers = 24_000
    planned = ring(ranks)
    sent = planned.sent(0, numbers, 4)
    assert ring_all_reduce(ranks, 4 * numbers, LINK) == pytest.approx(LINK.seconds(sent, len(planned.rounds)))


@pytest.mark.parametrize("workers", [2, 5])
def test_a_central_server_is_as_busy_as_the_middle_of_a_central_all_reduce(workers: int) -> None:
    numbers = 1000
    # The schedule's middle is a rank itself.
    busiest = central(workers + 1).received(0, numbers, 4)
    assert central_servers(workers, 1, 4 * numbers, LINK) == pytest.approx(2 * LINK.seconds(busiest, workers))
    # With as many servers as workers each end carries one worker's bytes.
    assert central_servers(workers, workers, 4 * numbers, LINK) == pytest.approx(2 * LINK.seconds(4 * numbers, 1))


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (4, 8), (4, 1)])
def test_the_bubble_of_equal_stages_is_that_of_their_schedule(ranks: int, count: int) -> None:
    seconds = {(kind, stage): 2.0 if kind is Kind.BACKWARD else 1.0 for kind in Kind for stage in range(ranks)}
    for name in ("GPipe", "1F1B"):
        table = {rank: _fill_and_drain(name, rank, ranks, count) for rank in range(ranks)}  # type: ignore[arg-type]
        assert bubble_of_equal_stages(ranks, count) == pytest.approx(idle_part(table, seconds))


def test_a_bubble_is_a_part_of_the_whole_step() -> None:
    assert bubble_seconds(3.0, Bubble(2, 2, "1F1B", 0.25)) == pytest.approx(1.0)
    assert bubble_seconds(3.0, None) == 0


def test_the_mean_of_independent_updates_varies_less() -> None:
    assert variance_of_mean(8) == 0.125


def test_what_averages_now_and_then_counts_by_its_share() -> None:
    time = step_time(StepWork(1e9, [message(every=8)]), MACHINE)
    assert time.total == pytest.approx(1 + (12e6 / 1e9 + 6e-3) / 8)
    # All wait for it: it comes after the update.
    assert step_time(StepWork(1e9, [message(every=8)]), Machine(1e9, LINK, overlaps=True)).hidden == 0


def test_accelerators_send_what_replicas_sum_while_they_compute_and_the_rest_is_waited_for() -> None:
    sums, layers = message(), message(axis="tensor")
    alone = step_time(StepWork(0, [sums]), MACHINE).total
    overlapping = Machine(1e9, LINK, overlaps=True)
    assert step_time(StepWork(1e9, [sums, layers]), overlapping).total == pytest.approx(1 + alone)
    assert step_time(StepWork(1e9, [sums, layers]), MACHINE).total == pytest.approx(1 + 2 * alone)
    # No more than the backward pass takes.
    assert step_time(StepWork(0.003e9, [sums]), overlapping).hidden == pytest.approx(0.002)


def test_ranks_of_a_pod_have_their_own_link() -> None:
    machine = Machine(1e9, LINK, pod_link=Link(1e12, 0))
    assert machine.link_of(message(within_pod=True)).bandwidth == 1e12
    assert machine.link_of(message()) is LINK
    with pytest.raises(ValueError, match="the bandwidth of all-reduce is not known"):
        Machine(1e9).link_of(message())


def measured(operation: Operation, size: int, link: Link, ranks: int = 4) -> Row:
    one = Message(operation, "world", ranks, False, 1, size)
    return Row("world", tuple(range(ranks)), operation, size, link.seconds(one.wire_bytes, one.rounds), 0, ())


def test_links_are_those_that_were_measured() -> None:
    slow = Link(2e8, 5e-5)
    rows = [
        measured(operation, size, link)
        for operation, link in ((Operation.ALL_REDUCE, LINK), (Operation.SEND_RECV, slow))
        for size in (2**10, 2**20, 2**24)
    ]
    found = links_of(rows)
    for operation, link in ((Operation.ALL_REDUCE, LINK), (Operation.SEND_RECV, slow)):
        assert found[operation].bandwidth == pytest.approx(link.bandwidth)
        assert found[operation].latency == pytest.approx(link.latency)
    assert links_of([rows[0]]) == {}


def test_a_machine_is_what_the_options_say(tmp_path: Path) -> None:
    spec = manifest.load(EXAMPLES / "ddp.yaml").spec
    found = machine_of(Given(flops="2T", bandwidth="10G", pod_bandwidth="100G", latency=5), spec)
    assert found == Machine(2e12, Link(1e10, 5e-6), {}, Link(1e11, 5e-6), overlaps=False)
    h100 = machine_of(Given(accelerator="h100", bandwidth="10G"), spec)
    assert (h100.flops, h100.overlaps) == (pytest.approx(0.4 * 66.9e12), True)
    file = tmp_path / "collectives.json"
    file.write_text(to_json([measured(Operation.ALL_GATHER, size, LINK) for size in (2**10, 2**24)]))
    by_file = machine_of(Given(flops="1T", collectives=str(file)), spec)
    assert by_file.link_of(message("all-gather")).bandwidth == pytest.approx(1e9)
    # What was not measured is as fast as what was.
    assert by_file.link_of(message("all-reduce")).bandwidth == pytest.approx(1e9)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (Given(flops="1T"), "needs what the network does: give --bandwidth"),
        (Given(flops="1T", bandwidth="fast"), "--bandwidth: found 'fast', expected a quantity such as 12.5G"),
        (Given(flops="0", bandwidth="1G"), "--flops: found '0', expected more than 0"),
        (Given(accelerator="H1", bandwidth="1G"), "--accelerator: found 'H1', expected one of A100-40GB, A100"),
        (Given(flops="1T", bandwidth="1G", latency=-1), "--latency: found -1, expected microseconds, 0 or more"),
        (Given(flops="1T", collectives="/nowhere"), "--collectives: /nowhere cannot be read: No such file"),
        (
            Given(flops="1T", collectives=str(EXAMPLES / "ddp.yaml")),
            "is not the output of disttrain collectives --json",
        ),
    ],
)
def test_what_is_missing_or_wrong_is_a_sentence(given: Given, sentence: str) -> None:
    with pytest.raises(CommandError) as error:
        machine_of(given, manifest.load(EXAMPLES / "ddp.yaml").spec)
    assert sentence in str(error.value)


def test_one_size_is_not_enough(tmp_path: Path) -> None:
    file = tmp_path / "collectives.json"
    file.write_text(json.dumps([]))
    with pytest.raises(CommandError, match="has no operation in two sizes"):
        machine_of(Given(flops="1T", collectives=str(file)), manifest.load(EXAMPLES / "ddp.yaml").spec)


def test_a_job_with_gpus_needs_to_know_them() -> None:
    spec = manifest.load(EXAMPLES / "ddp.yaml").spec
    workers = spec.workers.model_copy(update={"gpus_per_pod": 1})
    with pytest.raises(CommandError, match="give --accelerator H100, or --flops 400T"):
        machine_of(Given(bandwidth="1G"), spec.model_copy(update={"workers": workers}))


def test_rows_have_the_numbers_put_in() -> None:
    work = StepWork(2e9, [message(calls=3)], Bubble(2, 4, "1F1B", 0.2))
    rows = time_rows(work, step_time(work, MACHINE), MACHINE)
    assert rows[0] == ["compute", "2", "2e+09 FLOP / 1e+09 FLOP/s"]
    assert rows[1] == ["bubble", "0.5", "1F1B: 20.0 % of a rank's time"]
    assert rows[2] == ["all-reduce, replicate", "0.03", "2(n-1)/n x 8 MiB / 1 GB/s, n = 4 + 18 x 1e+03 us"]
    assert rows[-1][:2] == ["step", "2.53"]
    assert sent_rows(work) == [["all-reduce", "replicate", "4", "3", "8 MiB", "11 MiB"]]
    assert sent_rows(StepWork(0, [message(every=8)]))[0][0] == "all-reduce, every 8 steps"


def test_only_the_strategy_of_the_job_has_a_formula() -> None:
    def said(example: str, work: StepWork | None = None) -> str:
        return " ".join(formulas(manifest.load(EXAMPLES / f"{example}.yaml").spec, work, MACHINE, 10**9))

    assert said("ddp") == (
        "Mean: 1/M x the sum of M = 2 replicas' gradients. Its variance is 1/M = 0.5 of that of one."
    )
    pipeline = said("pipeline", StepWork(1, [], Bubble(2, 4, "1F1B", 0.2)))
    assert pipeline == "Bubble: (p-1)/(m+p-1) = (2-1)/(4+2-1) = 20.0 %."
    assert "M = 2 replicas' updates. Its variance is 1/M = 0.5" in said("local-sgd")
    assert "M = 2 replicas' gradients" in said("worker-groups")
    servers = said("parameter-server")
    assert "Mean" not in servers, "each push is an update"
    assert "Each of 2 workers pushes 954 MiB and pulls 954 MiB in a step." in servers
    assert "That takes 2" in servers
    # What was counted comes before what the manifest says.
    counted = said("parameter-server", StepWork(1, servers=ServerTraffic(2, 1, 2**20, 2**21)))
    assert "pushes 1 MiB and pulls 2 MiB in a step. The busier end, of a worker or of one of 1 servers, " in counted
    assert "carries up to 4 MiB each way. That takes 0.0103 s" in counted


def test_a_sum_of_gradients_is_shown_in_a_ring_and_through_a_server() -> None:
    work = StepWork(1, [message(bytes=16e6, calls=2), message(axis="tensor"), message(every=8)])
    (found,) = (
        one for one in formulas(manifest.load(EXAMPLES / "ddp.yaml").spec, work, MACHINE, None) if "ring" in one
    )
    # Two calls of 8 MB each over four ranks of 1 GB/s, and a millisecond for each message.
    assert f"= {2 * (1.5 * 0.008 + 6 * 0.001):.3g} s, n = 4, size = 8 MiB, 2 calls" in found
    assert f"= {2 * (2 * 4 * (0.008 + 0.001)):.3g} s." in found


def test_pushes_and_pulls_take_time() -> None:
    work = StepWork(1e9, servers=ServerTraffic(workers=4, servers=2, pushed=1e6, pulled=8e6))
    time = step_time(work, MACHINE)
    # Each server carries what two workers push and pull.
    assert time.servers == pytest.approx(2 * (1e6 + 8e6) / 1e9 + 2 * 2e-3)
    assert time.total == pytest.approx(1 + time.servers)
    assert time_rows(work, time, MACHINE)[1][:2] == ["push and pull", "0.022"]
    assert [row[0] for row in sent_rows(work)] == ["push", "pull"]
    with pytest.raises(ValueError, match="between workers and servers is not known"):
        step_time(work, Machine(1e9))
