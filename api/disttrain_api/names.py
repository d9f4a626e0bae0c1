"""Every name that crosses a border: group, labels, environment variables, files, reasons, exit codes.

A name lives here once; operator, trainer and CLI import it. Nothing else belongs in this module.
"""

from enum import IntEnum, StrEnum

GROUP = "disttrain.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "DistTrainingJob"
PLURAL = "disttrainingjobs"
SINGULAR = "disttrainingjob"
SHORT_NAME = "dtj"
MANAGED_BY_US = f"{GROUP}/operator"
RESERVED_PREFIX = f"{GROUP}/"
"""Prefix of the labels and annotations that the operator alone sets."""

# A Service may not start with a digit and the longest child name must fit 63 characters:
# job (40) + "-" + 5 hex + "-worker-" + 4 digits + "-a" + 3 digits = 63.
MAX_JOB_NAME_LENGTH = 40
GENERATED_LENGTH = 5
"""Characters that the API server adds to a `metadata.generateName`."""
MAX_REPLICAS = 10_000

CONTAINER = "trainer"
QUEUE_NAME_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's label that names a LocalQueue."""
MASTER_PORT = 29500
PS_PORT = 29600
AGENT_PORT = 29700
GANG_PORT = 29710
"""Where worker 0's agent takes the connections of the other workers' agents."""
HOST_PORTS = range(20_000, 29_000)
"""Ports of pods on the network of their node, below those of Services (30000 and up) and of outgoing connections."""
HOST_AGENT_PORTS = range(15_500, 20_000)
"""Ports of the agents of such pods; as many as HOST_PORTS has pairs."""
RESTARTED_MASTER_PORTS = range(11_000, 15_500)
"""Where the ranks of a command of the user's own meet after a restart in place: on one that worker 0 has free."""
TOKEN_HEADER = "X-Disttrain-Token"
"""Header with the token of the job's agents. Not Authorization, which the API server's proxy keeps for itself."""
CHECKPOINT_PATH = "/v1/checkpoint"
"""Where an agent is asked for a checkpoint."""
RESTART_PATH = "/v1/restart"
"""Where worker 0's agent is asked to restart ranks that hang, in their pods."""
LEADER_PATH = "/v1/leader"
"""Where an agent hears the address of worker 0's pod, if that has taken the place of a lost one."""
STACKS_SIGNAL = 40
"""Real-time signal on which a rank of the trainer writes the stacks of its threads. Linux only."""
DEFAULT_GPU_RESOURCE = "nvidia.com/gpu"
DEFAULT_GRACE_SECONDS = 60
REPLACEMENT_SECONDS = 600
"""So long may a pod take to be made again alone where the others wait for it (`restartStrategy: InPlace`)."""

# Where a pod finds what the operator gives it.
CONFIG_DIR = "/etc/disttrain"
CONFIG_FILE = "job.json"
TOKEN_FILE = "token"
CONFIG_VOLUME = "disttrain-config"
"""Volume of a pod that is the job's Secret, with both files."""
STORAGE_DIR = "/checkpoints"
SCRATCH_DIR = "/scratch"
REPORTS_FOLDER = "reports"
"""Below the scratch folder; made by the agent when it starts its ranks, which a probe of the operator's waits for."""
TERMINATION_LOG = "/dev/termination-log"


class Role(StrEnum):
    """Role of a pod in its job."""

    WORKER = "worker"
    PS = "ps"


class Label:
    """Labels on every child; the informer selects by MANAGED_BY."""

    MANAGED_BY = "app.kubernetes.io/managed-by"
    MANAGER = "disttrain"
    JOB = f"{GROUP}/job-name"
    JOB_UID = f"{GROUP}/job-uid"
    ROLE = f"{GROUP}/role"
    INDEX = f"{GROUP}/index"
    ATTEMPT = f"{GROUP}/attempt"
    TOPOLOGY_GROUP = f"{GROUP}/topology-group"


GANG_GATE = f"{GROUP}/gang"
"""Scheduling gate of pods that wait until their whole gang fits."""


CHECKPOINT_REQUEST = f"{GROUP}/checkpoint-request"
"""Annotation of a job whose every new value asks for a checkpoint; 64 characters of it count."""


class Annotation:
    """Annotations of pods."""

    # The gate writes them when it releases a pod.
    RELEASED_AT = f"{GROUP}/released-at"
    RESERVED_NODE = f"{GROUP}/reserved-node"
    # Nodes that were dead when the pod was created, and that it must not run on.
    NOT_ON = f"{GROUP}/not-on"


