"""Which settings of `storage` go together."""

from collections.abc import Mapping
from typing import Any

from disttrain_api.names import RESERVED_PREFIX, Label
from disttrain_api.rules.reserved import has_reserved_annotation, has_reserved_label, metadata_is_reserved
from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.spec import JobSpec

_STORAGE = "spec.storage"
_TEMPLATE = f"{_STORAGE}.volumeClaimTemplate"
# A claim in one of these modes can be mounted by one pod, or on one node, only: several pods cannot share it.
_MODES_OF_ONE = ("ReadWriteOnce", "ReadWriteOncePod")


def _places(spec: JobSpec) -> int:
    storage = spec.storage
    return 3 - [storage.claim_name, storage.volume_claim_template, storage.url].count(None) if storage else 1


def _requests(spec: JobSpec) -> Any:
    resources = spec.storage.claim_spec.get("resources") if spec.storage else None
    requests = resources.get("requests") if isinstance(resources, Mapping) else None
    return requests if isinstance(requests, Mapping) else {}


def _claim_of_one_pod(spec: JobSpec) -> Values | None:
    servers = spec.parameter_servers.replicas if spec.parameter_servers else 0
    modes = spec.storage.claim_spec.get("accessModes") if spec.storage else None
    once = isinstance(modes, list) and modes and all(mode in _MODES_OF_ONE for mode in modes)
    return when(bool(once) and spec.pods > 1, pods=spec.pods, workers=spec.workers.replicas, servers=servers)


def _reserved(spec: JobSpec) -> Values | None:
    template = (spec.storage.volume_claim_template if spec.storage else None) or {}
    metadata = template.get("metadata")
    return when(isinstance(metadata, Mapping) and (has_reserved_label(metadata) or has_reserved_annotation(metadata)))


_CLAIM = "self.storage.volumeClaimTemplate.spec"
_SERVERS = given("self.?parameterServers.?replicas", "0")

STORAGE_RULES = (
    Rule(
        id="OneStorage",
        path=_STORAGE,
        scope=_STORAGE,
        sentence="exactly one of `claimName`, `volumeClaimTemplate` and `url` must be given",
        check=lambda spec: when(_places(spec) != 1),
        cel="[has(self.claimName), has(self.volumeClaimTemplate), has(self.url)].exists_one(given, given)",
    ),
    Rule(
        id="RetentionNeedsClaimTemplate",
        path=f"{_STORAGE}.retentionPolicy",
        scope=_STORAGE,
        sentence="`retentionPolicy` needs a claim that the operator creates: set `volumeClaimTemplate`, or remove it",
        check=lambda spec: when(
            spec.storage is not None
            and spec.storage.retention_policy is not None
            and spec.storage.volume_claim_template is None
        ),
        cel="!has(self.retentionPolicy) || has(self.volumeClaimTemplate)",
        reads=(f"{_STORAGE}.retentionPolicy", _TEMPLATE),
    ),
    Rule(
        id="ClaimHasSize",
        path=f"{_TEMPLATE}.spec",
        scope=f"{_TEMPLATE}.spec",
        sentence="a claim needs a size: set `resources.requests.storage`, for example 100Gi",
        check=lambda spec: when(
            spec.storage is not None
            and spec.storage.volume_claim_template is not None
            and "storage" not in _requests(spec)
        ),
        cel="has(self.resources) && has(self.resources.requests) && 'storage' in self.resources.requests",
    ),
    Rule(
        id="ClaimOfOnePod",
        path=f"{_TEMPLATE}.spec.accessModes",
        sentence="a ReadWriteOnce claim serves one pod, and the job has {pods} ({workers} workers +"
        " {servers} servers): use ReadWriteMany",
        check=_claim_of_one_pod,
        cel="!has(self.storage) || !has(self.storage.volumeClaimTemplate)"
        f" || !has({_CLAIM}.accessModes) || {_CLAIM}.accessModes.size() == 0"
        f" || {_CLAIM}.accessModes.exists(m, !(m in {list(_MODES_OF_ONE)}))"
        f" || self.workers.replicas + {_SERVERS} == 1",
        values={"pods": f"self.workers.replicas + {_SERVERS}", "workers": "self.workers.replicas", "servers": _SERVERS},
        reads=(_TEMPLATE, "spec.workers.replicas", "spec.parameterServers.replicas"),
    ),
    Rule(
        id="ClaimMetadata",
        path=f"{_TEMPLATE}.metadata",
        scope=f"{_TEMPLATE}.metadata",
        sentence=f"labels and annotations that begin with '{RESERVED_PREFIX}', and the label '{Label.MANAGED_BY}',"
        " are set by the operator: remove them",
        check=_reserved,
        cel=f"!{metadata_is_reserved('self')}",
    ),
)
