"""`python -m disttrain_trainer.estimate REQUESTS RESULTS`: what ranks need, a line of JSON for each line of requests.

Files, since code of the user may print. A request is an object: `job`, the path of a job.json, `rank`, `ranks`,
`ranks_per_pod` and `servers`, the number of parameter servers.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from disttrain_trainer.estimate.measure import NotFollowedError, estimate
from disttrain_trainer.runtime.config import Config, read_job, resolve
from disttrain_trainer.runtime.errors import describe


def main() -> int:
    """Write each estimate, or why there is none, into RESULTS as soon as it is known."""
    parser = argparse.ArgumentParser()
    parser.add_argument("requests", type=Path)
    parser.add_argument("results", type=Path)
    given = parser.parse_args()
    with given.results.open("w") as results:
        for line in given.requests.read_text().splitlines():
            results.write(json.dumps(_answer(json.loads(line))) + "\n")
            results.flush()
    return 0


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    rank, ranks_per_pod = request["rank"], request["ranks_per_pod"]
    try:
        job = read_job(Path(request["job"]))
        mesh, batch = resolve(job, request["ranks"], ranks_per_pod)
        config = Config(
            job,
            mesh,
            batch,
            rank,
            rank % ranks_per_pod,
            request["ranks"],
            ranks_per_pod,
            # Their addresses make no difference.
            servers=("",) * request["servers"],
        )
        return asdict(estimate(config))
    except NotFollowedError as error:
        return {"rank": rank, "unknown": str(error)}
    # Code of the user may raise anything; SystemExit is such code that leaves.
    except (Exception, SystemExit) as error:
        return {"error": describe(error).message if isinstance(error, Exception) else "the job's code called exit()"}


if __name__ == "__main__":
    sys.exit(main())