class Env:
    """Environment variables of a pod (P) and of a rank, set by the agent (R)."""

    # torchrun's own names.
    MASTER_ADDR = "MASTER_ADDR"  # P
    MASTER_PORT = "MASTER_PORT"  # P
    WORLD_SIZE = "WORLD_SIZE"  # P
    NODE_RANK = "NODE_RANK"  # P
    GROUP_RANK = "GROUP_RANK"  # P
    LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"  # P
    RANK = "RANK"  # R; P only where a pod is one rank of several
    LOCAL_RANK = "LOCAL_RANK"  # R; P only where a pod is one rank of several
    # torchrun's settings, so that an image with its own `torchrun` needs no arguments.
    PET_NNODES = "PET_NNODES"
    PET_NPROC_PER_NODE = "PET_NPROC_PER_NODE"
    PET_NODE_RANK = "PET_NODE_RANK"
    PET_MASTER_ADDR = "PET_MASTER_ADDR"
    PET_MASTER_PORT = "PET_MASTER_PORT"
    PET_RDZV_ID = "PET_RDZV_ID"
    # ours
    JOB_NAME = "DISTTRAIN_JOB_NAME"
    JOB_NAMESPACE = "DISTTRAIN_JOB_NAMESPACE"
    JOB_UID = "DISTTRAIN_JOB_UID"
    ATTEMPT = "DISTTRAIN_ATTEMPT"
    ROLE = "DISTTRAIN_ROLE"
    ROLE_INDEX = "DISTTRAIN_ROLE_INDEX"
    CONFIG = "DISTTRAIN_CONFIG"  # path of job.json; absent where the template has a command of its own
    STORAGE = "DISTTRAIN_STORAGE"  # folder or URL that outlives the pod; absent without `storage`
    SCRATCH = "DISTTRAIN_SCRATCH"  # folder that dies with the pod
    PARALLELISM = "DISTTRAIN_PARALLELISM"  # `parallelism` as JSON; where a job without `training` has one
    PROGRESS = "DISTTRAIN_PROGRESS"  # `progress` as JSON; P, of the first worker, where the job has it
    PS_ADDRESSES = "DISTTRAIN_PS_ADDRESSES"  # host:port,host:port in index order; absent without servers
    GRACE_SECONDS = "DISTTRAIN_GRACE_SECONDS"  # between SIGTERM and SIGKILL
    RESTARTS_IN_PLACE = "DISTTRAIN_RESTARTS_IN_PLACE"  # P; most without a new checkpoint; with restartStrategy InPlace
    RESTART_BACKOFF_SECONDS = "DISTTRAIN_RESTART_BACKOFF_SECONDS"  # P; with RESTARTS_IN_PLACE
    TOKEN = "DISTTRAIN_TOKEN"  # P; path of the job's token; of workers with a command of their own
    GANG_PORT = "DISTTRAIN_GANG_PORT"  # P; of worker 0's agent, for the others; with RESTARTS_IN_PLACE and several pods
    REPLACEMENT = "DISTTRAIN_REPLACEMENT"  # P; of one in place of a lost pod: restarts of the job before; as above
    GENERATION = "DISTTRAIN_GENERATION"  # R; how often the ranks of the attempt have started before; as above
    MEMORY = "DISTTRAIN_MEMORY"  # R; path:path… of files in memory that outlive the ranks; as above, with `training`
    TERMINATION_LOG = "DISTTRAIN_TERMINATION_LOG"  # path; the agent's default is TERMINATION_LOG above
    METRICS_DIR = "DISTTRAIN_METRICS_DIR"  # R; metrics, traces and the like; absent: the checkpoint folder, if any
    NODE_NAME = "DISTTRAIN_NODE_NAME"  # of the machine; with `training.preflight`
    AGENT_PORT = "DISTTRAIN_AGENT_PORT"  # P; where the agent answers; of workers
    REPORT_DIR = "DISTTRAIN_REPORT_DIR"  # R; each rank keeps rank-<global rank>.json here (report.RankReport)


class ExitCode(IntEnum):
    """Exit codes of our own trainer and agent. Codes of other programs mean nothing to us but zero or not.

    `PERMANENT` below are final at once: a restart would meet the same wall.
    """

    DONE = 0
    INVALID_CONFIGURATION = 80
    DATA_NOT_FOUND = 81
    ENTRYPOINT_NOT_IMPORTABLE = 82
    CHECKPOINT_MISMATCH = 83
    STORAGE_NOT_SHARED = 84
    STORAGE_FULL = 85
    FENCED = 86
    CHECKPOINT_BROKEN = 87
    EVALUATION_FAILED = 88  # where `training.evaluation.onFailure` is Fail
    EVALUATION_ABORTED = 89  # it failed on a rank for which others wait; the next attempt goes without
    PORT_IN_USE = 90
    PEER_LOST = 91
    NON_FINITE_LOSS = 92
    LEFT_EARLY = 93  # code of the user ended the process before its work was done
    DISK_FULL = 94  # no room for a file that is no checkpoint
    NETWORK_FAULTY = 95
    CHECKPOINTS_TAKEN = 96  # another job writes to the same folder: to take it back would be to take it from that job
    STOPPED = 143  # SIGTERM obeyed: a checkpoint was written where storage allows it


