"""Whatever order the news comes in, the cache ends up as the server is, and never goes back on the way."""

import copy
from typing import Any

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from disttrain_operator.kube.cache import Cache, version_of
from tests.suites import examples

Raw = dict[str, Any]


def an_object(uid: str, version: int, group: str | None = "job", **fields: Any) -> Raw:
    return {"metadata": {"uid": uid, "name": uid, "resourceVersion": str(version), "group": group}, **fields}


def a_cache(**arguments: Any) -> Cache:
    return Cache(group_of=lambda raw: raw["metadata"]["group"], **arguments)


GROUPS = ("job", "another")


class Interleavings(RuleBasedStateMachine):
    """A server; its stream, delivered late; own writes' answers and a second watch, later and out of order."""

    @initialize()
    def start(self) -> None:
        self.cache = a_cache(clock=lambda: 0.0)
        self.version = 10
        self.server: dict[str, Raw] = {}
        self.stream: list[tuple[str, Raw]] = []
        self.others: list[tuple[str, Raw]] = []
        self.list: tuple[list[Raw], int] | None = None
        self.highest: dict[str, int] = {}
        self.numbers = 0
        self.cache.replace([], self.version)

    def _happened(self, kind: str, raw: Raw) -> None:
        self.stream.append((kind, copy.deepcopy(raw)))
        self.others.append((kind, copy.deepcopy(raw)))

    @rule()
    def create(self) -> None:
        self.version += 1
        self.numbers += 1
        raw = an_object(f"u{self.numbers}", self.version)
        self.server[raw["metadata"]["uid"]] = raw
        self._happened("ADDED", raw)

    @precondition(lambda self: self.server)
    @rule(data=st.data())
    def change(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.server)))
        self.version += 1
        self.server[uid] = an_object(uid, self.version, self.server[uid]["metadata"]["group"])
        self._happened("MODIFIED", self.server[uid])

    @precondition(lambda self: self.server)
    @rule(data=st.data(), group=st.sampled_from([*GROUPS, None]))
    def change_the_group(self, data: st.DataObject, group: str | None) -> None:
        uid = data.draw(st.sampled_from(sorted(self.server)))
        self.version += 1
        self.server[uid] = an_object(uid, self.version, group)
        self._happened("MODIFIED", self.server[uid])

    @precondition(lambda self: self.server)
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        uid = data.draw(st.sampled_from(sorted(self.server)))
        self.version += 1
        group = self.server.pop(uid)["metadata"]["group"]
        self._happened("DELETED", an_object(uid, self.version, group))

    @precondition(lambda self: self.stream and self.list is None)
    @rule()
    def the_stream_delivers(self) -> None:
        self.cache.apply(*self.stream.pop(0))

    @precondition(lambda self: self.others)
    @rule(data=st.data())
    def an_answer_or_another_watch_delivers(self, data: st.DataObject) -> None:
        kind, raw = self.others.pop(data.draw(st.integers(0, len(self.others) - 1)))
        if kind == "DELETED":
            self.cache.observe_deleted(raw)
        else:
            self.cache.observe(raw)

    @precondition(lambda self: not self.stream and self.list is None)
    @rule()
    def a_bookmark(self) -> None:
        self.cache.bookmark(self.version)

    @precondition(lambda self: self.list is None)
    @rule()
    def the_stream_breaks_and_a_list_is_asked_for(self) -> None:
        self.list = (copy.deepcopy(list(self.server.values())), self.version)
        self.stream.clear()

    @precondition(lambda self: self.list is not None)
    @rule()
    def the_list_arrives(self) -> None:
        self.cache.replace(*self.list)
        self.list = None

    @invariant()
    def no_object_goes_back(self) -> None:
        for raw in (raw for group in GROUPS for raw in self.cache.group(group)):
            uid, version = raw["metadata"]["uid"], version_of(raw)
            assert version >= self.highest.get(uid, 0)
            self.highest[uid] = version

    @invariant()
    def once_everything_is_delivered_the_cache_is_the_server(self) -> None:
        cache = copy.deepcopy(self.cache)
        if self.list is not None:
            cache.replace(*copy.deepcopy(self.list))
        for event in self.stream:
            cache.apply(*copy.deepcopy(event))
        for group in GROUPS:
            held = {raw["metadata"]["uid"]: version_of(raw) for raw in cache.group(group)}
            wanted = {uid: raw for uid, raw in self.server.items() if raw["metadata"]["group"] == group}
            assert held == {uid: version_of(raw) for uid, raw in wanted.items()}

    @invariant()
    def nothing_is_in_two_groups(self) -> None:
        held = [raw["metadata"]["uid"] for group in GROUPS for raw in self.cache.group(group)]
        assert len(held) == len(set(held))


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


def names(objects: list[Raw]) -> list[str]:
    return sorted(raw["metadata"]["name"] for raw in objects)


