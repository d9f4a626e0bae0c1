"""The objects that the operator would create for a job, by its own plan. Pure."""

import re
from dataclasses import dataclass
from typing import Any

from disttrain_api.names import Role
from disttrain_api.spec import DistTrainingJob, JobSpec
from disttrain_operator.plan.desired import (
    GangPlan,
    Site,
    claim,
    default_environment,
    disruption_budget,
    pod_group,
    secret,
    service,
)

Manifest = dict[str, Any]

_UID = "00000000-0000-0000-0000-000000000000"
"""The API server gives each job its own."""
_DIGEST = re.compile("^-[0-9a-f]{16}")
_TOKEN = "made by the operator"
_OPERATORS_IMAGE = "the operator's trainer image"


@dataclass(frozen=True)
class Planned:
    """A job before the API server has it; see PlannedJob."""

    name: str
    namespace: str
    spec: JobSpec
    uid: str = _UID


@dataclass(frozen=True)
class PlannedObject:
    """One object, or several that are alike."""

    kind: str
    name: str
    """With <uid> for the first characters of the job's uid, and <index> where there are several."""
    count: int
    what: str


def planned_objects(manifest: DistTrainingJob) -> list[PlannedObject]:
    """Return what the first attempt of the job consists of, at a site without further settings."""
    metadata, spec = manifest.metadata, manifest.spec
    job = Planned(metadata.name, metadata.namespace or "default", spec)
    site = Site(trainer_image=_OPERATORS_IMAGE, token=_TOKEN)
    gang = GangPlan(job, 1, site)
    found = [_pods(job, gang.pod(Role.WORKER, 0), Role.WORKER, spec.workers.replicas, spec.workers.ranks_per_pod)]
    if spec.parameter_servers is not None:
        found.append(_pods(job, gang.pod(Role.PS, 0), Role.PS, spec.parameter_servers.replicas, None))
    for manifest_of, what in (
        (service(job, site), "headless: where pods find each other"),
        (secret(job, site), ""),
        (default_environment(job, site), ""),
        (claim(job), ""),
        (pod_group(job, 1), "pods are scheduled together"),
        (disruption_budget(job), "keeps pods from evictions"),
    ):
        if manifest_of is not None:
            found.append(PlannedObject(manifest_of["kind"], _name(job, manifest_of), 1, _what(manifest_of) or what))
    return found


def _pods(job: Planned, pod: Manifest, role: Role, count: int, ranks: int | None) -> PlannedObject:
    trainer = pod["spec"]["containers"][0]
    limits = trainer.get("resources", {}).get("limits", {})
    parts = ["parameter server" if ranks is None else f"{ranks} rank{'' if ranks == 1 else 's'}"]
    parts += [f"{amount} {resource}" for resource, amount in limits.items()]
    parts.append(f"image {trainer['image']}")
    name = _name(job, pod)
    stem = f"-{role}-"
    before, _, after = name.rpartition(f"{stem}0")
    return PlannedObject("Pod", f"{before}{stem}<index>{after}" if count > 1 else name, count, ", ".join(parts))


def _name(job: Planned, manifest: Manifest) -> str:
    """Names of Secrets have a digest of the job's token, too."""
    name: str = manifest["metadata"]["name"]
    rest = name.removeprefix(f"{job.name}-{_UID[:5]}")
    return f"{job.name}-<uid>{_DIGEST.sub('-<digest>', rest) if manifest['kind'] == 'Secret' else rest}"


def _what(manifest: Manifest) -> str:
    if manifest["kind"] == "Secret":
        return "immutable: " + ", ".join(sorted(manifest["stringData"]))
    if manifest["kind"] == "PersistentVolumeClaim":
        spec = manifest["spec"]
        size = spec.get("resources", {}).get("requests", {}).get("storage", "no size")
        return f"{size}, {', '.join(spec['accessModes'])}"
    return ""
