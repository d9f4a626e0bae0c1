"""Whether a text is an address that a pod can have, or one of this machine alone. Pure."""

import ipaddress
from contextlib import suppress

MAX_LETTERS = 45
"""Letters of the longest address as text."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def pod_address(text: object, *, loopback: bool = False) -> Address | None:
    """Return the address that a text is, if a pod can have it where others reach it; None: it is no literal, or one of
    the machine itself, of a link, of a group, or of nobody. loopback: those of the machine itself alone, where all pods
    are its processes."""
    try:
        address = ipaddress.ip_address(text) if isinstance(text, str) and len(text) <= MAX_LETTERS else None
    except ValueError:
        return None
    if address is None or getattr(address, "ipv4_mapped", None) or getattr(address, "scope_id", None):
        return None
    if address.is_loopback:
        return address if loopback else None
    return None if loopback or address.is_link_local or address.is_multicast or address.is_unspecified else address


def is_loopback(host: str) -> bool:
    """Return whether a host is this machine's own loopback interface, as in a local run."""
    if host == "localhost":
        return True
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return False
