"""Two releases of the operator in a cluster: whose jobs overlap, one acts, and the other says why it does not."""

import logging

import pytest

from disttrain_operator.kube.client import Client
from disttrain_operator.kube.lease import Election, Lease, ObservedLease, is_taken
from disttrain_operator.leadership import Leadership
from tests.unit.operator.conftest import eventually
from tests.unit.operator.fake_api import FakeApi, refusal
from tests.unit.operator.test_lease import QUICK, running, taking_part, ticking

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/disttrain-operator"
OF_ALL, OF_TEAM = LEASES.format("kube-system"), LEASES.format("team-a")


def of_all_namespaces(api: FakeApi, client: Client, me: str = "ops/one/pod-1_a") -> Election:
    return Election(client, "kube-system", "disttrain-operator", me, QUICK, ticking(api))


def of_one_namespace(api: FakeApi, client: Client, me: str = "team-a/two/pod-2_b") -> Election:
    return Election(client, "team-a", "disttrain-operator", me, QUICK, ticking(api), wider_namespace="kube-system")


@pytest.mark.parametrize(
    ("lease", "age", "taken"),
    [
        (None, 0.0, False),
        (Lease("", "7", 0.0), 0.0, False),
        (Lease("one", "7", 4.0), 11.9, True),
        (Lease("one", "7", 4.0), 12.0, False),
        (Lease("", "7", 4.0), 11.9, True),
    ],
)
def test_a_lease_is_taken_for_longer_than_its_own_replicas_need_to_succeed_each_other(lease, age, taken):
    assert is_taken(ObservedLease(lease, since=10.0), 10.0 + age) is taken


async def test_an_operator_of_one_namespace_stands_by_while_one_of_all_leads(api: FakeApi, client: Client) -> None:
    narrow, wide = of_one_namespace(api, client), of_all_namespaces(api, client)
    leadership = Leadership(narrow)
    with taking_part(narrow), running(leadership):
        await eventually(leadership.acts)
        with taking_part(wide):
            await eventually(lambda: wide.leads and not narrow.leads)
            await eventually(lambda: narrow.superseded_by == "ops/one/pod-1_a")
            assert leadership.describe() == (
                "stands by as team-a/two/pod-2_b: release ops/one serves all namespaces, and so this one's; uninstall"
                " one of the two releases"
            )
            assert not leadership.acts()
        await eventually(leadership.acts)


async def test_the_operator_of_all_is_not_held_back_by_one_of_a_namespace(api: FakeApi, client: Client) -> None:
    narrow, wide = of_one_namespace(api, client), of_all_namespaces(api, client)
    with taking_part(wide):
        await eventually(lambda: wide.leads)
        with taking_part(narrow):
            await eventually(lambda: bool(narrow.superseded_by))
            assert wide.leads
            assert not narrow.leads


async def test_operators_of_different_namespaces_all_lead(api: FakeApi, client: Client) -> None:
    other = Election(
        client, "team-b", "disttrain-operator", "team-b/x/y_c", QUICK, ticking(api), wider_namespace="kube-system"
    )
    narrow = of_one_namespace(api, client)
    with taking_part(narrow, other):
        await eventually(lambda: narrow.leads and other.leads)


@pytest.mark.parametrize(("code", "reason"), [(403, "Forbidden"), (404, "NotFound")])
async def test_where_no_operator_of_all_grants_a_look_at_its_lease_there_is_none(api, client, code, reason):
    api.refusals.append(lambda method, path, body: refusal(code, reason) if path.startswith(OF_ALL) else None)
    narrow = of_one_namespace(api, client)
    with taking_part(narrow):
        await eventually(lambda: narrow.leads)


async def test_who_cannot_know_whether_one_of_all_leads_does_not_act(api: FakeApi, client: Client) -> None:
    narrow = of_one_namespace(api, client)
    with taking_part(narrow):
        await eventually(lambda: narrow.leads)
        api.refusals.append(
            lambda method, path, body: refusal(503, "ServiceUnavailable") if path.startswith(OF_ALL) else None
        )
        await eventually(lambda: not narrow.leads)


async def test_a_second_release_of_the_same_jobs_says_who_leads(api, client, caplog):
    first, second = of_all_namespaces(api, client), of_all_namespaces(api, client, "tests/two/pod-9_z")
    leadership = Leadership(second)
    with taking_part(first):
        await eventually(lambda: first.leads)
        with caplog.at_level(logging.INFO), taking_part(second), running(leadership):
            sentence = (
                "stands by as tests/two/pod-9_z: release ops/one serves the same jobs; uninstall one of the two"
                " releases, or let each watch namespaces of its own"
            )
            await eventually(lambda: leadership.describe() == sentence)
            await eventually(lambda: sentence in [record.getMessage() for record in caplog.records])
    assert [record.levelname for record in caplog.records if record.getMessage() == sentence] == ["WARNING"]


async def test_replicas_of_one_release_are_no_two_releases(api: FakeApi, client: Client) -> None:
    first, second = of_all_namespaces(api, client), of_all_namespaces(api, client, "ops/one/pod-2_b")
    with taking_part(first):
        await eventually(lambda: first.leads)
        with taking_part(second), running(leadership := Leadership(second)):
            sentence = "stands by as ops/one/pod-2_b; the leader is ops/one/pod-1_a"
            await eventually(lambda: leadership.describe() == sentence)


async def test_a_lease_that_the_chart_made_is_taken_as_it_is(api: FakeApi, client: Client) -> None:
    await api.put(OF_ALL)
    wide = of_all_namespaces(api, client)
    with taking_part(wide):
        await eventually(lambda: wide.leads)


async def test_who_changes_the_leases_labels_unseats_nobody(api: FakeApi, client: Client) -> None:
    wide, begun = of_all_namespaces(api, client), list[int]()
    leadership = Leadership(wide)
    with taking_part(wide), running(leadership, lambda: begun.append(1)):
        await eventually(leadership.acts)
        for version in range(5):
            spec = api.objects[OF_ALL]["spec"]
            await api.put(OF_ALL, labels={"chart": str(version)}, spec=spec)
            renewed = api.objects[OF_ALL]["metadata"]["resourceVersion"]
            await eventually(lambda seen=renewed: api.objects[OF_ALL]["metadata"]["resourceVersion"] != seen)
        assert begun == [1]
        assert api.objects[OF_ALL]["metadata"]["labels"] == {"chart": "4"}, "they are not the operator's"


async def test_a_lease_that_may_not_be_made_again_is_asked_for(api, client, caplog):
    api.refusals.append(lambda method, path, body: refusal(403, "Forbidden") if method == "POST" else None)
    wide = of_all_namespaces(api, client)
    with caplog.at_level(logging.INFO), taking_part(wide):
        await eventually(lambda: any("`helm upgrade` makes it" in record.getMessage() for record in caplog.records))
    assert not wide.leads
