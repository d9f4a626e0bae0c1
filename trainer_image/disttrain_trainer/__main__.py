"""Train a model on this rank: `python -m disttrain_trainer`. What it does: program.py; the algorithm: train.py.

Nothing imports this module, and it is the only one that runs as a program: none is loaded under two names.
"""

import gc
import os

from disttrain_trainer.runtime.leaving import leave
from disttrain_trainer.runtime.stop import StopRequest

if __name__ == "__main__":
    # First of all: importing torch takes seconds in which SIGTERM may come.
    stop_request = StopRequest.on_sigterm()
    # What is imported stays: to search it for garbage takes a tenth of the start, and stops a step now and then.
    gc.disable()
    # Below errors torch's C++ warns of choices that are ours, not the user's (parallel/data_parallel.py).
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    from disttrain_trainer.program import run

    gc.freeze()
    gc.enable()
    code = run(stop_request)
    stop_request.work_ended(code)
    leave(code)
