"""The trainer, whose ranks but the first wait before they join: until `join` is in the folder that GATE names."""

import os
import sys
import time
from pathlib import Path

from disttrain_trainer.program import run
from disttrain_trainer.runtime.stop import StopRequest

if __name__ == "__main__":
    stop_request = StopRequest.on_sigterm()
    while os.environ["RANK"] != "0" and not Path(os.environ["GATE"], "join").exists():
        time.sleep(0.01)
    code = run(stop_request)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
