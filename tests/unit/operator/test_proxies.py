"""Which requests go through a proxy: the cases of Go's httpproxy, whose words kubectl's users write."""

import pytest

from disttrain_operator.kube.errors import AccessError
from disttrain_operator.kube.proxies import checked, proxy_for

KUBE = "https://kube.example.org:6443"
PROXY = "http://proxy:3128"


@pytest.mark.parametrize(
    ("server", "environment", "expected"),
    [
        (KUBE, {}, None),
        (KUBE, {"HTTPS_PROXY": PROXY}, PROXY),
        (KUBE, {"https_proxy": PROXY}, PROXY),
        (KUBE, {"HTTPS_PROXY": "", "https_proxy": PROXY}, PROXY),
        (KUBE, {"HTTPS_PROXY": PROXY, "https_proxy": "http://other:1"}, PROXY),
        (KUBE, {"HTTPS_PROXY": "proxy:3128"}, PROXY),
        (KUBE, {"HTTPS_PROXY": "https://user:word@proxy"}, "https://user:word@proxy"),
        (KUBE, {"HTTP_PROXY": PROXY, "ALL_PROXY": PROXY}, None),
        ("http://kube.example.org", {"HTTP_PROXY": PROXY}, PROXY),
        ("http://kube.example.org", {"HTTPS_PROXY": PROXY}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": PROXY}, None),
        ("https://127.8.0.1:6443", {"HTTPS_PROXY": PROXY}, None),
        ("https://[::1]:6443", {"HTTPS_PROXY": PROXY}, None),
    ],
)
def test_the_proxy_of_a_server(server: str, environment: dict[str, str], expected: str | None) -> None:
    assert proxy_for(server, environment) == expected


@pytest.mark.parametrize(
    ("server", "excepted", "directly"),
    [
        (KUBE, "*", True),
        (KUBE, "example.org", True),
        (KUBE, "other, Example.ORG ", True),
        (KUBE, ".example.org", True),
        (KUBE, "*.example.org", True),
        (KUBE, "kube.example.org", True),
        (KUBE, "ube.example.org", False),
        (KUBE, ".kube.example.org", False),
        (KUBE, "*.kube.example.org", False),
        (KUBE, "example.org:6443", True),
        (KUBE, "example.org:443", False),
        (KUBE, ":6443", False),
        (KUBE, "", False),
        (KUBE, ",,", False),
        (KUBE, "10.0.0.0/8", False),
        ("https://kube.example.org", "example.org:443", True),
        ("https://10.96.0.1:443", "10.0.0.0/8", True),
        ("https://10.96.0.1:443", "10.97.3.4/12", True),
        ("https://10.96.0.1:443", "10.0.0.0/16", False),
        ("https://10.96.0.1:443", "10.0.0.0/99", False),
        ("https://10.96.0.1:443", "10.96.0.1", True),
        ("https://10.96.0.1:443", "10.96.0.1:443", True),
        ("https://10.96.0.1:443", "10.96.0.1:6443", False),
        ("https://10.96.0.1:443", "::ffff:10.96.0.1", True),
        ("https://10.96.0.1:443", "0.1", True),
        ("https://[fd00::1]:443", "fd00::/8", True),
        ("https://[fd00::1]:443", "fd00::1", True),
        ("https://[fd00::1]:443", "[fd00::1]:443", True),
        ("https://[fd00::1]:443", "[fd00::1]:1", False),
        ("https://[fd00::1]:443", "10.0.0.0/8", False),
    ],
)
def test_what_no_proxy_excepts(server: str, excepted: str, directly: bool) -> None:
    found = proxy_for(server, {"HTTPS_PROXY": PROXY, "NO_PROXY": excepted})
    assert found == (None if directly else PROXY)


@pytest.mark.parametrize("proxy", ["socks5://me:secret@proxy:1080", "http://", "http://me:secret@proxy:ninety"])
def test_a_proxy_that_cannot_be_used_is_refused_without_its_password(proxy: str) -> None:
    with pytest.raises(AccessError, match=r"HTTPS_PROXY names a proxy by .*expected http:// or https://") as refused:
        checked(proxy, "HTTPS_PROXY")
    assert "secret" not in str(refused.value)
