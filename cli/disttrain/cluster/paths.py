"""Paths of a cluster's objects: what a user, a file or another object calls them stays one part of a path."""

from urllib.parse import quote

from disttrain.errors import USAGE, CommandError


def path_of(api: str, kind: str, namespace: str | None, *within: str) -> str:
    """Return the path of a kind's objects in a namespace (None: in all), or of what `within` names there.

    api: begin of the paths of its group and version. Raises CommandError where a name would lead elsewhere.
    """
    parts = (kind, *within) if namespace is None else ("namespaces", namespace, kind, *within)
    if wrong := [part for part in parts if part in ("", ".", "..")]:
        raise CommandError(f"'{wrong[0]}' is no name in a cluster", USAGE)
    return "/".join((api, *(quote(part, safe="") for part in parts)))
