"""The network check before training: whom ranks meet, whom results blame, and what a faulty node does to a job."""

from itertools import combinations
from pathlib import Path

import pytest

from disttrain_api.names import ExitCode
from disttrain_trainer.checks.preflight.check import refuse_silent, refuse_wrong, slow_node_message
from disttrain_trainer.checks.preflight.judge import SLOW_FACTOR, SlowNode, Transfer, faulty_nodes, rounds, slow_nodes
from disttrain_trainer.runtime.errors import NetworkFaulty, PeerLost
from tests.unit.trainer.worlds import Ended, job, run_ranks, small


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 9, 16])
def test_everybody_meets_everybody_once(ranks: int) -> None:
    met = []
    for partners in rounds(ranks):
        assert all(partner is None or partners[partner] == rank for rank, partner in enumerate(partners))
        assert partners.count(None) == ranks % 2
        met += [(rank, partner) for rank, partner in enumerate(partners) if partner is not None and rank < partner]
    assert sorted(met) == list(combinations(range(ranks), 2))


@pytest.mark.parametrize("ranks", [100, 1001])
def test_of_many_ranks_each_meets_some(ranks: int) -> None:
    found = rounds(ranks, most=6)
    assert len(found) == 6
    for rank in range(ranks):
        partners = [partners[rank] for partners in found if partners[rank] is not None]
        assert len(set(partners)) == len(partners) >= 5
        assert rank not in partners


NODES = ["a", "a", "b", "b", "c", "c", "d", "d"]


def transfers(*wrong: tuple[int, int]) -> list[Transfer]:
    """All transfers between 8 ranks, the named ones wrong."""
    pairs = [(sender, receiver) for sender in range(8) for receiver in range(8) if sender != receiver]
    return [Transfer(*pair, wrong=5 if pair in wrong else 0, bandwidth=1e9) for pair in pairs]


@pytest.mark.parametrize(
    ("wrong", "blamed"),
    [
        ([], []),
        ([(3, other) for other in (0, 1, 2, 4, 5, 6, 7)], ["b"]),
        ([(other, 3) for other in (0, 4, 6)], ["b"]),
        ([(2, 3)], ["b"]),
        ([(0, 7)], ["a", "d"]),
        ([(rank, other) for rank in (2, 6) for other in range(8) if other != rank], ["b", "d"]),
        ([(2, 0), (2, 4), (2, 6), (5, 7)], ["b", "c", "d"]),
    ],
    ids=["nothing", "sends", "receives", "within", "one link", "two nodes", "a node and a link"],
)
def test_the_fewest_nodes_that_explain_it_are_blamed(wrong: list[tuple[int, int]], blamed: list[str]) -> None:
    assert faulty_nodes(transfers(*wrong), NODES) == blamed


def speeds(slow: dict[frozenset[str], float], nodes: list[str]) -> list[Transfer]:
    """Transfers between all ranks at 1 GB/s, but where `slow` says otherwise for a pair of nodes."""
    return [
        Transfer(sender, receiver, 0, slow.get(frozenset((nodes[sender], nodes[receiver])), 1e9))
        for sender in range(len(nodes))
        for receiver in range(len(nodes))
        if sender != receiver
    ]


def links(node: str, speed: float) -> dict[frozenset[str], float]:
    return {frozenset((node, other)): speed for other in "abcd" if other != node}


def test_a_node_far_below_the_others_is_slow() -> None:
    (found,) = slow_nodes(speeds(links("c", 0.2e9), NODES), NODES)
    assert (found.name, found.bandwidth, found.others) == ("c", 0.2e9, 1e9)


AB, WITHIN_A = frozenset("ab"), frozenset("a")


@pytest.mark.parametrize(
    ("slow", "nodes", "named"),
    [
        (links("c", 1.01e9 / SLOW_FACTOR), NODES, []),
        (links("c", 0.99e9 / SLOW_FACTOR), NODES, ["c"]),
        ({AB: 1e6}, NODES, []),
        ({AB: 1e6}, ["a", "b", "c"], []),
        (links("b", 1e8), ["a", "b", "c"], ["b"]),
        ({WITHIN_A: 1e3}, ["a", "a", "b", "b", "c", "c"], []),
        ({WITHIN_A: 1e3}, ["a", "a"], []),
        ({AB: 1.0}, ["a", "b"], []),
    ],
    ids=["within", "beyond", "a link", "a link of three", "of three", "within a node", "one node", "of two"],
)
def test_a_node_is_slow_by_all_its_links(slow: dict[frozenset[str], float], nodes: list[str], named: list[str]) -> None:
    assert [found.name for found in slow_nodes(speeds(slow, nodes), nodes)] == named


def test_a_slow_node_is_reported_with_the_limit() -> None:
    assert slow_node_message(SlowNode("n7", 0.2e9, 1e9)) == (
        "preflight: node n7 is slow: 0.200 GB/s with other nodes, less than 1/3 of the others' 1.000 GB/s;"
        " every step will wait for it"
    )


