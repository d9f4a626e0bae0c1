"""Faults that users meet, each as the job that has it: how the cluster shows it, and what `disttrain why` must say."""

from dataclasses import dataclass, field
from typing import Any

from tests.builders import merge
from tests.e2e.conftest import TRAINER_IMAGE
from tests.e2e.faulty_jobs import (
    APART,
    SHARED,
    container,
    damages,
    mounting,
    runs,
    sleeps,
    small_memory,
    trains,
    volume,
)
from tests.e2e.manifests import ONE_THREAD, STORAGE

SLOT, QUOTA = "example.com/no-node-has-it", "example.com/quota"

OBJECTS: list[dict[str, Any]] = [
    {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "small"},
        "spec": {"hard": {f"requests.{QUOTA}": "1"}},
    },
    {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": SHARED},
        "spec": STORAGE["volumeClaimTemplate"]["spec"] | {"accessModes": ["ReadWriteMany"]},
    },
]
"""What stands in the namespace before the jobs."""


@dataclass(frozen=True)
class Fault:
    """A job that cannot do what it shall."""

    manifest: dict[str, Any]
    shown: tuple[str, str]
    """Type and reason of the condition with which the operator shows it."""
    says: tuple[str, ...]
    """What the sentence of the cause has."""
    todo: tuple[str, ...]
    """What the sentence of what to do has."""
    after: str = field(default="")
    """The job that must have finished before this one is made."""

    @property
    def name(self) -> str:
        """The job's name."""
        return str(self.manifest["metadata"]["name"])


PENDING, FAILED = "Running", "Failed"

NOT_STARTED = [
    Fault(
        sleeps("no-image", container(image="registry.invalid/team/train:1")),
        (PENDING, "ImagePullBackOff"),
        ('image "registry.invalid/team/train:1" cannot be pulled',),
        ("Check the registry's name",),
    ),
    Fault(
        sleeps("image-not-loaded", container(image="example.com/team/train:1", imagePullPolicy="Never")),
        (PENDING, "ErrImageNeverPull"),
        ("example.com/team/train:1", "not present"),
        ("load it there or allow pulling",),
    ),
    Fault(
        sleeps("image-misspelt", container(image="Team/Train:1:2")),
        (PENDING, "InvalidImageName"),
        ("Team/Train:1:2",),
        ("Correct the image's name",),
    ),
    Fault(
        sleeps("no-gpus", workers={"gpusPerPod": 8}),
        (PENDING, "Unschedulable"),
        ("nvidia.com/gpu", "no node"),
        ("kubectl get nodes",),
    ),
    Fault(
        sleeps("too-much-memory", workers={"resources": {"requests": {"memory": "100Ti"}}}),
        (PENDING, "Unschedulable"),
        ("memory",),
        ("Ask for less per pod",),
    ),
    Fault(
        sleeps("no-such-node", {"nodeSelector": {"pool": "a100"}}),
        (PENDING, "Unschedulable"),
        ("no node has the label pool=a100",),
        ("Correct the `nodeSelector`",),
    ),
    Fault(
        sleeps("too-far-apart", {"affinity": APART}, workers={"replicas": 3}),
        (PENDING, "Unschedulable"),
        ("anti-affinity",),
        ("podAntiAffinity",),
    ),
    Fault(
        sleeps("over-quota", workers={"replicas": 2, "resources": {"limits": {QUOTA: 1}}}),
        (PENDING, "QuotaExceeded"),
        ("exceeded quota: small", QUOTA),
        ("quota",),
    ),
    Fault(
        sleeps("privileged", container(securityContext={"privileged": True}), runPolicy={"podSecurity": "Template"}),
        (PENDING, "Forbidden"),
        ('violates PodSecurity "restricted:latest"', "privileged"),
        ("Pod Security",),
    ),
    Fault(
        sleeps("no-secret", container(envFrom=[{"secretRef": {"name": "tokens"}}])),
        (PENDING, "CreateContainerConfigError"),
        ('secret "tokens" not found',),
        ("Secret",),
    ),
    Fault(
        sleeps("no-config-map", volume({"configMap": {"name": "settings"}})),
        (PENDING, "FailedMount"),
        ('configmap "settings" not found',),
        ("volumes",),
    ),
    Fault(
        sleeps("no-claim", storage={"claimName": "absent"}),
        (PENDING, "VolumeNotBound"),
        ('PersistentVolumeClaim "absent" does not exist',),
        ("Make it",),
    ),
    Fault(
        sleeps(
            "no-storage-class", storage=merge(STORAGE, {"volumeClaimTemplate": {"spec": {"storageClassName": "x"}}})
        ),
        (PENDING, "VolumeNotBound"),
        ("has no volume yet",),
        ("kubectl describe pvc",),
    ),
    Fault(
        sleeps("no-account", {"serviceAccountName": "trainer"}),
        (PENDING, "Forbidden"),
        ('serviceaccount "trainer" not found',),
        ("service account",),
    ),
    Fault(
        sleeps("no-priority", {"priorityClassName": "urgent"}),
        (PENDING, "Forbidden"),
        ("no PriorityClass with name urgent was found",),
        ("kubectl get priorityclasses",),
    ),
    Fault(
        sleeps("no-runtime", {"runtimeClassName": "nvidia"}),
        (PENDING, "Forbidden"),
        ('RuntimeClass "nvidia" not found',),
        ("kubectl get runtimeclasses",),
    ),
    Fault(
        sleeps("no-queue", runPolicy={"schedulingPolicy": {"gangScheduler": "Kueue", "queueName": "research"}}),
        (PENDING, "QueueNotServed"),
        ("queue research", "Kueue does not manage them"),
        ("remove the queue's name",),
    ),
    Fault(
        sleeps("no-gate", runPolicy={"schedulingPolicy": {"gangScheduler": "Gate"}}),
        (FAILED, "GateOff"),
        ("gate",),
        ("another `gangScheduler`",),
    ),
    Fault(
        sleeps("suspended", suspend=True),
        ("Suspended", "Suspended"),
        ("spec.suspend is true",),
        ("disttrain resume suspended",),
    ),
    Fault(
        sleeps(
            "late", container(envFrom=[{"secretRef": {"name": "tokens"}}]), runPolicy={"startingDeadlineSeconds": 20}
        ),
        (FAILED, "CreateContainerConfigError"),
        ('secret "tokens" not found',),
        ("Secret",),
    ),
]
"""Jobs whose pods cannot be made, or do not start."""

