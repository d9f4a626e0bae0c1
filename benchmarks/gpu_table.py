"""docs/gpu.md from what ran: which path of the trainer has run on a GPU, at which commit, and how fast GPT-2 was.

Pure: a record (docs/gpu.json), what tests/gpu tells of each test and the rows of gpu_gpt2.py go in, a record or a page
comes out.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PATHS = {
    "training": "digits and text are learned, FP32",
    "TF32": "follows FP32, and is not FP32",
    "BF16": "autocast; follows FP32, and is not FP32",
    "FP16 with its scaler": "the scale falls and is restored from a checkpoint; follows FP32",
    "FP8": "follows FP32, and is not BF16; by tensors and by rows",
    "compile": "layers and loss become kernels of their own; follows FP32",
    "flash attention": "the flash kernel alone is allowed, and agrees with plain products",
    "NCCL": "one rank",
    "NCCL between GPUs": "two ranks, where a machine has two GPUs",
    "gloo on GPUs": "two ranks on one GPU equal one process",
    "shards (FSDP2)": "two ranks on one GPU equal one process",
    "tensor parallelism": "two ranks on one GPU equal one process",
    "context parallelism": "two ranks on one GPU equal one process",
    "pipeline": "two ranks on one GPU equal one process, every schedule of stages in a line",
    "pipeline, there and back": "two ranks on one GPU equal one process: ZBVZeroBubble, DualPipeV",
    "expert parallelism": "two ranks on one GPU equal one process",
    "several devices of a process": "logical devices on one GPU equal one process",
    "all-reduces and compression hooks": "two ranks on one GPU: all sent equals plain DDP, less sent learns",
    "parameter servers": "workers on one GPU, pushes from pinned memory, equal one process",
    "worker groups": "a pod of two ranks on one GPU, which is one worker, equals one process",
    "local SGD": "two ranks on one GPU, and DiLoCo, equal their simulation in one process",
    "PipeDream": "two and three stages on one GPU equal delayed SGD in one process; PipeDream2BW, too",
    "offload": "parameters and activations in pinned memory",
    "checkpoints between CPU and GPU": "stopped on one kind of device, a job goes on on the other",
    "batch normalisation over replicas": "two ranks on one GPU equal one process: torch's nn.SyncBatchNorm",
    "models built without memory": "two ranks on one GPU equal one process",
    "checks of the network": "four ranks on one GPU: every collective, element by element; the check before training",
    "loss in chunks": "equals the whole loss",
    "processes that load data": "equal a rank that loads its own",
    "transformers models": "a Llama in BF16, also compiled, follows FP32",
    "restart in place": "a killed rank begins anew below its agent: the steps are those of a run without the kill",
    "memory snapshot": "written where memory runs out",
}
NEVER = "never run on a GPU"
OUTCOMES = "DISTTRAIN_GPU_OUTCOMES"
"""Variable with the file into which tests/gpu writes a JSON line for each test that it selects and for each outcome."""


@dataclass(frozen=True)
class Run:
    """Where and when tests or the benchmark ran."""

    commit: str
    gpu: str
    torch: str
    date: str


@dataclass
class Outcome:
    """Tests of one path; skipped ones do not count."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    unended: list[str] = field(default_factory=list)
    """Those that had not ended when the run did."""


@dataclass
class Selected:
    """A test of tests/gpu that was selected."""

    name: str
    paths: list[str]
    outcome: str = ""
    """passed, failed or skipped; "" where it has not ended."""
    seconds: float = 0.0
    why: str = ""


Record = dict[str, Any]
"""{"paths": {name: Outcome and Run}, "benchmark": Run, "rows": [...]} as JSON; empty before anything has run."""


def selected(lines: Iterable[str]) -> dict[str, Selected]:
    """Tests by name from the lines of the file in OUTCOMES, of which the last may be half written."""
    found: dict[str, Selected] = {}
    for line in lines:
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        test = found.setdefault(entry["test"], Selected(entry["test"], entry["paths"]))
        # What fails in its fixtures, before or afterwards, fails.
        if "outcome" in entry and test.outcome != "failed":
            test.outcome, test.why = entry["outcome"], entry["why"]
        test.seconds += entry.get("seconds", 0.0)
    return found


