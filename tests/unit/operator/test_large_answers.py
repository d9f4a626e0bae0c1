"""Answers of much text, to the operator's own requests: read and trimmed beside its loop, within bounds."""

import threading
from typing import Any

import pytest

from disttrain_operator import snapshot
from disttrain_operator.kept_job import keep
from disttrain_operator.kept_pod import keep_pod
from disttrain_operator.kube import client as client_module
from disttrain_operator.kube.client import Client
from disttrain_operator.kube.errors import Undecodable
from disttrain_operator.kube.sizes import LARGE_BYTES
from tests.unit.operator.fake_api import FakeApi, Raw
from tests.unit.operator.test_reconcile import JOBS, a_shell

POD = "/api/v1/namespaces/team/pods/a"
TEXT = "x" * (LARGE_BYTES + 1)


class Trimming:
    """What was trimmed that is large, and whether in the loop's thread."""

    def __init__(self) -> None:
        self.loop = threading.get_ident()
        self.beside: list[bool] = []

    def of(self, trim: Any) -> Any:
        def trimmed(raw: Raw) -> Raw:
            if TEXT in str(raw):
                self.beside.append(threading.get_ident() != self.loop)
            kept: Raw = trim(raw)
            return kept

        return trimmed


def names(raw: Raw) -> Raw:
    return {"metadata": raw["metadata"]}


async def test_of_a_large_answer_comes_what_is_kept_of_it(api: FakeApi, client: Client) -> None:
    made, trimming = await api.put(POD, spec={"text": TEXT}), Trimming()
    assert await client.get(POD, trim=trimming.of(names)) == names(made)
    assert trimming.beside == [True]


async def test_what_cannot_be_trimmed_comes_as_it_is(api: FakeApi, client: Client) -> None:
    def refuse(raw: Raw) -> Raw:
        raise ValueError("too odd")

    made = await api.put(POD, spec={"text": TEXT})
    assert await client.get(POD, trim=refuse) == made
    assert await client.get(POD) == made


async def test_an_answer_of_too_many_parts_is_not_read(api, client, monkeypatch):
    """Red where it is parsed before its parts are counted."""
    monkeypatch.setattr(client_module, "MAX_PARSED_BYTES", 2**20)
    await api.put(POD, spec={"parts": [{}] * LARGE_BYTES})
    with pytest.raises(Undecodable, match="so many parts"):
        await client.get(POD)


async def test_a_large_job_and_its_large_pods_are_trimmed_beside_the_loop(api, client, monkeypatch):
    """Each write of its status is answered with all of it, and each pod with the template. Red where the loop parses
    them."""
    trimming = Trimming()
    monkeypatch.setattr(snapshot, "keep", trimming.of(keep))
    monkeypatch.setattr(snapshot, "keep_pod", trimming.of(keep_pod))
    shell = await a_shell(api, client, workers=2)
    job = shell.job()
    container = {"name": "trainer", "env": [{"name": "LONG", "value": TEXT}]}
    job["spec"]["workers"]["template"] = {"spec": {"containers": [container]}}
    api.version += 1
    job["metadata"]["resourceVersion"] = str(api.version)
    shell.world.jobs.observe(job)
    trimming.beside.clear()
    await shell.reconcile()
    assert len(shell.pods()) == len(shell.known_pods()) == 2
    assert trimming.beside == [True] * 3
    await api.put(f"{JOBS}/digits", labels={"changed": "by somebody else"})
    await shell.reconciler._read_again(shell.key)
    assert trimming.beside == [True] * 4
    assert shell.knows_newest()
