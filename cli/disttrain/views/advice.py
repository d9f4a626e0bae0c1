"""Advice for reasons of conditions and verdicts, if the operator's own sentence has none. Pure."""

import signal

from disttrain_api.names import Reason
from disttrain_api.status import FailureClass, Verdict

# The reasons of disttrain_api.names.Reason and exit_reason, and the kubelet's. {name}, {namespace} are filled in.
FAILED: dict[str, str] = {
    "InvalidSpec": "Correct the manifest (`disttrain validate FILE` lists every problem), delete the job and"
    " submit it again",
    "InvalidConfiguration": "Correct the manifest as the message says; a restart would fail the same way",
    "DataNotFound": "Make the data available to every pod (a volume, or the image), or correct the path",
    "EntrypointNotImportable": "Put the module into the image, or correct `entrypoint`; `disttrain run FILE` tries it"
    " here",
    "CheckpointMismatch": "Set `training.checkpoint.folder` to an empty folder, or restore the checkpoint's model",
    "StorageNotShared": "Use storage that all pods share: a claim with ReadWriteMany, or `storage.url`",
    "StorageFull": "Free or enlarge the storage, or keep fewer checkpoints; then submit the job again: it continues"
    " from the last complete one",
    "CheckpointBroken": "Remove the damaged checkpoint's folder; the job then starts from the one before it",
    "EvaluationFailed": "Correct the evaluation, or set `training.evaluation.onFailure` to Warn",
    "CheckpointsTaken": "Give each job its own `training.checkpoint.folder`: another job writes to this one's",
    "EvaluationAborted": "Correct the evaluation; until then the job trains without it",
    "OOMKilled": "Raise the container's memory limit, or lower `training.microBatchSize`, or set"
    " `training.activationCheckpointing`; a shard degree spreads the model over more ranks",
    "RankFailed": "Correct the program; the exception is above, and the log has the rest",
    "PodFailed": "Correct the program; the log of its pod has more",
    "InitContainerFailed": "Correct the named init container, or what it needs",
    "NonFiniteLoss": "Lower the learning rate or clip gradients (`training.optimizer`), or use BF16 instead of FP16",
    "LeftEarly": "Remove the call that exits the process before its work is done",
    "DiskFull": "Give the pods more ephemeral storage, or write less",
    "PortInUse": "Without `hostNetwork` this resolves itself; with it, another program on the node uses the port",
    "NetworkFaulty": "Take the named node out of service (`kubectl cordon`) and look at its network, or at its DNS",
    "PeerLost": "Look at the log of the named peer; for your own programs, at the exceptions of the other ranks",
    "NodeLost": "Look at the node; the job continues by itself if other nodes have room",
    "Evicted": "Request as much memory and disk as the pod uses, so that its node does not evict it",
    "StorageLimitExceeded": "Raise the named limit (`sizeLimit` of the volume, or `ephemeral-storage` in the"
    " container's limits), or write less",
    "Rejected": "Nothing if other nodes have room; look at the node if it refuses pods repeatedly",
    "Preempted": "Give the job a higher `priorityClassName`, or let it wait in a queue",
    "Drained": "Nothing: the node was drained, and the job continues elsewhere",
    "PodLost": "Find out what deletes pods (`disttrain events {name}`)",
    "PodSilent": "Look at the pod's processes on its node (`ps`: state T is stopped, D waits for a disk), and at its"
    " memory",
    "Stopped": "Find out what stops pods: they ended on SIGTERM",
    "Fenced": "Nothing: a newer attempt owns the checkpoints",
    "RestartsExhausted": "Fix the cause and submit the job again: with `storage` it continues from the last checkpoint",
    "WaitingForAddress": "Fix the cluster's DNS, or the network between it and the named pods",
    "StartingDeadlineExceeded": "Fix what kept the pods from starting, or raise `runPolicy.startingDeadlineSeconds`",
    "ProgressDeadlineExceeded": "Look at where the rank waits (the calls are above, the innermost first): in a"
    " collective call that a peer did not make, or for data; if a step may take that long, raise"
    " `runPolicy.progressDeadlineSeconds`",
    "DeadlineExceeded": "Raise `spec.activeDeadlineSeconds`, and submit the job again: with `storage` it continues"
    " from the last checkpoint",
    "NoRoom": "Request fewer or smaller pods, free room, or raise `schedulingPolicy.timeoutSeconds`",
    "GateOff": "Choose another `gangScheduler`, or ask an administrator for the gate",
}

