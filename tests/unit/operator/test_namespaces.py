"""An operator of several namespaces: one cache that many lists fill, and one leadership of many leases."""

import pytest

from disttrain_operator.kube.cache import Cache, Raw
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.elections import Elections
from disttrain_operator.kube.lease import Election, Terms
from disttrain_operator.leadership import Leadership
from disttrain_operator.preflight import missing_rights
from disttrain_operator.settings import read_settings
from disttrain_operator.snapshot import job_collection
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.followed import BOTH, following
from tests.unit.operator.test_lease import running, taking_part, ticking

QUICK = Terms(duration=200, renew_deadline=150, renew_every=0.005, look_every=0.005)
"""Moved by `ticking`, in which many take part: each has several turns in that time."""


def an_object(namespace: str, uid: str, version: int) -> Raw:
    return {"metadata": {"namespace": namespace, "uid": uid, "name": uid, "resourceVersion": str(version)}}


def a_cache() -> Cache:
    return Cache(group_of=lambda raw: "all")


def uids(cache: Cache) -> set[str]:
    return {raw["metadata"]["uid"] for raw in cache.objects()}


class TestCache:
    def test_a_list_of_one_namespace_says_nothing_of_another(self) -> None:
        cache = a_cache()
        cache.replace([an_object("a", "a1", 5), an_object("a", "a2", 6)], 10, within="a")
        assert (cache.synced("a"), cache.synced("b")) == (True, False)
        cache.replace([an_object("b", "b1", 7)], 11, within="b")
        cache.replace([an_object("a", "a2", 6)], 12, within="a")
        assert uids(cache) == {"a2", "b1"}
        assert (cache.count("a"), cache.count("b"), cache.count()) == (1, 1, 2)

    def test_a_watch_goes_on_from_the_progress_of_its_own_namespace(self) -> None:
        cache = a_cache()
        cache.replace([], 10, within="a")
        cache.replace([], 10, within="b")
        cache.apply("ADDED", an_object("b", "b1", 20), within="b")
        assert (cache.progress("a"), cache.progress("b")) == (10, 20)
        # What a's watch has still to tell is no late answer to a deleted object.
        cache.observe(an_object("a", "a1", 15))
        assert uids(cache) == {"a1", "b1"}
        cache.observe(an_object("b", "b0", 15))
        assert uids(cache) == {"a1", "b1"}, "b's watch has delivered everything up to 20"

    def test_a_restored_etcd_resets_each_namespace_by_its_own_list(self) -> None:
        cache = a_cache()
        cache.replace([an_object("a", "a1", 50)], 60, within="a")
        cache.replace([an_object("b", "b1", 50)], 60, within="b")
        cache.apply("DELETED", an_object("b", "b1", 61), within="b")
        cache.replace([an_object("a", "a0", 5)], 9, within="a")
        assert uids(cache) == {"a0"}
        assert [raw["metadata"]["uid"] for raw in cache.gone("all")] == ["b1"]


@pytest.mark.parametrize("by", BOTH)
async def test_several_namespaces_fill_one_cache(api: FakeApi, client: Client, by: str) -> None:
    cache = a_cache()
    for namespace in ("a", "b", "other"):
        await api.put(f"{job_collection(namespace)}/first-{namespace}")
    async with following(by, client, cache, "a", "b", chunk=1) as watches:
        await eventually(lambda: api.watches == 2)
        await api.put(f"{job_collection('a')}/second-a")
        await api.remove(f"{job_collection('b')}/first-b")
        names = {"first-a", "second-a"}
        await eventually(lambda: {raw["metadata"]["name"] for raw in cache.objects()} == names)
        api.compact()
        await api.fault("error:410")
        await eventually(lambda: sum(watch.lists for watch in watches) == 3)
        assert {raw["metadata"]["name"] for raw in cache.objects()} == names
        assert [watch.objects for watch in watches] == [2, 0]


def over(api: FakeApi, client: Client, *namespaces: str, me: str = "ops/one/pod-1") -> Elections:
    return Elections(client, namespaces, "disttrain-operator", me, QUICK, ticking(api), wider_namespace="kube-system")


async def test_who_holds_the_leases_of_all_its_namespaces_leads(api: FakeApi, client: Client) -> None:
    both = over(api, client, "b", "a")
    leadership = Leadership(both)
    with taking_part(both), running(leadership):
        await eventually(leadership.acts)
        assert {path.split("/")[5] for path in api.objects} == {"a", "b"}
        assert leadership.describe() == "leads as ops/one/pod-1"
    await both.release()
    assert {raw["spec"]["holderIdentity"] for raw in api.objects.values()} == {""}


async def test_releases_that_share_a_namespace_do_not_lead_both(api: FakeApi, client: Client) -> None:
    narrow = Election(client, "b", "disttrain-operator", "b/two/pod-2", QUICK, ticking(api))
    wide = over(api, client, "a", "b")
    leadership = Leadership(wide)
    with running(leadership):
        with taking_part(narrow):
            await eventually(lambda: narrow.leads)
            with taking_part(wide):
                sentence = "stands by as ops/one/pod-1: release b/two serves the same jobs"
                await eventually(lambda: sentence in leadership.describe())
                assert not leadership.acts()
        with taking_part(wide):
            await eventually(leadership.acts)


@pytest.mark.parametrize("rounds", range(3))
async def test_of_replicas_and_releases_that_wait_for_each_others_namespaces_one_leads(api, client, rounds):
    several = [
        over(api, client, "a", "b", "c", me="ops/one/pod-1"),
        over(api, client, "c", "b", "a", me="ops/one/pod-2"),
        over(api, client, "b", "c", me="ops/two/pod-1"),
    ]
    with taking_part(*several):
        await eventually(lambda: sum(one.leads for one in several) == 1)
        (leader,) = [one for one in several if one.leads]
    others = [one for one in several if one is not leader]
    with taking_part(*others):
        await eventually(lambda: sum(one.leads for one in others) == 1)


async def test_one_lease_that_is_lost_costs_the_leadership_of_all(api: FakeApi, client: Client) -> None:
    both = over(api, client, "a", "b")
    with taking_part(both):
        await eventually(lambda: both.leads)
        api.refusals.append(
            lambda method, path, body: refusal(503, "ServiceUnavailable") if "/namespaces/b/" in path else None
        )
        await eventually(lambda: not both.leads)
        api.refusals.clear()
        await eventually(lambda: both.leads)


def test_namespaces_are_separated_by_commas() -> None:
    settings = read_settings(["--namespace=b, a,b", "--lease-namespace=b,a"], {})
    assert (settings.namespaces, settings.lease_namespaces) == (("a", "b"), ("a", "b"))


async def test_a_right_that_is_missing_is_named_with_its_namespace(api: FakeApi, client: Client) -> None:
    def answer(method: str, path: str, body: Raw | None) -> None:
        if body is not None and path.endswith("selfsubjectaccessreviews"):
            asked = body["spec"]["resourceAttributes"]
            body["metadata"] = {"name": f"{asked}"}
            lacks = (asked.get("namespace"), asked["resource"], asked["verb"]) == ("b", "secrets", "create")
            body["status"] = {"allowed": not lacks}

    api.refusals.append(answer)
    leases = [(name, "disttrain-operator") for name in ("a", "b")]
    assert await missing_rights(client, ("a", "b"), leases) == ["create secrets in b"]
