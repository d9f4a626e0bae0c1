"""The one base of every model in this package."""

from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """Frozen, camelCase outside and snake_case inside; unknown fields are errors.

    The string below a field is its description: in the CRD, in `kubectl explain` and in docs/reference.md.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        alias_generator=to_camel,
        # Python code builds models by field name; manifests are read by alias alone (manifest.py).
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )
