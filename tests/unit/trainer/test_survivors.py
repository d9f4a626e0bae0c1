"""Ranks go on from the state of one that has survived, bit for bit as if none had been lost; or from a checkpoint."""

import json
import random
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain_agent.memory import PodMemory as KeptMemory
from disttrain_api.names import Env, ExitCode
from disttrain_trainer.callbacks import Callback, Callbacks
from disttrain_trainer.ema import ENTRYPOINT as EMA
from disttrain_trainer.protocols import Moment
from disttrain_trainer.runtime.plain import to_bytes
from disttrain_trainer.runtime.randomness import packed_random_state, restore_packed_random_state
from disttrain_trainer.survivors.choose import Choice, Offer, Part, choose
from disttrain_trainer.survivors.memory import Left, PodMemory
from disttrain_trainer.survivors.resume import Resumed
from disttrain_trainer.survivors.survivor import without_room
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, LOSS
from tests.unit.trainer.layouts import SHARD
from tests.unit.trainer.worlds import Ended, Rank, job, launch, run_ranks, small
from tests.waiting import until

STEPS, INTERVAL = 24, 5
KILLED_AFTER = 15
"""Forward passes of training. DDP has a few before the first step."""
SAMPLES = 12 * KILLED_AFTER
RESUMED = re.compile(r"resuming after step (\d+) from the memory of rank (\d), which has survived; (.*)")
MODEL = "tests.unit.trainer.survivor_code:"