def outcomes(tests: Iterable[Selected]) -> dict[str, Outcome]:
    """Outcomes of each path that has a test which was not skipped."""
    found: dict[str, Outcome] = {}
    for test in tests:
        if test.outcome == "skipped":
            continue
        for path in test.paths:
            outcome = found.setdefault(path, Outcome())
            if test.outcome == "passed":
                outcome.passed += 1
            else:
                (outcome.failed if test.outcome == "failed" else outcome.unended).append(test.name)
    return found


def with_tests(record: Record, found: Mapping[str, Outcome], run: Run) -> Record:
    """The record after a run of the tests; a path of which nothing ran keeps what was known of it."""
    new = {path: asdict(outcome) | asdict(run) for path, outcome in found.items()}
    return {**record, "paths": {**record.get("paths", {}), **new}}


def with_benchmark(record: Record, rows: Sequence[Mapping[str, Any]], run: Run) -> Record:
    """The record after a run of gpu_gpt2.py, whose `rows` are as harness.py writes them."""
    return {**record, "benchmark": asdict(run), "rows": [dict(row) for row in rows]}


def page(record: Record) -> str:
    """docs/gpu.md."""
    paths = "\n".join(_line(name, what, record.get("paths", {}).get(name)) for name, what in PATHS.items())
    return _PAGE.format(paths=paths, benchmark=_benchmark(record))


def _line(name: str, what: str, entry: Mapping[str, Any] | None) -> str:
    if entry is None:
        return f"| {name} | {what} | {NEVER} | |"
    # Records of earlier runs know only of tests that ended.
    unended = entry.get("unended", [])
    bad = {"fails": entry["failed"], "did not end": unended}
    said = [f"{how} at `{entry['commit']}`: {', '.join(names)}" for how, names in bad.items() if names]
    state = "; ".join(said) or f"run on a GPU at `{entry['commit']}`"
    tests = f"{entry['passed']} of {entry['passed'] + len(entry['failed']) + len(unended)}"
    return f"| {name} | {what} | {state} | {tests}; {entry['gpu']}, torch {entry['torch']}, {entry['date']} |"


def _benchmark(record: Record) -> str:
    if "benchmark" not in record:
        return "Never measured."
    at = record["benchmark"]
    lines = [
        f"At `{at['commit']}`, {at['gpu']}, torch {at['torch']}, {at['date']}.",
        "",
        "| | value | reference | ratio |",
        "| --- | --- | --- | --- |",
    ]
    for row in record["rows"]:
        value, reference = (f"{_rounded(row[key])} {row['unit']}" for key in ("value", "reference"))
        lines.append(f"| {row['name']} | {value} | {reference} | {row['ratio']:.2f} |")
    return "\n".join(lines)


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


_PAGE = """\
# On GPUs

This page is written by `make gpu`, from the outcomes of tests/gpu and of `benchmarks/gpu_gpt2.py`; nothing in it is
written by hand. A path whose tests did not run keeps the line it had.

| path | what its tests show | state | tests |
| --- | --- | --- | --- |
{paths}

NCCL takes one rank per GPU. Where ranks of a machine share one, the trainer uses gloo for tensors on GPUs, too, and
says so: collectives go through the host's memory, and so do the messages of pipelines and of our own all-reduces. That
is slow, and good for trying a layout out. The tests run some layouts of each technique; DISTTRAIN_GPU=all has them run
every one of two ranks.

## GPT-2 124M on one GPU

`benchmarks/gpu_gpt2.py`: the built-in gpt of 12 layers, 12 heads, 768 wide, sequences of 1,024 random tokens,
vocabulary 50,304, tied weights, no biases, `precision: BF16`, `compile: true`, `maxGradientNorm: 1`, AdamW. Reference:
a plain loop with a model of its own, compiled as a whole (`benchmarks/gpu_plain_loop.py`). Utilisation counts
6 N + 12 L H Q T operations per token (Chowdhery et al. 2022, appendix B) against 989 TFLOP/s on H100 and H200. Goal:
no slower than the plain loop; 505,000 tokens/s on an H100.

{benchmark}
"""
