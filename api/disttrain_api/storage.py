"""`spec.storage`: where checkpoints outlive pods."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, JsonValue

from disttrain_api.base import ApiModel


class Retention(StrEnum):
    """What becomes of a claim."""

    RETAIN = "Retain"
    DELETE = "Delete"


class RetentionPolicy(ApiModel):
    """Fate of the claim that the operator creates, as in a StatefulSet."""

    when_deleted: Retention = Retention.RETAIN
    """When the job is deleted: Retain keeps the claim, Delete deletes it, too."""


class Storage(ApiModel):
    """Where checkpoints outlive pods: a volume at /checkpoints in every pod, or an object store. Exactly one of
    `claimName`, `volumeClaimTemplate` and `url`."""

    claim_name: Annotated[str, Field(min_length=1, max_length=253)] | None = None
    """An existing PersistentVolumeClaim of the job's namespace."""
    volume_claim_template: dict[str, JsonValue] | None = None
    """Labels, annotations and spec of the claim to create for the job; `resources.requests.storage` is required.
    Without `accessModes` it is ReadWriteMany."""
    url: Annotated[str, Field(pattern=r"^s3://[^/ ]+(/[^/ ]+)*$", max_length=1024)] | None = None
    """A prefix in an object store; credentials and endpoint come from the environment of the container `trainer`."""
    retention_policy: RetentionPolicy | None = None
    """Fate of the claim that the operator creates. Absent: it outlives the job."""

    @property
    def claim_outlives_job(self) -> bool:
        """Whether a claim that the operator makes stays when the job is deleted."""
        return self.retention_policy is None or self.retention_policy.when_deleted is Retention.RETAIN

    @property
    def claim_spec(self) -> dict[str, Any]:
        """The spec of the claim that the operator makes, {} where it makes none."""
        spec = (self.volume_claim_template or {}).get("spec")
        return spec if isinstance(spec, dict) else {}
