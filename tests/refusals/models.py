"""Jobs whose model has not what a technique needs, and some whose has."""

from collections.abc import Mapping
from typing import Any

from tests.refusals.refusal import Refusal

SYNC = {"dataParallel": {"syncBatchNorm": True}}
RESNET = {"model": {"name": "resnet", "config": {"norm": "Batch"}}}
PATH = "spec.parallelism.dataParallel.syncBatchNorm"

MODEL_REFUSALS = (
    Refusal(
        "SyncBatchNormNeedsLayers",
        PATH,
        "`syncBatchNorm` needs BatchNorm layers, which 'mlp' does not have: remove it",
        {"parallelism": SYNC},
    ),
    Refusal(
        "SyncBatchNormWithRecomputation",
        PATH,
        "`syncBatchNorm` conflicts with `activationCheckpointing` Full: recomputed batches would count twice in the"
        " running statistics; remove one of the two",
        {"parallelism": SYNC, "training": {**RESNET, "activationCheckpointing": "Full"}},
    ),
    Refusal(
        "SyncBatchNormWithDevices",
        PATH,
        "`syncBatchNorm` conflicts with `devicesPerProcess` 2, whose copies would wait for each other: run a"
        " process per device, or use `deviceMode` Place",
        {"parallelism": {**SYNC, "devicesPerProcess": 2}, "training": RESNET},
    ),
    Refusal(
        "ModelsLossNeedsEntrypoint",
        "spec.training.loss.name",
        "`loss.name` Model needs a model of your own, which 'mlp' is not: use CrossEntropy or MeanSquaredError, or"
        " set `model.entrypoint`",
        {"training": {"loss": {"name": "Model"}}},
    ),
    Refusal(
        "ChunksWithDevices",
        "spec.training.loss.chunks",
        "`chunks` conflicts with `devicesPerProcess`, whose copies return logits: use `deviceMode` Place, or a process"
        " per device",
        {
            "parallelism": {"devicesPerProcess": 2},
            "training": {"loss": {"chunks": 4}, "model": {"name": None, "entrypoint": "mine:build"}},
        },
    ),
    Refusal(
        "MetaDeviceNeedsModel",
        "spec.training.model.metaDevice",
        "`metaDevice` needs a model that is initialised by layers, which 'mlp' is not: remove it",
        {"training": {"model": {"metaDevice": True}}},
    ),
)

MODELS_ACCEPTED: dict[str, Mapping[str, Any]] = {
    "batches normalised over all replicas": {"parallelism": SYNC, "training": RESNET}
}