PROGRAMS = [
    Fault(
        runs("memory", "exec python3 -c 'x = bytes(1) * 2**30'", workers={"resources": {"limits": {"memory": "64Mi"}}}),
        (FAILED, "OOMKilled"),
        ("ran out of memory and was killed (memory limit 64Mi)",),
        ("Raise the container's memory limit",),
    ),
    Fault(
        runs("raises", """exec python3 -c 'raise KeyError("label")'"""),
        (FAILED, "RankFailed"),
        ("exited with code 1", "KeyError", "It said: KeyError: 'label'"),
        ("Correct the program",),
    ),
    Fault(
        runs("no-module", "exec python3 -c 'import flash_attention'"),
        (FAILED, "RankFailed"),
        ("ModuleNotFoundError", "No module named 'flash_attention'"),
        ("Put the module into the image",),
    ),
    Fault(
        runs("no-script", "exec python3 /app/train.py"),
        (FAILED, "RankFailed"),
        ("exited with code 2", "can't open file '/app/train.py'"),
        ("Correct the program",),
    ),
    Fault(
        sleeps("no-program", container(command=["trainn"]), runPolicy={"maxRestarts": 0}),
        (FAILED, "RankFailed"),
        ('"trainn"', "executable file not found"),
        ("Correct the command",),
    ),
    Fault(
        runs("not-found", "trainn --steps 5"),
        (FAILED, "RankFailed"),
        ("exited with code 127", "trainn"),
        ("Correct the command",),
    ),
    Fault(
        runs("killed", "python3 -c 'import os; os.kill(os.getpid(), 9)'; exit $?"),
        (FAILED, "RankFailed"),
        ("killed by signal 9",),
        ("Find out what",),
    ),
    Fault(
        runs("crashes", "exec python3 -c 'import ctypes; ctypes.string_at(0)'"),
        (FAILED, "RankFailed"),
        ("killed by signal 11",),
        ("native code",),
    ),
    Fault(
        sleeps(
            "init",
            {
                "initContainers": [
                    {"name": "fetch", "image": TRAINER_IMAGE, "command": ["sh", "-c", "echo no such bucket; exit 42"]}
                ]
            },
            runPolicy={"maxRestarts": 0},
        ),
        (FAILED, "InitContainerFailed"),
        ("init container fetch", "exited with code 42", "It said: no such bucket"),
        ("Correct the named init container",),
    ),
    Fault(
        sleeps("deadline", activeDeadlineSeconds=15),
        (FAILED, "DeadlineExceeded"),
        ("activeDeadlineSeconds (15",),
        ("Raise `spec.activeDeadlineSeconds`",),
    ),
    Fault(
        runs(
            "too-much-disk",
            "head -c 40M /dev/zero > /more/file; sleep 3600",
            workers={
                "template": {
                    "spec": {
                        "volumes": [{"name": "more", "emptyDir": {"sizeLimit": "1Mi"}}],
                        "containers": [
                            mounting("/more") | {"command": ["sh", "-c", "head -c 40M /dev/zero > /more/f; sleep 3600"]}
                        ],
                    }
                }
            },
        ),
        (FAILED, "StorageLimitExceeded"),
        ("was evicted for using more storage than it may", "1Mi"),
        ("Raise the named limit",),
    ),
]
"""Jobs whose program ends with an error."""

