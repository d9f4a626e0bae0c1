"""What goes with steps that are skipped."""

from disttrain_api.rules.rule import Rule, Values, given, when
from disttrain_api.run_policy import RestartPolicy
from disttrain_api.spec import JobSpec
from disttrain_api.training import OnMostInRow


def _nowhere_to_roll_back(spec: JobSpec) -> Values | None:
    if spec.training is None or spec.training.skip_steps is None:
        return None
    policy = spec.run_policy
    restarts = policy.restart_policy is RestartPolicy.GANG and policy.max_restarts > 0
    rolls_back = spec.training.skip_steps.on_most_in_row is OnMostInRow.ROLL_BACK
    return when(rolls_back and not (restarts and spec.storage is not None))


_ON_MOST_IN_ROW = given("self.?training.?skipSteps.?onMostInRow", "''")
SKIPPED_STEP_RULES = (
    Rule(
        id="RollBackNeedsRestarts",
        path="spec.training.skipSteps",
        sentence="`onMostInRow` RollBack needs `storage`, and another attempt: `restartPolicy` Gang and `maxRestarts`"
        " of at least 1",
        check=_nowhere_to_roll_back,
        cel=f"{_ON_MOST_IN_ROW} != 'RollBack' || (has(self.storage)"
        " && self.runPolicy.restartPolicy == 'Gang' && self.runPolicy.maxRestarts > 0)",
        reads=(
            "spec.training.skipSteps",
            "spec.storage",
            "spec.runPolicy.restartPolicy",
            "spec.runPolicy.maxRestarts",
        ),
    ),
)
