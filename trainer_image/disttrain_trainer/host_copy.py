"""A copy of the state in the host's memory, which a thread can write while training changes the original."""

from typing import Any

from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from disttrain_trainer.device import Device


class HostCopier:
    """Copies into the same buffers each time: new memory costs more than the copy."""

    def __init__(self, device: Device) -> None:
        on_gpu = device.kind == "cuda"
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=on_gpu,
                # Another process would need it; the writer is a thread.
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
        )

    def copy(self, contents: dict[str, Any]) -> dict[str, Any]:
        """A deep copy whose tensors lie in the host's memory; it holds until the next call."""
        copied: dict[str, Any] = self._stager.stage(contents)  # type: ignore[assignment]
        return copied
