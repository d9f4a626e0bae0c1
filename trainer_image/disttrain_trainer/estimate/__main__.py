"""`python -m disttrain_trainer.estimate JOB.JSON RESULT …`: the memory of a rank, as JSON in a file of its own.

A file, since code of the user may print.
"""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from disttrain_trainer.estimate.measure import NotFollowedError, estimate
from disttrain_trainer.runtime.config import Config, read_job, resolve
from disttrain_trainer.runtime.errors import describe


def main() -> int:
    """Write the estimate, or why there is none, into RESULT."""
    parser = argparse.ArgumentParser()
    parser.add_argument("job", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--ranks-per-pod", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    given = parser.parse_args()
    answer: dict[str, Any]
    try:
        job = read_job(given.job)
        mesh, batch = resolve(job, given.ranks, given.ranks_per_pod)
        local = given.rank % given.ranks_per_pod
        config = Config(job, mesh, batch, given.rank, local, given.ranks, given.ranks_per_pod)
        answer = asdict(estimate(config))
    except NotFollowedError as error:
        answer = {"rank": given.rank, "unknown": str(error)}
    # Code of the user may raise anything; SystemExit is such code that leaves.
    except (Exception, SystemExit) as error:
        answer = {"error": describe(error).message if isinstance(error, Exception) else "the job's code called exit()"}
    given.result.write_text(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
