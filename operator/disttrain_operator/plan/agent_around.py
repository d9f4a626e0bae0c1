"""The agent around a command of the user's own, which starts it again in its pod (`restartStrategy: InPlace`).

Whether the image has the agent is seen in the pod alone. Without it the command runs as without the setting, and no pod
waits for another: one that was to take the place of a lost one ends, and the operator recreates the gang.
"""

from disttrain_api.names import TERMINATION_LOG, Env, ExitCode, exit_reason
from disttrain_api.report import PodReport, RankFailure, encode_pod_report

_WHY = "no restart in place: its image has no agent of disttrain that can be imported"
_NOT_STARTED = RankFailure(rank=0, exit_code=ExitCode.PEER_LOST, reason=exit_reason(ExitCode.PEER_LOST), message=_WHY)
_SCRIPT = f"""
import os, sys
# As -P does, which Python has since 3.11.
sys.path = [path for path in sys.path if path]
try:
    from disttrain_agent.main import run_own_program
except Exception as error:
    print("[agent] {_WHY}:", error, flush=True)
    if "{Env.REPLACEMENT}" in os.environ:
        with open(os.environ.get("{Env.TERMINATION_LOG}", "{TERMINATION_LOG}"), "w") as message:
            message.write({encode_pod_report(PodReport(failure=_NOT_STARTED))!r})
        sys.exit({ExitCode.PEER_LOST:d})
    os.execvp(sys.argv[1], sys.argv[1:])
sys.exit(run_own_program(sys.argv[1:]))
"""
AGENT_AROUND = ("python3", "-c", _SCRIPT)
"""What stands before the command."""
