"""What the caches keep together is bounded in bytes, and a namespace that takes much costs no other anything."""

from collections import Counter
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disttrain_operator.kube.budget import ENTRY_BYTES, SHARES, Budget
from disttrain_operator.kube.cache import Cache, version_of
from disttrain_operator.kube.marks import Marks
from disttrain_operator.kube.sizes import TooMuch, size_of
from disttrain_operator.kube.tolerant import Unreadable
from tests.suites import examples

Raw = dict[str, Any]


def an_object(uid: str, version: int, size: int = 0, namespace: str = "a", group: str | None = "job") -> Raw:
    metadata = {"uid": uid, "name": uid, "namespace": namespace, "resourceVersion": str(version), "group": group}
    return {"metadata": metadata, "spec": b"x" * size}


def trim(raw: Raw) -> Raw:
    if len(raw["spec"]) > 50_000:
        raise TooMuch("it is too large", "Make it smaller")
    return raw


def a_cache(budget: Budget, **arguments: Any) -> Cache:
    return Cache(group_of=lambda raw: raw["metadata"]["group"], trim=trim, budget=budget, **arguments)


def left_out(cache: Cache) -> list[str]:
    return sorted(found.uid for found in cache.unreadable())


class Budgeted(RuleBasedStateMachine):
    """Two caches of one budget, a server for each, and everything that a watch, a list or an answer may bring."""

    @initialize()
    def start(self) -> None:
        self.budget = Budget(40_000, 20_000)
        self.now = 0.0
        self.caches = [a_cache(self.budget, clock=lambda: self.now, gone_limit=5) for _ in range(2)]
        self.servers: list[dict[str, Raw]] = [{}, {}]
        self.versions = [10, 10]
        self.numbers = 0
        for cache in self.caches:
            cache.replace([], 10)

    def _changed(self, which: int, uid: str, size: int, namespace: str, group: str | None) -> Raw:
        self.versions[which] += 1
        raw = self.servers[which][uid] = an_object(uid, self.versions[which], size, namespace, group)
        return raw

    def _take(self, which: int, way: str, raw: Raw) -> None:
        cache = self.caches[which]
        if way == "observe":
            cache.observe(raw)
            return
        try:
            cache.apply("MODIFIED", raw)
        except TooMuch as error:
            found = cache.unread(raw, error)
            assert found is not None
            cache.skip(found)

    @rule(
        which=st.integers(0, 1),
        size=st.integers(0, 60_000) | st.integers(0, 5_000),
        namespace=st.sampled_from("abcd"),
        group=st.sampled_from(["job", "another", None]),
        way=st.sampled_from(["observe", "apply"]),
    )
    def create(self, which: int, size: int, namespace: str, group: str | None, way: str) -> None:
        self.numbers += 1
        self._take(which, way, self._changed(which, f"u{self.numbers}", size, namespace, group))

    @precondition(lambda self: any(self.servers))
    @rule(
        data=st.data(),
        size=st.integers(0, 60_000) | st.integers(0, 5_000),
        group=st.sampled_from(["job", "another", None]),
        way=st.sampled_from(["observe", "apply"]),
    )
    def change(self, data: st.DataObject, size: int, group: str | None, way: str) -> None:
        which, uid = self._any(data)
        namespace = self.servers[which][uid]["metadata"]["namespace"]
        self._take(which, way, self._changed(which, uid, size, namespace, group))

    @precondition(lambda self: any(self.servers))
    @rule(data=st.data(), size=st.integers(0, 60_000), way=st.sampled_from(["observe", "apply", "forget"]))
    def delete(self, data: st.DataObject, size: int, way: str) -> None:
        which, uid = self._any(data)
        metadata = self.servers[which].pop(uid)["metadata"]
        version = self.versions[which] = self.versions[which] + 1
        last = an_object(uid, version, size, metadata["namespace"], metadata["group"])
        if way == "apply":
            self.caches[which].apply("DELETED", last)
        elif way == "observe":
            self.caches[which].observe_deleted(last)
        else:
            self.caches[which].forget(Unreadable(metadata["namespace"], uid, uid, version, "odd"))

    @rule(which=st.integers(0, 1), lost=st.booleans(), restored=st.booleans())
    def list_all(self, which: int, lost: bool, restored: bool) -> None:
        """`lost`: something vanished unseen before it. `restored`: the server has gone back in time."""
        server, cache = self.servers[which], self.caches[which]
        if lost and server:
            del server[next(iter(server))]
        if restored:
            self.versions[which] = max((version_of(raw) for raw in server.values()), default=1)
        small = [raw for raw in server.values() if len(raw["spec"]) <= 50_000]
        error = TooMuch("it is too large", "")
        found = [cache.unread(raw, error) for raw in server.values() if len(raw["spec"]) > 50_000]
        cache.replace(small, self.versions[which], [one for one in found if one is not None])

    @rule()
    def time_passes(self) -> None:
        self.now += 200
        for cache in self.caches:
            cache.with_room()

    def _any(self, data: st.DataObject) -> tuple[int, str]:
        return data.draw(st.sampled_from([(n, uid) for n, server in enumerate(self.servers) for uid in sorted(server)]))

    @invariant()
    def the_sums_are_those_of_what_is_kept(self) -> None:
        sums: Counter[str] = Counter()
        for cache in self.caches:
            for raw in cache.objects():
                sums[raw["metadata"]["namespace"]] += size_of(raw) + ENTRY_BYTES
            last = {raw["metadata"]["uid"]: raw for group in ("job", "another") for raw in cache._gone.group(group)}
            for uid, entry in cache._gone._entries.items():
                sums[entry.namespace] += ENTRY_BYTES + (size_of(last[uid]) if uid in last else 0)
        assert {name: self.budget.of(name) for name in sums} == dict(sums)
        assert self.budget.total == sums.total()

    @invariant()
    def nothing_takes_more_than_it_may(self) -> None:
        assert self.budget.total <= 40_000
        assert max(map(self.budget.of, "abcd")) <= 20_000

    @invariant()
    def what_is_not_kept_in_its_newest_version_is_named(self) -> None:
        for server, cache in zip(self.servers, self.caches, strict=True):
            for uid, raw in server.items():
                known = cache.get(uid)
                newest = known is not None and version_of(known) == version_of(raw)
                assert newest or cache.is_unreadable(uid) or raw["metadata"]["group"] is None