def test_an_own_write_is_seen_at_once_and_survives_an_older_list() -> None:
    cache = a_cache()
    cache.replace([], 10)
    cache.observe(an_object("mine", 12))
    cache.replace([], 11)
    assert names(cache.group("job")) == ["mine"]


def test_what_is_deleted_stays_gone_for_a_while_with_its_last_words() -> None:
    now = [0.0]
    cache = a_cache(clock=lambda: now[0], gone_seconds=120)
    cache.replace([an_object("p", 1, status="Running")], 10)
    cache.apply("DELETED", an_object("p", 11, status="Failed"))
    assert [raw["status"] for raw in cache.gone("job")] == ["Failed"]
    now[0] = 121
    assert cache.gone("job") == []


def test_what_vanished_unseen_is_gone_with_what_was_known() -> None:
    cache = a_cache()
    cache.replace([an_object("p", 1, status="Running")], 10)
    cache.replace([], 20)
    assert [raw["status"] for raw in cache.gone("job")] == ["Running"]


def test_the_gone_are_bounded() -> None:
    cache = a_cache(gone_limit=3)
    cache.replace([an_object(f"p{number}", 1) for number in range(10)], 10)
    cache.replace([], 20)
    assert len(cache.gone("job")) == 3


def test_who_deletes_much_loses_its_own_last_words_first() -> None:
    cache = a_cache(gone_limit=3)
    others = [an_object(f"p{number}", number) for number in range(20)]
    for raw in others:
        raw["metadata"]["namespace"] = "many"
    one = an_object("one", 1, "another")
    one["metadata"]["namespace"] = "few"
    cache.replace([one, *others], 30)
    cache.apply("DELETED", {**one, "metadata": {**one["metadata"], "resourceVersion": "31"}})
    for number, raw in enumerate(others):
        cache.apply("DELETED", {**raw, "metadata": {**raw["metadata"], "resourceVersion": str(32 + number)}})
    assert names(cache.gone("another")) == ["one"]
    assert names(cache.gone("job")) == ["p18", "p19"]


def test_a_restored_etcd_that_is_older_replaces_everything() -> None:
    cache = a_cache()
    cache.replace([an_object("a", 50), an_object("b", 60)], 100)
    cache.apply("DELETED", an_object("b", 101))
    cache.replace([an_object("b", 30)], 40)
    assert names(cache.group("job")) == ["b"]
    assert version_of(cache.group("job")[0]) == 30


def test_each_change_is_notified_once() -> None:
    changes: list[tuple[str, str]] = []
    cache = a_cache(on_change=lambda group, raw: changes.append((group, raw["metadata"]["resourceVersion"])))
    cache.replace([an_object("p", 1)], 10)
    cache.apply("MODIFIED", an_object("p", 11))
    cache.observe(an_object("p", 11))
    cache.observe(an_object("p", 5))
    cache.apply("DELETED", an_object("p", 12))
    cache.observe_deleted(an_object("p", 12))
    assert changes == [("job", "1"), ("job", "11"), ("job", "12")]


def test_a_change_of_group_is_notified_to_both_and_keeps_no_termination_message() -> None:
    changes: list[tuple[str, str]] = []
    cache = a_cache(on_change=lambda group, raw: changes.append((group, raw["metadata"]["resourceVersion"])))
    cache.replace([an_object("p", 1)], 10)
    cache.apply("MODIFIED", an_object("p", 11, "another"))
    cache.apply("MODIFIED", an_object("p", 12, None))
    cache.apply("MODIFIED", an_object("p", 13, None))
    assert changes == [("job", "1"), ("job", "11"), ("another", "11"), ("another", "12")]
    assert cache.groups() == []
    cache.apply("DELETED", an_object("p", 14, None))
    assert (cache.gone("job"), cache.gone("another"), len(cache)) == ([], [], 0)


def test_what_never_belonged_to_anybody_is_not_kept() -> None:
    changes: list[str] = []
    cache = a_cache(on_change=lambda group, raw: changes.append(group), gone_limit=1)
    cache.replace([an_object("p", 1), an_object("foreign", 2, None)], 10)
    cache.apply("DELETED", an_object("p", 11))
    cache.apply("DELETED", an_object("foreign", 12, None))
    assert names(cache.gone("job")) == ["p"], "it takes nobody's place among the gone"
    assert (changes, len(cache)) == (["job", "job"], 0)


def test_the_termination_message_of_a_pod_is_that_of_its_own_group() -> None:
    cache = a_cache()
    cache.replace([an_object("p", 1, status="Running")], 10)
    cache.apply("DELETED", an_object("p", 12, "another", status="Succeeded"))
    assert [raw["status"] for raw in cache.gone("job")] == ["Running"]
    assert cache.gone("another") == []
