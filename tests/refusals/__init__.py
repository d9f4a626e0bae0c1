"""Jobs for every rule, and the very words with which it is refused: by Python and by the API server."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.checkpoints import CHECKPOINT_REFUSALS, CHECKPOINTS_ACCEPTED
from tests.refusals.combinations import COMBINATION_REFUSALS, COMBINATIONS_ACCEPTED
from tests.refusals.context import CONTEXT_ACCEPTED, CONTEXT_REFUSALS
from tests.refusals.general import GENERAL_ACCEPTED, GENERAL_REFUSALS, NAME_REFUSALS
from tests.refusals.gradient_sums import GRADIENT_SUM_REFUSALS, GRADIENT_SUMS_ACCEPTED
from tests.refusals.models import MODEL_REFUSALS, MODELS_ACCEPTED
from tests.refusals.optimizers import OPTIMIZER_REFUSALS, OPTIMIZERS_ACCEPTED
from tests.refusals.pipelines import FLUSHLESS_REFUSALS, PIPELINE_REFUSALS, PIPELINES_ACCEPTED
from tests.refusals.placement import PLACEMENT_ACCEPTED, PLACEMENT_REFUSALS
from tests.refusals.programs import PROGRAM_REFUSALS, PROGRAMS_ACCEPTED
from tests.refusals.refusal import Refusal
from tests.refusals.relaxed import RELAXED_ACCEPTED, RELAXED_REFUSALS
from tests.refusals.reserved_names import RESERVED_NAME_REFUSALS, RESERVED_NAMES_ACCEPTED
from tests.refusals.servers import SERVER_REFUSALS, SERVERS_ACCEPTED
from tests.refusals.tasks import BETWEEN_STEPS_REFUSALS, ENTRYPOINT_REFUSALS, TASK_REFUSALS, TASKS_ACCEPTED

__all__ = ["ACCEPTED", "NAME_REFUSALS", "REFUSALS", "Refusal"]

REFUSALS = (
    *PLACEMENT_REFUSALS,
    *COMBINATION_REFUSALS,
    *CONTEXT_REFUSALS,
    *MODEL_REFUSALS,
    *OPTIMIZER_REFUSALS,
    *TASK_REFUSALS,
    *BETWEEN_STEPS_REFUSALS,
    *ENTRYPOINT_REFUSALS,
    *CHECKPOINT_REFUSALS,
    *GRADIENT_SUM_REFUSALS,
    *SERVER_REFUSALS,
    *PIPELINE_REFUSALS,
    *FLUSHLESS_REFUSALS,
    *RELAXED_REFUSALS,
    *RESERVED_NAME_REFUSALS,
    *PROGRAM_REFUSALS,
    *GENERAL_REFUSALS,
)

ACCEPTED: dict[str, Mapping[str, Any]] = {
    **PLACEMENT_ACCEPTED,
    **COMBINATIONS_ACCEPTED,
    **CONTEXT_ACCEPTED,
    **MODELS_ACCEPTED,
    **OPTIMIZERS_ACCEPTED,
    **TASKS_ACCEPTED,
    **CHECKPOINTS_ACCEPTED,
    **GRADIENT_SUMS_ACCEPTED,
    **SERVERS_ACCEPTED,
    **PIPELINES_ACCEPTED,
    **RELAXED_ACCEPTED,
    **RESERVED_NAMES_ACCEPTED,
    **PROGRAMS_ACCEPTED,
    **GENERAL_ACCEPTED,
}
"""What breaks no rule."""
