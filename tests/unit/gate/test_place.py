"""A placement never exceeds a node, meets every constraint, keeps groups together, and is the same each time."""

from collections.abc import Iterator, Sequence
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_operator.gate.admit import BEHIND, WaitingGang, admit
from disttrain_operator.gate.fit import PODS, Needs, NodeFacts, Requirement, Taint, Term, Toleration, unfit
from disttrain_operator.gate.place import Member, Together, by_counting, fits, place
from disttrain_operator.gate.room import Room
from disttrain_operator.gate.why import why_not
from tests.suites import examples

GPU = "nvidia.com/gpu"
ZONE = "zone"
OLD, OLDER = "2026-01-01T00:00:50Z", "2026-01-01T00:00:40Z"


def needs(gpus: int = 1, **others: object) -> Needs:
    return Needs(requests=((GPU, gpus), (PODS, 1)), **others)  # type: ignore[arg-type]


def node(name: str, gpus: int = 8, pods: int = 100, zone: str | None = None, **others: object) -> NodeFacts:
    labels = {} if zone is None else {ZONE: zone}
    return NodeFacts(name, {GPU: gpus, PODS: pods}, labels, **others)  # type: ignore[arg-type]


def members(*wanted: Needs, groups: Sequence[int | None] = ()) -> list[Member]:
    return [Member(f"pod-{i}", one, groups[i] if groups else None) for i, one in enumerate(wanted)]


def gang(uid: str, pods: int, gpus: int = 1, *, age: int = 0, priority: int = 0, **others: object) -> WaitingGang:
    made = tuple(Member(f"{uid}-{i}", needs(gpus)) for i in range(pods))
    return WaitingGang(uid, made, f"2026-01-01T00:00:{50 - age:02}Z", priority, **others)  # type: ignore[arg-type]


def is_sound(
    placed: dict[str, str], pods: Sequence[Member], nodes: Sequence[NodeFacts], together: Together | None
) -> bool:
    by_name = {one.name: one for one in nodes}
    for name, one in by_name.items():
        here = [pod for pod in pods if placed[pod.uid] == name]
        if any(unfit(pod.needs, one) for pod in here):
            return False
        for resource, room in one.allocatable.items():
            if sum(dict(pod.needs.requests).get(resource, 0) for pod in here) > room:
                return False
    if together is None or not together.required:
        return True
    values: dict[int, set[str | None]] = {}
    for pod in pods:
        if pod.group is not None:
            values.setdefault(pod.group, set()).add(by_name[placed[pod.uid]].labels.get(together.key))
    return all(len(found) == 1 and None not in found for found in values.values())


def exhaustive(pods: Sequence[Member], nodes: Sequence[NodeFacts], together: Together | None) -> bool:
    def all_placements() -> Iterator[dict[str, str]]:
        for names in product([one.name for one in nodes], repeat=len(pods)):
            yield {pod.uid: name for pod, name in zip(pods, names, strict=True)}

    return any(is_sound(placed, pods, nodes, together) for placed in all_placements())


some_nodes = st.lists(
    st.builds(
        node,
        name=st.sampled_from("abcd"),
        gpus=st.integers(0, 4),
        pods=st.integers(0, 3),
        zone=st.sampled_from([None, "x", "y"]),
        taints=st.sampled_from([(), (Taint("t", "NoSchedule"),), (Taint("t", "PreferNoSchedule"),)]),
        unschedulable=st.just(False) | st.booleans(),
        ready=st.just(True) | st.booleans(),
    ),
    max_size=4,
    unique_by=lambda one: one.name,
)
some_needs = st.builds(
    needs,
    gpus=st.integers(1, 3),
    node_selector=st.sampled_from([(), ((ZONE, "x"),)]),
    terms=st.sampled_from(
        [
            None,
            (Term(labels=(Requirement(ZONE, "Exists"),)), Term(fields=(Requirement("metadata.name", "In", ("a",)),))),
        ]
    ),
    preferred=st.sampled_from([(), ((10, Term(labels=(Requirement(ZONE, "In", ("y",)),))),)]),
    tolerations=st.sampled_from([(), (Toleration("t", "Exists"),)]),
)
topologies = st.sampled_from([None, Together(ZONE, True), Together(ZONE, False)])


