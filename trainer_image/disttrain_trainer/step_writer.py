"""torch's checkpoint writer, but with the true cause where a file system takes no more bytes."""

from pathlib import Path

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from disttrain_trainer.errors import no_room

_PROBE_BYTES = 2**20


class StepWriter(FileSystemWriter):
    """Writes a rank's file of a checkpoint."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """As torch does. Raises OSError with the file system's errno where that is what stopped it.

        torch.save turns a failed write into a RuntimeError about positions in its archive; the errno is lost, and with
        it what to tell the user.
        """
        try:
            return super().write_data(plan, planner)
        except Exception as error:
            refusal = refusal_of(Path(self.path))
            if refusal is None:
                raise
            raise refusal from error


def refusal_of(folder: Path) -> OSError | None:
    """The error with which the file system refuses to let the largest file of a spoilt folder grow; None if it can."""
    largest = max(folder.iterdir(), key=lambda file: file.stat().st_size, default=folder / "probe")
    try:
        with largest.open("ab", buffering=0) as file:
            file.write(bytes(_PROBE_BYTES))
            # A raw write may come back short, with what is wrong known to the next one only.
            file.write(b"0")
    except OSError as error:
        return error if no_room(error) else None
    return None
