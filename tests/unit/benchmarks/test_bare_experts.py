"""What the trainer's expert parallelism is measured against computes the same."""

import json
from pathlib import Path

from benchmarks import ranks
from benchmarks.trainer_overhead import STRATEGIES, job


def test_the_bare_loop_has_the_trainers_gradients(tmp_path: Path) -> None:
    described = job(STRATEGIES["expert parallel"], steps=1)
    described["training"]["model"]["config"] |= {"layers": 2, "heads": 2, "width": 16}
    (tmp_path / "job.json").write_text(json.dumps(described))
    printed = ranks.run(tmp_path, "tests.unit.benchmarks.bare_experts_rank", 2)
    # A block has: two layers' norms with two each, attention's four with two each, the router and two of the experts.
    assert printed.split() == ["parameters", str(2 + 2 * (4 + 8 + 3) + 3)]
