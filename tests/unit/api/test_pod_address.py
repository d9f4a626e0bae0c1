"""Which texts are addresses of pods."""

import pytest

from disttrain_api.pod_address import pod_address


@pytest.mark.parametrize("text", ["10.0.0.7", "192.168.1.2", "fd00::7", "2001:db8::1", "8.8.8.8"])
def test_a_literal_that_others_can_reach_is_one(text: str) -> None:
    assert str(pod_address(text)) == text
    assert pod_address(text, loopback=True) is None


NONE = ["", "worker-0", "10.0.0", "10.0.0.7/8", "010.0.0.7", " 10.0.0.7", "[fd00::7]", "0.0.0.0", "::", "224.0.0.1"]
NONE += ["169.254.169.254", "fe80::1", "fd00::7%eth0", "::ffff:10.0.0.7", "ff02::1", "1" * 1000]


@pytest.mark.parametrize("text", [*NONE, None, 7, ["10.0.0.7"]])
def test_nothing_else_is_one(text: object) -> None:
    for loopback in (False, True):
        assert pod_address(text, loopback=loopback) is None


@pytest.mark.parametrize("text", ["127.0.0.1", "::1"])
def test_the_machine_itself_is_one_where_all_pods_are_its_processes(text: str) -> None:
    assert pod_address(text) is None
    assert str(pod_address(text, loopback=True)) == text