TRAININGS = [
    Fault(
        trains("no-model", training={"model": {"name": None, "entrypoint": "my_models:Large"}}),
        (FAILED, "EntrypointNotImportable"),
        ("`training.model.entrypoint`", "No module named 'my_models'"),
        ("Put the module into the image",),
    ),
    Fault(
        trains(
            "no-data", training={"model": {"name": "gpt"}, "data": {"name": "text", "config": {"paths": ["/data/a"]}}}
        ),
        (FAILED, "DataNotFound"),
        ("/data/a",),
        ("Make the data available to every pod",),
    ),
    Fault(
        trains("not-finite", training={"optimizer": {"learningRate": 1e30}}),
        (FAILED, "NonFiniteLoss"),
        ("the loss of step 2 is nan",),
        ("Lower the learning rate",),
    ),
    Fault(
        trains("does-not-fit", training={"model": {"config": {"hiddenSizes": [100_000, 100_000]}}}),
        (FAILED, "InvalidConfiguration"),
        ("memory",),
        ("Correct the manifest",),
    ),
    Fault(
        trains("odd-heads", training={"model": {"name": "gpt", "config": {"heads": 3}}, "data": {"name": "text"}}),
        (FAILED, "InvalidSpec"),
        ("heads",),
        ("Correct the manifest",),
    ),
    Fault(
        trains("first", storage={"claimName": SHARED}, training={"checkpoint": {"folder": "kept", "interval": 5}}),
        ("Complete", "WorkersSucceeded"),
        ("first succeeded", "5 steps"),
        (),
    ),
    Fault(
        trains(
            "other-model",
            storage={"claimName": SHARED},
            training={"checkpoint": {"folder": "kept", "interval": 5}, "model": {"config": {"hiddenSizes": [7]}}},
        ),
        (FAILED, "CheckpointMismatch"),
        ("/checkpoints/kept/step-5 is of another model",),
        ("`training.checkpoint.folder`",),
        after="first",
    ),
    Fault(
        trains(
            "damaged",
            damages("kept", "damaged"),
            storage={"claimName": SHARED},
            training={"checkpoint": {"folder": "damaged", "interval": 5}, "steps": 10},
        ),
        (FAILED, "CheckpointBroken"),
        ("/checkpoints/damaged/step-5",),
        ("Remove the damaged checkpoint's folder",),
        after="first",
    ),
    Fault(
        trains(
            "full",
            merge(ONE_THREAD, {"spec": small_memory("/checkpoints/full")}),
            storage={"claimName": SHARED},
            training={
                "checkpoint": {"folder": "full", "interval": 2},
                "model": {"config": {"hiddenSizes": [4000, 4000]}},
            },
        ),
        (FAILED, "StorageFull"),
        ("no room for step-2 in /checkpoints/full",),
        ("Free or enlarge the storage",),
    ),
]
"""Jobs whose training ends with an error."""

FAULTS = [*NOT_STARTED, *PROGRAMS, *TRAININGS]
