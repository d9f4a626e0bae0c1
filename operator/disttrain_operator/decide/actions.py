"""What a decision asks the shell to do. Plain values: no manifest, no request; each says why."""

from dataclasses import dataclass

from disttrain_api.names import Role


@dataclass(frozen=True)
class CreateSupport:
    """Create what an attempt needs, where it is missing: Service, Secret, claim, PodGroup, policies."""

    attempt: int
    why: str
    tries: int = 0
    """How often it was asked for again, after the time with the pods: what is not watched is asked for once per try."""


@dataclass(frozen=True)
class CreatePod:
    """Create one pod of the gang."""

    role: Role
    index: int
    attempt: int
    why: str
    avoid: tuple[str, ...] = ()
    """Nodes that it should not run on where there are others."""
    gated: bool = False
    """No node takes it until it is released."""


@dataclass(frozen=True)
class ReleasePod:
    """Let exactly this pod go, to this node."""

    name: str
    uid: str
    node: str
    at: str
    """The time of the decision, which is written on the pod."""
    why: str


@dataclass(frozen=True)
class DeletePod:
    """Delete exactly this pod; `uid` is a precondition.

    `grace_seconds` None: the pod's own grace period; 0: by force, its node is not asked.
    """

    name: str
    uid: str
    grace_seconds: int | None
    why: str


@dataclass(frozen=True)
class DeleteJob:
    """Delete the job itself; its uid is a precondition."""

    why: str


Action = CreateSupport | CreatePod | ReleasePod | DeletePod | DeleteJob
