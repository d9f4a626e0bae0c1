"""Which proxy leads to the API server, as kubectl reads HTTPS_PROXY, HTTP_PROXY and NO_PROXY.

The rules are those of Go's httpproxy, which differ from Python's: NO_PROXY may hold networks (10.0.0.0/8), a domain
stands for all below it, and this machine is never asked for through a proxy.
"""

import ipaddress
import os
import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from disttrain_operator.kube.errors import AccessError

_PORTS = {"http": 80, "https": 443}
_WITH_PORT = re.compile(r"\[(?P<six>[^]]*)]:(?P<six_port>\d*)|(?P<host>[^:]*):(?P<port>\d*)")


def proxy_for(server: str, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the address of the proxy for requests to a server; None: it is asked directly."""
    environment = os.environ if environment is None else environment
    url = urlsplit(server)
    name = f"{url.scheme}_proxy"
    given = environment.get(name.upper()) or environment.get(name)
    excepted = environment.get("NO_PROXY") or environment.get("no_proxy") or ""
    host = (url.hostname or "").lower()
    if not given or _goes_directly(host, str(url.port or _PORTS[url.scheme]), excepted):
        return None
    return checked(given, name.upper())


def checked(proxy: str, source: str) -> str:
    """Return the address of a proxy, with a scheme; raises AccessError for one that our clients cannot use."""
    address = proxy if "://" in proxy else f"http://{proxy}"
    # The address may hold a password: it is not repeated.
    try:
        url = urlsplit(address)
        usable = url.scheme in _PORTS and bool(url.hostname) and url.port != 0
    except ValueError:
        usable = False
    if not usable:
        scheme = address.partition("://")[0]
        raise AccessError(f"{source} names a proxy by {scheme}://…; expected http:// or https:// with a host")
    return address


def _goes_directly(host: str, port: str, excepted: str) -> bool:
    address = _address(host)
    if host == "localhost" or (address and address.is_loopback):
        return True
    entries = (entry.strip().lower() for entry in excepted.split(","))
    return any(entry == "*" or _covers(entry, host, address, port) for entry in entries if entry)


def _covers(entry: str, host: str, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None, port: str) -> bool:
    """Whether an entry of NO_PROXY means this host: a network, an address, a domain; the latter two with a port."""
    if "/" in entry:
        try:
            return address is not None and address in ipaddress.ip_network(entry, strict=False)
        except ValueError:
            pass
    if found := _WITH_PORT.fullmatch(entry):
        entry, only = found["six"] or found["host"] or "", found["six_port"] or found["port"]
        if not entry or (only and only != port):
            return False
    if excepted := _address(entry):
        return address == excepted
    domain = entry.removeprefix("*")
    return host.endswith(domain) if domain.startswith(".") else host == domain or host.endswith(f".{domain}")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
