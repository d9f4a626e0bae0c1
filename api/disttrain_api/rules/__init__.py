"""THE table of rules about a job, beyond what types and bounds of single fields say.

CEL at admission, `disttrain validate` and the operator all read it, so that they refuse alike and with the same words.
"""

from disttrain_api.rules.batch import BATCH_RULES
from disttrain_api.rules.between_steps import BETWEEN_STEPS_RULES
from disttrain_api.rules.checkpoints import CHECKPOINT_RULES
from disttrain_api.rules.combinations import COMBINATION_RULES
from disttrain_api.rules.context import CONTEXT_RULES
from disttrain_api.rules.ddp import DDP_RULES
from disttrain_api.rules.disruption import DISRUPTION_RULES
from disttrain_api.rules.failures import FAILURE_RULES
from disttrain_api.rules.flushless import FLUSHLESS_RULES
from disttrain_api.rules.gradient_sums import GRADIENT_SUM_RULES
from disttrain_api.rules.layout import LAYOUT_RULES
from disttrain_api.rules.models import MODEL_RULES
from disttrain_api.rules.pipeline import PIPELINE_RULES
from disttrain_api.rules.pods import POD_RULES
from disttrain_api.rules.progress import PROGRESS_RULES
from disttrain_api.rules.relaxed import RELAXED_RULES
from disttrain_api.rules.root import FREEZE_RULES, NAME_RULES, FreezeRule, NameRule
from disttrain_api.rules.rule import Rule
from disttrain_api.rules.scheduling import SCHEDULING_RULES
from disttrain_api.rules.servers import SERVER_RULES
from disttrain_api.rules.settings import SETTING_RULES
from disttrain_api.rules.skipped_steps import SKIPPED_STEP_RULES
from disttrain_api.rules.storage import STORAGE_RULES
from disttrain_api.rules.tasks import TASK_RULES

__all__ = ["FREEZE_RULES", "NAME_RULES", "RULES", "FreezeRule", "NameRule", "Rule"]

RULES: tuple[Rule, ...] = (
    *LAYOUT_RULES,
    *PIPELINE_RULES,
    *FLUSHLESS_RULES,
    *COMBINATION_RULES,
    *CONTEXT_RULES,
    *MODEL_RULES,
    *TASK_RULES,
    *BETWEEN_STEPS_RULES,
    *GRADIENT_SUM_RULES,
    *DDP_RULES,
    *SKIPPED_STEP_RULES,
    *RELAXED_RULES,
    *SERVER_RULES,
    *BATCH_RULES,
    *SETTING_RULES,
    *STORAGE_RULES,
    *CHECKPOINT_RULES,
    *FAILURE_RULES,
    *SCHEDULING_RULES,
    *POD_RULES,
    *PROGRESS_RULES,
    *DISRUPTION_RULES,
)
