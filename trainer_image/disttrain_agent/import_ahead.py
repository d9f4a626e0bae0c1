"""What a process imports whose forks are ranks, before it forks. The agent itself never does."""

import contextlib
import gc
import importlib
import os
import sys
from collections.abc import Sequence


def import_ahead(modules: Sequence[str]) -> None:
    """Import what forks of this process are to find imported. It runs nothing of the user's, whose threads and random
    numbers would be in every fork."""
    # As the trainer does it, and before torch, which reads the variable when it is imported.
    gc.disable()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Who asks for GPUs while it is imported asks the machine, not the driver, which no fork could use then.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    for module in modules:
        # A rank that needs what cannot be imported says so itself.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


def has_met_the_driver() -> bool:
    """Return, in a fork, whether an import has used a GPU's driver after all, which no fork can use then.

    torch notes it in forks alone: in the process that has imported, it is never True.
    """
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda._is_in_bad_fork())
