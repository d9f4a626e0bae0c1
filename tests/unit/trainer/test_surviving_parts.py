"""Where ranks hold parts of the model and others the same, they go on from the parts that survive, bit for bit."""

import re
import signal
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest

from disttrain_agent.memory import PodMemory
from disttrain_api.names import ExitCode
from disttrain_trainer.ema import ENTRYPOINT as EMA
from tests.unit.trainer.layouts import CONTEXT, PIPELINE, REPLICATE, SHARD, TENSOR
from tests.unit.trainer.test_survivors import MODEL, STEPS, life, of_steps
from tests.unit.trainer.worlds import Ended, small, user

INTERVAL = 5
KILLED_IN = 13
RESUMED = re.compile(
    r"resuming after step (\d+) from the memory of ranks (\d(?:, \d)*) and (\d), which have survived; (.*)"
)


def training(
    ranks: tuple[int, ...] = (), where: str = "", gpt: dict[str, Any] | None = None, **changes: Any
) -> dict[str, Any]:
    """A training in which these ranks are killed in the middle of a step."""
    config = {"ranks": ranks, "step": KILLED_IN, "where": where, **(gpt or {})}
    settings = {
        "optimizer": {"name": "AdamW", "learningRate": 0.01},
        "checkpoint": {"interval": INTERVAL, "asynchronous": False},
        "evaluation": {"interval": INTERVAL},
        "logging": {"interval": 1},
    }
    model = {"entrypoint": f"{MODEL}layered_gpt", "config": config}
    return small(steps=STEPS, model=model, data=user("double_tokens"), **(settings | changes))


def killed(ended: list[Ended], victims: tuple[int, ...]) -> None:
    codes = [-signal.SIGKILL if rank in victims else ExitCode.PEER_LOST for rank in range(len(ended))]
    assert [one.code for one in ended] == codes, [one.err for one in ended]


def ended_well(ended: list[Ended]) -> str:
    """What the first rank has printed."""
    assert [one.code for one in ended] == [0] * len(ended), [one.err for one in ended]
    return ended[0].out


AVERAGED = {"callbacks": [{"entrypoint": EMA, "config": {"decay": 0.7}}]}
CLIPPED = {"maxGradientNorm": 0.3}
SKIPPED = {"skipSteps": {"aboveMedian": 1.01, "window": 8}}
HYBRID = {REPLICATE: 2, SHARD: 2}
TENSORS = {REPLICATE: 2, TENSOR: 2}
STAGES = {PIPELINE: 2, REPLICATE: 2}
ONE = {"pipeline": {"schedule": "GPipe", "microbatches": 1}}
# layout, changes, the ranks that are killed and where, and the step that survives
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[int, ...], str, int]] = {
    "dp2 x fsdp2, forward": (HYBRID, AVERAGED, (0,), "forward", 12),
    "dp2 x fsdp2, backward": (HYBRID, SKIPPED, (3,), "backward", 14),
    "dp2 x fsdp2, update": (HYBRID, AVERAGED, (1,), "update", 13),
    # Both replicas lack a rank, and both parts survive.
    "dp2 x fsdp2, two ranks": (HYBRID, AVERAGED, (0, 3), "forward", 12),
    "dp2 x fsdp2 + ep2, backward": (
        HYBRID | {"expertParallelDegree": 2},
        {"gpt": {"experts": 4}},
        (2,),
        "backward",
        12,
    ),
    "dp2 x tp2, forward": (TENSORS, CLIPPED, (1,), "forward", 12),
    "dp2 x tp2, update": (TENSORS, AVERAGED, (2,), "update", 13),
    "pp2 x dp2, forward": (STAGES, AVERAGED, (2,), "forward", 12),
    "pp2 x dp2, backward": (STAGES, {}, (0,), "backward", 12),
    # The last stage has its gradient when the first one is in its backward pass, and shares no parameter with it.
    "pp2 x dp2, one microbatch, backward": (STAGES | ONE, {"gpt": {"tieWeights": False}}, (0,), "backward", 12),
    "pp2 x dp2, update": (STAGES, CLIPPED, (3,), "update", 13),
    "pp2 x cp2, backward": ({PIPELINE: 2, CONTEXT: 2}, {}, (1,), "backward", 12),
    "pp2 x dp2 x fsdp2, backward": (STAGES | HYBRID, AVERAGED, (0,), "backward", 12),
    "pp2 x dp2 x tp2, update": (STAGES | TENSORS, {}, (7,), "update", 13),
}


@pytest.fixture
def memory() -> Iterator[PodMemory]:
    kept = PodMemory(8)
    yield kept
    kept.close()


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_rank_is_killed_goes_on_from_the_parts_of_others_as_if_nothing_had_been(
    tmp_path: Path, memory: PodMemory, case: str
) -> None:
    layout, changes, victims, where, step = CASES[case]
    size = prod(layout.get(axis, 1) for axis in (PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR))
    folder, other = tmp_path / "killed", tmp_path / "undisturbed"
    made = training(victims, where, **changes)
    killed(life(folder, made, memory, 0, size, **layout), victims)
    found = RESUMED.search(out := ended_well(life(folder, made, memory, 1, size, **layout)))
    assert found is not None, out
    survivors = {*map(int, found[2].split(", ")), int(found[3])}
    assert (int(found[1]), len(survivors)) == (step, size // 2)
    assert survivors.isdisjoint(victims)
    assert found[4] == "the newest checkpoint is of step 10"
    assert "random states" not in out

    ended_well(life(other, training(**changes), PodMemory(size), 0, size, **layout))
    expected, seen = of_steps(other), of_steps(folder)
    # The survivors cannot sum the loss of a step whose other part is lost.
    missing = {key for key in expected if key not in seen}
    assert missing <= {(step, False)}
    assert {key: line for key, line in expected.items() if key not in missing} == seen


@pytest.mark.parametrize(("layout", "victims", "part"), [(HYBRID, (0, 2), "shard 0"), (STAGES, (2, 3), "pipeline 1")])
def test_where_a_part_is_lost_the_checkpoint_is_next_and_the_log_names_the_part(
    tmp_path: Path, memory: PodMemory, layout: dict[str, Any], victims: tuple[int, ...], part: str
) -> None:
    made = training(victims, "forward")
    killed(life(tmp_path, made, memory, 0, 4, **layout), victims)
    out = ended_well(life(tmp_path, made, memory, 1, 4, **layout))
    assert f"the state of no surviving rank is used: no rank has left the part at {part}\n" in out
    assert "resuming after step 10 from /" in out