def test_ranks_of_the_faulty_node_fail_and_the_others_say_that_they_lost_a_peer() -> None:
    wrong = transfers(*((3, other) for other in (0, 1, 4, 6)))
    message = (
        "preflight: node b (ranks 2-3): data do not arrive as they were sent (rank 3 to 0, rank 3 to 1, rank 3 to 4"
        " and 1 more); keep the job off this node"
    )
    for rank, node in enumerate(NODES):
        with pytest.raises(NetworkFaulty if node == "b" else PeerLost) as ended:
            refuse_wrong(wrong, [9] * 8, NODES, rank)
        assert str(ended.value).startswith(message)
        assert ended.value.on_every_rank
    refuse_wrong(transfers(), [0] * 8, NODES, 0)


@pytest.mark.parametrize(
    ("sums", "who"),
    [([0, 0, 0, 0, 0, 0, 2, 0], "node d (ranks 6-7): all-reduce"), ([3] * 8, "node a (ranks 0-1) and node b ")],
)
def test_a_wrong_sum_alone_names_who_holds_it(sums: list[int], who: str) -> None:
    with pytest.raises((NetworkFaulty, PeerLost), match="although data arrive as they were sent") as ended:
        refuse_wrong(transfers(), sums, NODES, 0)
    assert str(ended.value).startswith(f"preflight: {who}")


def run(folder: Path, wrong: str, ranks: int = 3, **environment: str) -> list[Ended]:
    """A short job, each rank on a node of its own; rank 1 corrupts what `wrong` names."""
    module = "tests.unit.trainer.corrupt_trainer"
    return run_ranks(folder, job(small(preflight=True)), ranks, module=module, WRONG=wrong, **environment)


def test_a_sound_network_is_reported_in_one_line_and_the_job_trains(tmp_path: Path) -> None:
    ended = run(tmp_path, "nothing")
    assert [rank.code for rank in ended] == [0, 0, 0], ended[0].err
    lines = [line for line in ended[0].out.splitlines() if line.startswith("preflight: data")]
    assert len(lines) == 1
    assert lines[0].startswith("preflight: data are right between 3 ranks on 3 nodes (")
    assert ended[0].report.done


def test_a_node_that_keeps_the_others_waiting_is_reported_and_the_job_trains(tmp_path: Path) -> None:
    ended = run(tmp_path, "pace")
    assert [rank.code for rank in ended] == [0, 0, 0], ended[0].err
    # A machine with much else to do may say the same of the others.
    slow = [line for line in ended[0].out.splitlines() if line.startswith("preflight: node node-1")]
    assert len(slow) == 1
    assert slow[0].startswith("preflight: node node-1 is slow: 0.00")


def test_a_lone_rank_says_that_there_is_nothing_to_check(tmp_path: Path) -> None:
    (alone,) = run(tmp_path, "nothing", ranks=1)
    assert alone.code == 0
    assert "preflight: one rank has no network to check" in alone.out


@pytest.mark.parametrize(
    ("wrong", "evidence"),
    [
        ("transfers", "data do not arrive as they were sent (rank 1 to 0, rank 1 to 2)"),
        ("sums", "all-reduce gives wrong sums on rank 1, although data arrive as they were sent"),
    ],
)
def test_a_node_that_gives_wrong_data_ends_the_attempt_before_a_step(tmp_path: Path, wrong: str, evidence: str) -> None:
    ended = run(tmp_path, wrong)
    sentence = f"preflight: node node-1 (rank 1): {evidence}; keep the job off this node and have the network checked"
    codes = [ExitCode.PEER_LOST, ExitCode.NETWORK_FAULTY, ExitCode.PEER_LOST]
    assert [rank.code for rank in ended] == codes, ended[0].err
    for rank in ended:
        assert rank.error.message == sentence
        assert rank.report.step == 0
        assert "Traceback" not in rank.err
    assert ended[1].error.reason == "NetworkFaulty"


@pytest.mark.parametrize(("ranks", "sound"), [(2, 0), (4, 0), (2, 2)])
def test_a_node_that_swallows_what_it_is_to_send_is_named_with_who_waits_for_it(tmp_path, ranks, sound):
    """Long before a collective call would be given up. Of one link alone nothing says whose fault it is."""
    ended = run(tmp_path, "silence", ranks, SOUND=str(sound))
    partner = rounds(ranks)[0][1]
    named = sorted([1, partner])
    where = " and ".join(f"node node-{rank} (rank {rank})" for rank in named)
    sentence = f"preflight: {where}: nothing arrives within 10 s (rank 1 to {partner}); keep the job off these nodes"
    codes = [ExitCode.NETWORK_FAULTY if rank in named else ExitCode.PEER_LOST for rank in range(ranks)]
    assert [rank.code for rank in ended] == codes, ended[0].err
    for rank in ended:
        assert rank.error.message.startswith(sentence)
        assert "Traceback" not in rank.err


def test_all_ranks_of_a_silent_node_name_it_alone() -> None:
    silent = [Transfer(sender, receiver, wrong=1) for sender, receiver in ((2, 6), (3, 0))]
    message = (
        "preflight: node b (ranks 2-3): nothing arrives within 60 s (rank 2 to 6, rank 3 to 0); keep the job off this"
    )
    for rank, node in enumerate(NODES):
        with pytest.raises(NetworkFaulty if node == "b" else PeerLost) as ended:
            refuse_silent(silent, NODES, rank)
        assert str(ended.value).startswith(message)
    refuse_silent([], NODES, 0)