TestBudgeted = Budgeted.TestCase
TestBudgeted.settings = settings(max_examples=examples(100), stateful_step_count=30, deadline=None)


def filled(budget: Budget, namespace: str, count: int, size: int = 5_000) -> Cache:
    cache = a_cache(budget)
    cache.replace([an_object(f"{namespace}{n}", n + 1, size, namespace) for n in range(count)], 100)
    return cache


def test_what_there_is_no_room_for_is_kept_as_a_name_and_reported_with_what_to_do() -> None:
    budget = Budget(40_000, 20_000)
    cache = filled(budget, "a", 3)
    reported: list[Unreadable] = []
    cache.on_unreadable = reported.append
    cache.apply("ADDED", an_object("more", 101, 5_000))
    (found,) = reported
    assert cache.get("more") is None
    assert "the operator keeps no more of the objects of its namespace" in found.why
    assert "Delete jobs, pods or Services of this namespace" in found.what_to_do
    assert (found.group, cache.is_partial("job", "a"), cache.is_partial("another", "a")) == ("job", True, False)


def test_two_that_take_all_they_may_leave_a_third_its_own() -> None:
    """Red where a namespace may have more than a third."""
    budget = Budget(60_000)
    filled(budget, "alone", 50)
    assert 15_000 < budget.of("alone") <= 20_000
    budget = Budget(60_000)
    assert budget.most_of_one == 60_000 // SHARES
    caches = [filled(budget, namespace, 50) for namespace in "abc"]
    assert [left_out(cache) != [] for cache in caches] == [True] * 3
    assert len({len(cache) for cache in caches}) == 1, "each has kept as many"


def test_who_has_most_gives_way_to_who_has_little() -> None:
    """Red where the newcomer is left out instead."""
    budget = Budget(40_000, 20_000)
    first, second = filled(budget, "a", 3), filled(budget, "b", 3)
    assert (len(first), len(second)) == (3, 3)
    gave_way: list[str] = []
    first.on_change = second.on_change = lambda group, raw: gave_way.append(raw["metadata"]["uid"])
    third = filled(budget, "c", 2)
    assert (len(third), left_out(third)) == (2, [])
    assert sorted(gave_way) == left_out(first) + left_out(second) == ["a0", "b0"]
    assert first.is_partial("job", "a")


def test_who_has_most_gets_nothing_of_others() -> None:
    budget = Budget(40_000, 40_000)
    few = filled(budget, "few", 1)
    many = filled(budget, "many", 50)
    assert (len(few), left_out(few)) == (1, [])
    assert left_out(many)


def test_what_was_deleted_goes_first() -> None:
    budget = Budget(40_000, 20_000)
    cache = filled(budget, "a", 3)
    for number in range(3):
        cache.apply("DELETED", an_object(f"a{number}", 101 + number, 5_000))
    assert len(cache.gone("job")) == 3
    cache.apply("ADDED", an_object("new", 110, 5_000))
    assert (left_out(cache), len(cache.gone("job"))) == ([], 2)


@pytest.mark.parametrize("way", ["it is smaller", "another was deleted", "another is smaller"])
def test_what_was_left_out_is_taken_in_when_there_is_room(way: str) -> None:
    now = [0.0]
    budget = Budget(40_000, 20_000)
    cache = a_cache(budget, clock=lambda: now[0])
    cache.replace([an_object(f"a{n}", n + 1, 4_500) for n in range(4)], 100)
    assert left_out(cache) == ["a3"]
    assert cache.with_room() == set()
    if way == "it is smaller":
        cache.apply("MODIFIED", an_object("a3", 101, 100))
    else:
        if way == "another was deleted":
            cache.apply("DELETED", an_object("a0", 101, 4_500))
            now[0] += 200
        else:
            cache.apply("MODIFIED", an_object("a0", 101, 100))
        assert cache.with_room() == {"a"}
        # It is the same version as before: nobody has changed it.
        cache.observe(an_object("a3", 4, 4_500))
    assert left_out(cache) == []
    assert cache.get("a3") is not None
    assert not cache.is_partial("job", "a")


def test_names_are_bounded_too_and_a_list_shows_when_nothing_is_missing() -> None:
    cache = a_cache(Budget(40_000, 20_000))
    cache._marks = Marks(most_of_one=3)
    objects = [an_object(f"a{number}", number + 1, 5_000) for number in range(20)]
    cache.replace(objects, 100)
    assert len(cache.unreadable()) == 3
    assert cache.is_partial("job of which nothing is known", "a")
    assert not cache.is_partial("job of which nothing is known", "b")
    cache.replace(objects, 101)
    assert cache.is_partial("job of which nothing is known", "a")
    cache.replace(objects[:2], 102)
    assert not cache.is_partial("job of which nothing is known", "a")