PENDING: dict[str, str] = {
    "WaitingForAddress": "`kubectl get endpointslices -n {namespace}` shows whether worker 0 has an address in the"
    " job's Service; `kubectl get pods -n kube-system` whether the cluster's DNS runs",
    "Unschedulable": "`kubectl get nodes` and `disttrain doctor` show what the cluster has",
    "WaitingForRoom": "Wait for room, or request fewer or smaller pods; `disttrain doctor` shows what the nodes have",
    "RoomLost": "Nothing: the gang tries again",
    "Queued": "`kubectl get workloads -n {namespace}` shows Kueue's reason and the place in the queue",
    "QueueNotServed": "Ask an administrator for Kueue in this namespace, or remove the queue's name",
    "VolumeNotBound": "`kubectl describe pvc -n {namespace}` shows what the claim waits for",
    "ManagedElsewhere": "Look at the controller that `spec.managedBy` names",
    "OperatorForbidden": "Ask an administrator to grant the operator this right; the chart's own roles include it",
    "OperatorError": "Report it, with the operator's log (`kubectl logs -n disttrain deploy/disttrain`)",
    "CreateFailed": "`disttrain events {name}` shows what was refused",
}

CLASSES: dict[str, str] = {
    "Configuration": "a restart would fail the same way, so there was none",
    "Disruption": "the cluster ended it, so the restart is not counted",
    "NodeLost": "the node was lost, so the restart is not counted",
    "NotStarted": "not all of its pods had started, so the restart is not counted",
}

_OF_CLASS: dict[str, str] = {
    FailureClass.OUT_OF_MEMORY: Reason.OOM_KILLED,
    FailureClass.OUT_OF_STORAGE: Reason.STORAGE_LIMIT_EXCEEDED,
    FailureClass.PROGRAM: Reason.RANK_FAILED,
    FailureClass.HANG: Reason.PROGRESS_DEADLINE_EXCEEDED,
}
_OF_ANY_PROGRAM = frozenset({Reason.RANK_FAILED, Reason.POD_FAILED})
_NOT_STARTED = (126, 127, 128)
"""Exit codes of shells, and of the container runtime, for a program that is not there or may not be executed."""
_CRASHES = frozenset({signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV})

_COMMAND = (
    "Correct the command (`workers.command`, or that of the template's container), or put the program into the image"
)
_MODULE = "Put the module into the image, or correct the import; `disttrain run FILE` tries it here"
_CRASHED = (
    "Look for native code that crashes: an extension, a library of another version than torch was built for, or a full"
    " `/dev/shm`; `PYTHONFAULTHANDLER=1` in `workers.env` has the log show where"
)
_KILLED = (
    "Find out what killed it: somebody who may exec into the pod, its own script, or the node's kernel because memory"
    " ran out (`dmesg` on the node)"
)


def advice_on(reason: str, verdict: Verdict | None) -> list[str]:
    """Return what to do about a failure, the cause first: where restarts are used up, on what each ended with."""
    if reason == Reason.RESTARTS_EXHAUSTED and verdict is not None:
        last = verdict.reason if verdict.reason != reason else _OF_CLASS.get(verdict.class_ or "", "")
        return [*_of_verdict(last, verdict), FAILED[reason]]
    return _of_verdict(reason, verdict)


def _of_verdict(reason: str, verdict: Verdict | None) -> list[str]:
    if verdict is not None and reason in _OF_ANY_PROGRAM:
        return [_of_program(verdict) or FAILED[reason]]
    return [FAILED[reason]] if reason in FAILED else [PENDING[reason]] if reason in PENDING else []


def _of_program(verdict: Verdict) -> str | None:
    if verdict.signal == signal.SIGKILL:
        return _KILLED
    if verdict.signal in _CRASHES:
        return _CRASHED
    if verdict.exit_code in _NOT_STARTED:
        return _COMMAND
    return _MODULE if "ModuleNotFoundError" in verdict.message or "ImportError" in verdict.message else None