@settings(max_examples=examples(400), deadline=None)
@given(some_nodes, st.lists(some_needs, min_size=1, max_size=5), topologies, st.data())
def test_what_is_placed_fits_and_what_does_not_leaves_the_room_as_it_was(nodes, wanted, together, data):
    groups = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=len(wanted), max_size=len(wanted)))
    pods = members(*wanted, groups=groups)
    room = Room(nodes)
    before = {name: dict(free) for name, free in room.free.items()}
    placed = place(pods, room, together)
    assert placed == place(pods, Room(reversed(nodes)), together), "the order of what came in does not matter"
    if placed is None:
        assert {
            name: {k: v for k, v in free.items() if k in before[name]} for name, free in room.free.items()
        } == before
        assert why_not(pods, together, room)
    else:
        assert is_sound(placed, pods, nodes, together)


@settings(max_examples=examples(300), deadline=None)
@given(some_nodes, some_needs, st.integers(1, 4), st.integers(1, 3), topologies)
def test_equal_pods_in_equal_groups_are_placed_whenever_they_can_be(nodes, wanted, count, size, together):
    count -= count % size
    pods = members(*[wanted] * count, groups=[index // size for index in range(count)])
    assert (place(pods, Room(nodes), together) is not None) == exhaustive(pods, nodes, together)


@settings(max_examples=examples(300), deadline=None)
@given(some_nodes, some_needs, st.integers(1, 4), st.integers(1, 3), topologies)
def test_what_is_counted_instead_of_tried_is_what_an_exhaustive_search_finds(nodes, wanted, count, size, together):
    """Also with some pods of no group."""
    pods = members(
        *[wanted] * count, groups=[index // size if index < count - count % size else None for index in range(count)]
    )
    counted = by_counting(pods, Room(nodes), together)
    assert counted is not None
    assert counted == exhaustive(pods, nodes, together)


@settings(max_examples=examples(400), deadline=None)
@given(some_nodes, st.lists(some_needs, min_size=1, max_size=5), topologies, st.data())
def test_whether_a_gang_fits_is_what_placing_it_shows_also_after_others_were_placed(nodes, wanted, together, data):
    """One room, asked before and after it has become smaller, beside a new one each time."""
    room = Room(nodes)
    for _ in range(2):
        groups = data.draw(st.lists(st.sampled_from([None, 0, 1]), min_size=len(wanted), max_size=len(wanted)))
        pods = members(*wanted, groups=groups)
        fixed = data.draw(st.sampled_from([None, {0: "x"}]))
        afresh = room.copy()
        answer = fits(pods, room, together, fixed)
        assert room.free == afresh.free
        assert answer == (place(pods, room, together, fixed) is not None)
        assert answer == (place(pods, afresh, together, fixed) is not None)


@settings(max_examples=examples(300), deadline=None)
@given(some_nodes, st.lists(some_needs, min_size=1, max_size=3), st.data())
def test_what_a_room_has_counted_before_does_not_outlive_a_change(nodes, kinds, data):
    room = Room(nodes)
    for _ in range(data.draw(st.integers(1, 5))):
        names = sorted(room.nodes)
        if names and data.draw(st.integers(0, 4)) == 0:
            room.remove([data.draw(st.sampled_from(names))])
        elif names:
            room.take(data.draw(st.sampled_from(names)), [(GPU, data.draw(st.integers(-2, 2)))])
        afresh = room.copy()
        for needs_ in kinds:
            assert room.capacities(needs_) == afresh.capacities(needs_)
            assert room.total(needs_) == sum(afresh.capacities(needs_).values())
            assert {k: v for k, v in room.totals(needs_, ZONE).items() if v} == {
                k: v for k, v in afresh.totals(needs_, ZONE).items() if v
            }
            assert room.lacking(needs_) == afresh.lacking(needs_)


@settings(max_examples=examples(200), deadline=None)
@given(some_nodes, st.lists(some_needs, min_size=1, max_size=4))
def test_unequal_pods_may_be_held_back_but_are_never_placed_where_they_cannot_be(nodes, wanted):
    """Bin packing: the heuristic is not complete, only sound."""
    pods = members(*wanted)
    if place(pods, Room(nodes), None) is not None:
        assert exhaustive(pods, nodes, None)


def test_where_the_heuristic_is_not_complete() -> None:
    """5+4 and 3+3+3 would fill two nodes of 9; whoever goes where most room is leaves none for the last."""
    pods = members(*(needs(gpus) for gpus in (5, 4, 3, 3, 3)))
    nodes = [node("a", 9), node("b", 9)]
    assert exhaustive(pods, nodes, None)
    assert place(pods, Room(nodes)) is None
    assert not fits(pods, Room(nodes))
    assert why_not(pods, None, Room(nodes)).endswith("; not all of them at once")


def test_ranks_next_to_each_other_share_a_node_and_a_zone() -> None:
    nodes = [node(f"n{i}", 2, zone="xy"[i % 2]) for i in range(4)]
    pods = members(*[needs()] * 8, groups=[index // 2 for index in range(8)])
    placed = place(pods, Room(nodes), Together(ZONE, True))
    assert placed is not None
    zones = [dict(zip(["n0", "n1", "n2", "n3"], "xyxy", strict=True))[placed[pod.uid]] for pod in pods]
    assert zones == sorted(zones), "all groups of a zone are neighbours"
    assert [placed[f"pod-{i}"] for i in (0, 2, 4, 6)] == [placed[f"pod-{i}"] for i in (1, 3, 5, 7)]


def test_a_group_that_prefers_to_be_together_is_spread_only_where_it_must() -> None:
    nodes = [node("a", 3, zone="x"), node("b", 3, zone="y")]
    pods = members(*[needs()] * 6, groups=[0, 0, 1, 1, 2, 2])
    placed = place(pods, Room(nodes), Together(ZONE, False))
    assert placed is not None
    apart = [i for i in (0, 2, 4) if placed[f"pod-{i}"] != placed[f"pod-{i + 1}"]]
    assert len(apart) == 1
    assert place(pods, Room(nodes), Together(ZONE, True)) is None


def test_a_group_of_which_a_part_stands_goes_there() -> None:
    nodes = [node("a", 1, zone="x"), node("b", 8, zone="y")]
    pods = members(needs(), groups=[0])
    assert place(pods, Room(nodes), Together(ZONE, True), {0: "x"}) == {"pod-0": "a"}
    assert place(members(needs(2), groups=[0]), Room(nodes), Together(ZONE, True), {0: "x"}) is None


def test_suspected_nodes_are_used_last() -> None:
    suspicion = ((100, Term(fields=(Requirement("metadata.name", "NotIn", ("a",)),))),)
    wanted = needs(8, preferred=suspicion)
    assert place(members(wanted), Room([node("a"), node("b")])) == {"pod-0": "b"}
    assert place(members(wanted), Room([node("a")])) == {"pod-0": "a"}


def test_the_sentence_names_each_cause_with_its_number() -> None:
    nodes = [
        *(node(f"free-{i}") for i in range(5)),
        *(node(f"full-{i}") for i in range(3)),
        *(node(f"tainted-{i}", taints=(Taint("mine", "NoSchedule"),)) for i in range(2)),
        node("cordoned", unschedulable=True),
        node("small", 4),
    ]
    room = Room(nodes, {f"full-{i}": {GPU: 3} for i in range(3)})
    for i in range(5):
        room.take(f"free-{i}", ())
    assert why_not(members(*[needs(8)] * 8), None, room) == (
        "needs 8 pods x 8 nvidia.com/gpu; 5 fit: of 12 nodes 3 have too little nvidia.com/gpu free, 2 are tainted mine,"
        " 1 is cordoned, 1 is too small in nvidia.com/gpu"
    )
    assert why_not(members(needs()), None, Room([])) == (
        "needs 1 pod x 1 nvidia.com/gpu; 0 fit: the cluster has no nodes"
    )
    apart = Room([node("a", 1, zone="x"), node("b", 1, zone="y")])
    assert why_not(members(needs(), needs(), groups=[0, 0]), Together(ZONE, True), apart) == (
        "needs 2 pods x 1 nvidia.com/gpu; 2 fit; no value of node label zone has room for a whole group"
    )


# One admission at a time, in order.


def test_two_gangs_that_fit_only_one_at_a_time_are_never_both_let_go() -> None:
    outcomes = admit([gang("late", 8), gang("early", 8, age=10)], [node("a", 12)], {}, {})
    assert outcomes["early"].placement is not None
    assert outcomes["late"].placement is None
    assert outcomes["late"].why.startswith("needs 8 pods x 1 nvidia.com/gpu; 4 fit")


def test_priority_goes_before_age() -> None:
    outcomes = admit([gang("old", 8, age=10), gang("important", 8, priority=1)], [node("a", 12)], {}, {})
    assert outcomes["important"].placement is not None
    assert outcomes["old"].placement is None


def test_a_small_gang_does_not_pass_a_large_one_that_waits_for_room() -> None:
    nodes = [node("a"), node("b")]
    used = {"a": {GPU: 8}}
    outcomes = admit([gang("large", 16, age=10), gang("small", 1)], nodes, used, {})
    assert outcomes["large"].placement is None
    assert outcomes["small"].why == BEHIND


def test_a_gang_whose_room_no_job_will_free_holds_nobody_up() -> None:
    nodes = [node("a"), node("b")]
    used = {"a": {GPU: 8}}
    for large in (gang("large", 17, age=10), gang("large", 16, age=10)):
        outcomes = admit([large, gang("small", 1)], nodes, used, used)
        assert outcomes["large"].placement is None
        assert outcomes["small"].placement == {"small-0": "b"}


def test_gangs_that_need_other_nodes_pass() -> None:
    there = Needs(requests=((PODS, 1),), node_selector=((ZONE, "y"),))
    cpu_only = WaitingGang("elsewhere", (Member("p", there),), OLD)
    here = tuple(Member(f"w{i}", needs(node_selector=((ZONE, "x"),))) for i in range(8))
    nodes = [node("a", zone="x"), node("b", zone="y")]
    outcomes = admit([WaitingGang("first", here, OLDER), cpu_only], nodes, {"a": {GPU: 1}}, {})
    assert outcomes["first"].placement is None
    assert outcomes["elsewhere"].placement == {"p": "b"}


def test_what_is_partly_let_go_is_completed_first() -> None:
    half = gang("half", 1, standing={"half-x": "a"}, groups={"half-x": None})
    outcomes = admit([gang("old", 1, age=10, priority=5), half], [node("a", 1)], {}, {})
    assert outcomes["half"].placement == {"half-0": "a"}
    assert outcomes["old"].placement is None


@settings(max_examples=examples(200), deadline=None)
@given(some_nodes, st.lists(st.tuples(st.integers(1, 4), st.integers(1, 2), st.integers(0, 9)), max_size=5))
def test_all_admissions_together_fit(nodes: list[NodeFacts], wanted: list[tuple[int, int, int]]) -> None:
    gangs = [gang(f"g{i}", pods, gpus, age=age) for i, (pods, gpus, age) in enumerate(wanted)]
    outcomes = admit(gangs, nodes, {}, {})
    assert outcomes == admit(gangs[::-1], nodes[::-1], {}, {})
    let_go = [member for one in gangs if outcomes[one.uid].placement is not None for member in one.members]
    placed = {uid: name for outcome in outcomes.values() for uid, name in (outcome.placement or {}).items()}
    assert is_sound(placed, let_go, nodes, None)
