"""Why an image was not pulled, in words that stay the same from one try to the next."""

from collections.abc import Iterator
from typing import Any

from disttrain_api.spec import JobSpec
from disttrain_operator.decide.observed import Waiting

REASON = "ImagePullBackOff"
REASONS = frozenset({REASON, "ErrImagePull", "RegistryUnavailable", "SignatureValidationFailed"})
"""The kubelet alternates between the first and the others; one word for all keeps the status quiet."""

# What containerd and CRI-O write, in lower case; the first that is found counts. Docker Hub denies access to what it
# does not have. What says "no match for platform" goes on with "not found".
_CAUSES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (
        (
            *("registry is unavailable", "dial tcp", "no such host", "connection refused", "connection reset"),
            *("i/o timeout", "deadline exceeded", "tls handshake", "x509:", "server gave http response"),
        ),
        "the node did not reach the registry",
        "check the registry's name and certificate, and the node's network",
    ),
    (
        ("signature validation failed",),
        "its signature was not accepted",
        "sign it as the node's policy asks, or use one that is signed",
    ),
    (
        ("no match for platform", "no matching manifest", "no image found in image index"),
        "it was not built for the node's architecture",
        "build it for that one, or choose other nodes",
    ),
    (
        ("unauthorized", "denied", "forbidden", "authorization failed", "authentication required"),
        "the registry has no such image or denies it to this pod",
        "check the image's name, and the imagePullSecrets of the template or of the service account",
    ),
    (
        ("not found", "manifest unknown", "name unknown"),
        "the registry has no such image",
        "check the image's name and tag, and that it was pushed",
    ),
)
_UNKNOWN = "check the image's name and tag, and the pull secret"
_OF_THE_OPERATOR = (
    "the job names no image, so it gets the operator's: build and push it, or name another in the chart's value"
    " trainer.image (docs/installing.md)"
)


EVERY_ADVICE = (*(advice for _, _, advice in _CAUSES), _UNKNOWN, _OF_THE_OPERATOR)


def why_not_pulled(waiting: Waiting, spec: JobSpec) -> str:
    """The sentence on an image that a pod waits for, and what to do."""
    text = waiting.message.replace(waiting.image, "").lower()  # an image may be called anything
    cause, advice = next(
        ((cause, advice) for patterns, cause, advice in _CAUSES if _any(patterns, text)), ("", _UNKNOWN)
    )
    if waiting.image and waiting.image not in _images(spec):
        advice = _OF_THE_OPERATOR
    return f'image "{waiting.image}" cannot be pulled' + (f": {cause}" if cause else "") + f"; {advice}"


def _any(patterns: tuple[str, ...], text: str) -> bool:
    return any(pattern in text for pattern in patterns)


def _images(spec: JobSpec) -> set[str]:
    """Return the images that the job names, of all containers and image volumes of its pods."""
    roles = (spec.workers, spec.parameter_servers)
    return {image for role in roles if role is not None for image in _below(role.pod_template.get("spec"))}


def _below(given: Any) -> Iterator[str]:
    pod = given if isinstance(given, dict) else {}
    for part in ("initContainers", "containers"):
        yield from (container.get("image", "") for container in pod.get(part) or ())
    yield from ((volume.get("image") or {}).get("reference", "") for volume in pod.get("volumes") or ())