def training(model: str, data: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """A training whose model, or data, may be deadly. The configuration of each: the rank that dies, and when."""
    name, _, rank = model.partition(", rank ")
    config = {"rank": int(rank), "after": KILLED_AFTER} if rank else {}
    settings = {
        "optimizer": {"name": "AdamW", "learningRate": 0.01},
        "checkpoint": {"interval": INTERVAL, "asynchronous": False},
        "evaluation": {"interval": INTERVAL},
        "logging": {"interval": 1},
    }
    samples = {"entrypoint": f"{MODEL}samples_until", "config": data or {}}
    built = {"entrypoint": MODEL + name, "config": config}
    return small(steps=STEPS, model=built, data=samples, **(settings | changes))


@pytest.fixture
def memory() -> Iterator[KeptMemory]:
    kept = KeptMemory(2)
    yield kept
    kept.close()


def life(
    folder: Path, made: dict[str, Any], memory: KeptMemory, generation: int, ranks: int = 2, **layout: Any
) -> list[Ended]:
    """One life of the ranks of a pod."""
    environment = {Env.MEMORY: memory.place, Env.GENERATION: str(generation)}
    return run_ranks(folder, job(made, parallelism=layout), ranks, storage=folder, **environment)


def figures(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "test" / "metrics.jsonl").read_text().splitlines()
    kept = (LOSS, "grad_norm", HELD_OUT_LOSS)
    return [{"step": line["step"]} | {key: line[key] for key in kept if key in line} for line in map(json.loads, lines)]


def of_steps(folder: Path) -> dict[tuple[int, bool], list[dict[str, Any]]]:
    """The lines of each step and of its evaluation, as often as each was written."""
    found: dict[tuple[int, bool], list[dict[str, Any]]] = {}
    for line in figures(folder):
        found.setdefault((line["step"], HELD_OUT_LOSS in line), []).append(line)
    return found


def resumed(ended: list[Ended]) -> tuple[int, int, str]:
    """The step, the rank that has left it, and what is said of the checkpoint."""
    found = RESUMED.search(ended[0].out)
    assert found is not None, ended[0].out + ended[0].err
    return int(found[1]), int(found[2]), found[3]


def killed(ended: list[Ended], victim: int) -> None:
    codes = [one.code for one in ended]
    expected = [ExitCode.PEER_LOST] * len(ended)
    expected[victim] = -signal.SIGKILL
    assert codes == expected, [one.err for one in ended]


AVERAGED = {"callbacks": [{"entrypoint": EMA, "config": {"decay": 0.7}}]}
CASES = {
    "in a forward pass, with dropout": ("dropout_mlp, rank 1", None, {}, 1),
    "rank 0 in a forward pass, with dropout": ("dropout_mlp, rank 0", None, {}, 0),
    "while it reads samples": ("dropout_mlp", {"rank": 1, "after": SAMPLES}, {}, 1),
    "with buffers": ("normed_mlp, rank 1", None, {}, 1),
    "while it evaluates": ("dropout_mlp", {"rank": 1, "evaluations": 2}, {"evaluation": {"interval": 4}}, 1),
    "with an average": ("dropout_mlp, rank 1", None, AVERAGED, 1),
    "with an average that is a step behind": ("dropout_mlp", {"rank": 1, "after": SAMPLES}, AVERAGED, 1),
    "in FP16, whose loss is scaled": ("dropout_mlp, rank 1", None, {"precision": "FP16"}, 1),
    "with skipped steps": ("dropout_mlp, rank 1", None, {"skipSteps": {"aboveMedian": 1.01, "window": 8}}, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_whose_rank_is_killed_goes_on_from_the_other_as_if_nothing_had_been(
    tmp_path: Path, memory: KeptMemory, case: str
) -> None:
    model, data, changes, victim = CASES[case]
    folder, other = tmp_path / "killed", tmp_path / "undisturbed"
    made = training(model, data, **changes)
    killed(life(folder, made, memory, 0), victim)
    done = max(step for step, _ in of_steps(folder))
    second = life(folder, made, memory, 1)
    assert [one.code for one in second] == [0, 0], [one.err for one in second]
    step, left_by, disk = resumed(second)
    assert left_by == 1 - victim
    assert step >= done, "no step is done again"
    assert step > 2 * INTERVAL
    saved = (step - 1) // INTERVAL * INTERVAL
    assert disk == f"the newest checkpoint is of step {saved}"

    undisturbed = training(model.partition(",")[0], **changes)
    assert [one.code for one in life(other, undisturbed, KeptMemory(2), 0)] == [0, 0]
    expected, found = of_steps(other), of_steps(folder)
    # The survivor cannot sum the loss of a step whose other part is lost.
    missing = {key for key in expected if key not in found}
    assert missing <= {(step, False)}
    assert {key: line for key, line in expected.items() if key not in missing} == found


def test_a_rank_that_waits_for_one_that_is_silent_leaves_its_state_when_it_is_asked_again(
    tmp_path: Path, memory: KeptMemory
) -> None:
    made, whole = training("stopping_mlp, rank 1"), training("dropout_mlp")
    environment = {Env.MEMORY: memory.place, Env.GENERATION: "0"}
    with launch(tmp_path, job(made), 2, storage=tmp_path, **environment) as world:
        waiting, silent = world.processes
        world.wait_until(lambda: psutil.Process(silent.pid).status() == psutil.STATUS_STOPPED)
        waiting.send_signal(signal.SIGTERM)
        until(lambda: asked_again(waiting) is not None)
        assert waiting.poll() == ExitCode.PEER_LOST, world.text(0, "err")
    second = life(tmp_path, made, memory, 1)
    assert [one.code for one in second] == [0, 0], [one.err for one in second]
    step, left_by, disk = resumed(second)
    assert (left_by, disk) == (0, f"the newest checkpoint is of step {2 * INTERVAL}")
    assert step > 2 * INTERVAL
    other = tmp_path / "undisturbed"
    assert [one.code for one in life(other, whole, KeptMemory(2), 0)] == [0, 0]
    assert figures(tmp_path)[-1] == figures(other)[-1]


def asked_again(rank: Rank) -> int | None:
    """How it ended; it is asked again as long as it has not: the first signal may just be on its way."""
    rank.send_signal(signal.SIGTERM)
    return rank.poll()


FALL_BACK = {
    "scarce_mlp, rank 1": ({}, {}, r"the state has \d+ \wiB, and beside its ranks the pod has 0 B of memory"),
    "dropout_mlp, rank 1": ({}, {SHARD: 2}, r"no two ranks hold the same part of the model \(fsdp2\)"),
    "normed_mlp, rank 1": (
        {"callbacks": [{"entrypoint": f"{MODEL}Counting"}]},
        {},
        r"tests\.unit\.trainer\.survivor_code:Counting keeps state of its own",
    ),
}


@pytest.mark.parametrize("model", FALL_BACK)
def test_where_no_state_can_be_left_the_checkpoint_is_next_and_the_log_says_why(
    tmp_path: Path, memory: KeptMemory, model: str
) -> None:
    changes, layout, why = FALL_BACK[model]
    made = training(model, **changes)
    killed(life(tmp_path, made, memory, 0, **layout), 1)
    second = life(tmp_path, made, memory, 1, **layout)
    assert [one.code for one in second] == [0, 0], [one.err for one in second]
    assert re.search(rf"the state of no surviving rank is used: {why}\n", second[0].out), second[0].out
    assert re.search(r"resuming after step 1[05] from /", second[0].out)


def test_a_state_in_the_middle_of_an_update_is_not_left(tmp_path: Path, memory: KeptMemory) -> None:
    made = training("torn_mlp")
    made["model"]["config"] = {"step": 2 * INTERVAL + 3}
    killed(life(tmp_path, made, memory, 0), 1)
    second = life(tmp_path, made, memory, 1)
    assert "is used: rank 0 was in the middle of an update\n" in second[0].out
    assert "resuming after step 10 from /" in second[0].out


@pytest.mark.parametrize("change", ["generation", "attempt", "uid", "layout"])
def test_what_another_life_or_job_has_left_is_not_used(tmp_path: Path, memory: KeptMemory, change: str) -> None:
    made = training("dropout_mlp, rank 1")
    killed(life(tmp_path, made, memory, 0), 1)
    seen = of_pod(memory)
    left = seen.header()
    assert left is not None
    assert left.step is not None
    other = "another" if isinstance(getattr(left, change), str) else getattr(left, change) + 1
    seen.write_header(left.model_copy(update={change: other}))
    second = life(tmp_path, made, memory, 1)
    assert "is used: what rank 0 has left is of another life of the ranks\n" in second[0].out
    assert "resuming after step 10 from /" in second[0].out
    assert seen.header() is None, "what is not used is given back"
    assert Path(memory.place.split(":")[1]).stat().st_size == 0


def test_code_in_the_memory_is_not_run(tmp_path: Path, memory: KeptMemory) -> None:
    made = training("dropout_mlp, rank 1")
    killed(life(tmp_path, made, memory, 0), 1)
    torch.save({"tensors": Bomb(tmp_path / "run"), "rest": {}}, memory.place.split(":")[1])
    second = life(tmp_path, made, memory, 1)
    assert [one.code for one in second] == [0, 0], [one.err for one in second]
    assert "is used: what rank 0 has left cannot be read\n" in second[0].out
    assert not (tmp_path / "run").exists()


class Bomb:
    """Makes a file where it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def of_pod(memory: KeptMemory, local_rank: int = 0) -> PodMemory:
    marks, *states = map(Path, memory.place.split(":"))
    return PodMemory(marks, states, local_rank, keeper=0)


def test_the_newest_state_counts_and_its_lowest_holder_hands_it_out() -> None:
    old, new = Offer(step=7, left_by=1), Offer(step=8, left_by=3)
    assert choose([Offer(why="no"), old, new, new], [()] * 4, 5) == Choice(8, (2, 2, 2, 2))
    assert choose([old, Offer()], [(), ()], None) == Choice(7, (0, 0))


@pytest.mark.parametrize(
    ("offers", "checkpoint", "why"),
    [
        ([Offer(step=7), Offer()], 7, "the checkpoint of step 7 is as new as the state of step 7"),
        ([Offer(step=7), Offer()], 9, "the checkpoint of step 9 is as new as the state of step 7"),
        ([Offer(why="a"), Offer(why="b"), Offer(why="a"), Offer()], 3, "a; b"),
        ([Offer(), Offer()], None, "no rank has left its state"),
    ],
)
def test_why_the_checkpoint_is_next(offers: list[Offer], checkpoint: int | None, why: str) -> None:
    assert choose(offers, [()] * len(offers), checkpoint) == why


OFFERS = st.builds(Offer, step=st.none() | st.integers(1, 4), why=st.sampled_from(["", "a"]))
SHARDS = [(("shard", index),) for index in range(3)]


@given(
    st.lists(st.tuples(OFFERS, st.sampled_from(SHARDS)), min_size=1, max_size=8),
    st.none() | st.integers(1, 4),
)
def test_the_newest_step_counts_of_which_every_part_is_left(
    ranks: list[tuple[Offer, Part]], checkpoint: int | None
) -> None:
    offers, parts = [offer for offer, _ in ranks], [part for _, part in ranks]

    def holders(step: int, part: Part) -> list[int]:
        return [rank for rank, (offer, held) in enumerate(ranks) if (offer.step, held) == (step, part)]

    newest = max((step for step in range(1, 5) if all(holders(step, part) for part in parts)), default=None)
    found = choose(offers, parts, checkpoint)
    if newest is None or newest <= (checkpoint or 0):
        assert isinstance(found, str)
        assert found
    else:
        assert found == Choice(newest, tuple(holders(newest, part)[0] for part in parts))


NONE, TORN = Offer(), Offer(why="rank 1 was in the middle of an update")


@pytest.mark.parametrize(
    ("offers", "parts", "why"),
    [
        ([Offer(7), TORN, Offer(7), NONE], SHARDS[:2] * 2, f"no rank has left the part at shard 1: {TORN.why}"),
        ([NONE, Offer(7)], SHARDS[:2], "no rank has left the part at shard 0"),
        ([TORN, NONE], SHARDS[:2], TORN.why),
        ([NONE, NONE], SHARDS[:2], "no rank has left its state"),
        (
            [Offer(7), Offer(8), Offer(6), NONE],
            SHARDS[:2] * 2,
            "the parts that are left are of different steps: shard 0 of step 7, shard 1 of step 8",
        ),
        (
            [Offer(7), *[NONE] * 5],
            [(("pipeline", 0), ("tensor", index)) for index in range(6)],
            "no rank has left the parts at pipeline 0 tensor 1, pipeline 0 tensor 2, pipeline 0 tensor 3 and 2 more",
        ),
    ],
)
def test_the_reason_names_the_parts(offers: list[Offer], parts: list[Part], why: str) -> None:
    assert choose(offers, parts, None) == why


class Noted:
    """A callback that keeps no state."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step(self, moment: Moment) -> None:
        self.steps.append(moment.step)


class Kept(Noted):
    """One that does."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = list(state["steps"])


@pytest.mark.parametrize(("own", "some"), [(False, False), (False, True), (True, True)])
def test_callbacks_are_called_that_were_not_where_their_state_was(own: bool, some: bool) -> None:
    noted, kept = Noted(), Kept()
    every = [Callback("", "noted", noted), Callback("", "kept", kept)]
    callbacks = Callbacks(every, called=frozenset({"on_step"}))
    state: Any = SimpleNamespace(step=8, module=None, optimizer=None, replicas=None, callbacks=callbacks)
    saved = {"kept": {"values": to_bytes({"steps": [7] if own else [7, 8]})}}
    Resumed(due=False, uncalled=(own, some), place="", callbacks=saved).restore_callbacks(state)
    assert kept.steps == [7, 8], "once after each step"
    assert noted.steps == ([8] if some else []), "as all ranks do"


def test_the_state_must_fit_beside_the_ranks() -> None:
    assert without_room(100, 400, 300) is None
    assert without_room(101, 400, 300) == "the state has 101 B, and beside its ranks the pod has 100 B of memory"
    assert without_room(10**15, None, 300) is None


def test_a_random_state_is_that_of_one_life_and_step(memory: KeptMemory) -> None:
    ranks = [of_pod(memory, 0), of_pod(memory, 1)]
    for step in range(5):
        ranks[0].keep_random_state(2, step, f"step {step}".encode())
    assert [ranks[0].random_state(2, step) for step in range(6)] == [None, None, None, b"step 3", b"step 4", None]
    assert ranks[0].random_state(1, 4) is None
    assert ranks[1].random_state(2, 4) is None


def test_a_packed_random_state_is_all_of_it() -> None:
    random.gauss(0, 1), np.random.standard_normal(), torch.rand(3)
    packed = packed_random_state()
    drawn = random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()
    restore_packed_random_state(packed)
    assert (random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()) == drawn
    assert packed_random_state() != packed


def test_what_is_no_header_says_nothing(memory: KeptMemory) -> None:
    seen = of_pod(memory)
    assert seen.header() is None
    left = Left(uid="u", attempt=1, generation=0, layout="l", rank=1, step=3)
    seen.write_header(left)
    assert of_pod(memory).header() == left
    with Path(memory.place.split(":")[0]).open("r+b") as file:
        file.write(b"[")
    assert seen.header() is None