PERMANENT = frozenset(
    {
        ExitCode.INVALID_CONFIGURATION,
        ExitCode.DATA_NOT_FOUND,
        ExitCode.ENTRYPOINT_NOT_IMPORTABLE,
        ExitCode.CHECKPOINT_MISMATCH,
        ExitCode.STORAGE_NOT_SHARED,
        ExitCode.STORAGE_FULL,
        ExitCode.CHECKPOINT_BROKEN,
        ExitCode.EVALUATION_FAILED,
        ExitCode.CHECKPOINTS_TAKEN,
    }
)


def permanent_reason(code: int) -> str | None:
    """UpperCamelCase reason of a permanent exit code of the trainer, None for every other number."""
    try:
        exit_code = ExitCode(code)
    except ValueError:
        return None
    return exit_reason(exit_code) if exit_code in PERMANENT else None


def exit_reason(code: ExitCode) -> str:
    """`ExitCode.DATA_NOT_FOUND` -> "DataNotFound"."""
    return "".join(word.capitalize() for word in code.name.split("_"))


class Reason(StrEnum):
    """Reasons on conditions and Events (besides `exit_reason` and the kubelet's own waiting reasons)."""

    PENDING = "Pending"
    INVALID_SPEC = "InvalidSpec"
    UNREADABLE = "Unreadable"
    OPERATOR_ERROR = "OperatorError"
    CREATING_PODS = "CreatingPods"
    WAITING_FOR_PODS = "WaitingForPods"
    WAITING_FOR_OLD_PODS = "WaitingForOldPods"
    ALL_PODS_RUNNING = "AllPodsRunning"
    POD_INITIALIZING = "PodInitializing"
    WAITING_FOR_ADDRESS = "WaitingForAddress"
    CRASH_LOOP = "CrashLoopBackOff"
    UNSCHEDULABLE = "Unschedulable"
    VOLUME_NOT_BOUND = "VolumeNotBound"
    QUEUED = "Queued"
    QUEUE_NOT_SERVED = "QueueNotServed"
    GATE_OFF = "GateOff"
    WAITING_FOR_ROOM = "WaitingForRoom"
    NO_ROOM = "NoRoom"
    ROOM_LOST = "RoomLost"
    NOT_RELEASED = "NotReleased"
    QUOTA_EXCEEDED = "QuotaExceeded"
    FORBIDDEN = "Forbidden"
    OPERATOR_FORBIDDEN = "OperatorForbidden"
    NOT_INSTALLED = "NotInstalled"
    MANAGED_ELSEWHERE = "ManagedElsewhere"
    INVALID_POD = "InvalidPod"
    NAME_CONFLICT = "NameConflict"
    CREATE_FAILED = "CreateFailed"
    NOT_SUSPENDED = "NotSuspended"
    SUSPENDING = "Suspending"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    GANG_RESTARTED = "GangRestarted"
    POD_RESTARTED = "PodRestarted"
    RESTARTED_IN_PLACE = "RestartedInPlace"
    ROLLED_BACK = "RolledBack"
    BACKING_OFF = "BackingOff"
    POD_LEAVING = "PodLeaving"
    REPLACING_PODS = "ReplacingPods"
    NOT_RESTARTING = "NotRestarting"
    RANK_SLOW = "RankSlow"
    NOT_STRAGGLING = "NotStraggling"
    HANG_SUSPECTED = "HangSuspected"
    NOT_HANGING = "NotHanging"
    RANK_FAILED = "RankFailed"
    INIT_CONTAINER_FAILED = "InitContainerFailed"
    CONTAINER_FAILED = "ContainerFailed"
    CONTAINER_MISNAMED = "ContainerMisnamed"
    POD_FAILED = "PodFailed"
    POD_LOST = "PodLost"
    POD_SILENT = "PodSilent"
    PEER_LOST = "PeerLost"
    EVICTED = "Evicted"
    REJECTED = "Rejected"
    STORAGE_LIMIT_EXCEEDED = "StorageLimitExceeded"
    PREEMPTED = "Preempted"
    DRAINED = "Drained"
    NODE_LOST = "NodeLost"
    NODE_SUSPECTED = "NodeSuspected"
    OOM_KILLED = "OOMKilled"
    RESTARTS_EXHAUSTED = "RestartsExhausted"
    STARTING_DEADLINE_EXCEEDED = "StartingDeadlineExceeded"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    WORKERS_SUCCEEDED = "WorkersSucceeded"
    SERVERS_SUCCEEDED = "ServersSucceeded"
    ALL_IGNORED = "AllIgnored"
    NOT_FINISHED = "NotFinished"
    TTL_EXPIRED = "TTLExpired"
