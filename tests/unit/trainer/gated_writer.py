"""The trainer with checkpoint files that wait: rank 0 writes none before `go` is in the folder that GATE names."""

import os
import sys
import time
from pathlib import Path
from typing import Any

from disttrain_trainer.checkpoint.step_writer import StepWriter
from disttrain_trainer.program import run
from disttrain_trainer.runtime.stop import StopRequest


def close_gate(gate: Path) -> None:
    """Put the gate before StepWriter.write_data."""
    write_data = StepWriter.write_data

    def gated(writer: StepWriter, *arguments: Any) -> Any:
        while not gate.exists():
            time.sleep(0.01)
        return write_data(writer, *arguments)

    StepWriter.write_data = gated


if __name__ == "__main__":
    stop_request = StopRequest.on_sigterm()
    if os.environ["RANK"] == "0":
        close_gate(Path(os.environ["GATE"], "go"))
    code = run(stop_request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
