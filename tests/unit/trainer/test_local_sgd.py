"""Replicas that train alone: they meet as the papers' formulas say, send less, and are resumed exactly."""

import math
from functools import cache, partial

import pytest
import torch
from safetensors.torch import save_file

from tests.soak import SOAK
from tests.unit.trainer import local_workers
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, LOSS, require_same, require_same_bits, series, stored
from tests.unit.trainer.local_workers import bmuf, diloco, hierarchical, local_sgd, named, simulate
from tests.unit.trainer.user_code import double_mlp
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

TOLERANCE = 1e-10
STEPS = 10
PLAIN_SGD = {"name": "SGD", "learningRate": 0.1}
MOMENTUM = {"name": "SGD", "learningRate": 0.1, "momentum": 0.9}
ADAMW = {"name": "AdamW", "learningRate": 0.01, "weightDecay": 0.1}
EVERY_STEP = {"logging": {"interval": 1}, "evaluation": {"interval": 1}}


def of_local_sgd(**settings):
    return {"dataParallel": {"mode": "LocalSGD", "localSGD": settings}}


def of_bmuf(**settings):
    return {"dataParallel": {"mode": "BMUF", "bmuf": settings}}


def training(optimizer, **changes):
    return small(steps=STEPS, optimizer=optimizer, **EVERY_STEP, **changes)


def optimizer_of(settings):
    rate = settings["learningRate"]
    if settings["name"] == "SGD":
        return partial(torch.optim.SGD, lr=rate, momentum=settings.get("momentum", 0.0))
    return partial(torch.optim.AdamW, lr=rate, weight_decay=settings["weightDecay"])


# What is run; what it must be equal to. The last block of each has one or two steps.
SIMULATED = {
    "local SGD": (of_local_sgd(period=4), MOMENTUM, {}, lambda ranks: local_sgd(4, STEPS)),
    "optimizers averaged": (
        of_local_sgd(period=4, optimizerState="Average"),
        ADAMW,
        {},
        lambda ranks: local_sgd(4, STEPS, average_optimizers=True),
    ),
    "each clips its own gradient": (
        of_local_sgd(period=3),
        PLAIN_SGD,
        {"clip": 0.2},
        lambda ranks: local_sgd(3, STEPS),
    ),
    "post-local SGD": (
        of_local_sgd(period=3, warmupSteps=4),
        MOMENTUM,
        {"summed_steps": 4},
        lambda ranks: local_sgd(3, STEPS, begin=4),
    ),
    "DiLoCo": (of_local_sgd(period=3, outerOptimizer={}), ADAMW, {}, lambda ranks: diloco(3, STEPS, 0.7, 0.9)),
    "BMUF, classic": (
        of_bmuf(period=3, blockMomentum=0.6, blockLearningRate=1.2, nesterov=False),
        MOMENTUM,
        {},
        lambda ranks: bmuf(3, STEPS, 0.6, 1.2, nesterov=False),
    ),
    "BMUF by its defaults": (
        of_bmuf(period=3),
        PLAIN_SGD,
        {},
        lambda ranks: bmuf(3, STEPS, 1 - 1 / ranks, 1.0, nesterov=True),
    ),
    "BMUF, warming up": (
        of_bmuf(period=3, warmupSteps=5, blockMomentum=0.5),
        ADAMW,
        {},
        lambda ranks: bmuf(3, STEPS, 0.5, 1.0, nesterov=True, plain=5),
    ),
    "BMUF, optimizers reset": (
        of_bmuf(period=2, blockMomentum=0.5, optimizerState="Reset"),
        ADAMW,
        {},
        lambda ranks: bmuf(2, STEPS, 0.5, 1.0, nesterov=True, reset=True),
    ),
}


def simulated(ranks):
    """Names of what is held against its simulation: all with two ranks, with more what has a formula of its own."""
    return [name for name in SIMULATED if SOAK or ranks == 2 or name in ("local SGD", "DiLoCo", "BMUF by its defaults")]


HIERARCHICAL = "pods of two"
PERIODS = {"period": 2, "globalPeriod": 6}

# As many samples as six batches of 24: every replica has as many as the others.
EVEN = {"data": user("double_samples", size=48)}
AS_DDP = {
    "SGD": training(PLAIN_SGD, **EVEN),
    "two microbatches": training(PLAIN_SGD, gradientAccumulationSteps=2, **EVEN, globalBatchSize=48),
    "a parameter that is not used": training(PLAIN_SGD, model=user("partly_used"), **EVEN),
    # Steps before the short batch at the end of an epoch.
    "experts": training(PLAIN_SGD, model=user("double_moe_gpt"), data=user("double_tokens")) | {"steps": 2},
}
TOKENS = {
    "model": {"name": "gpt", "config": {"layers": 2, "heads": 2, "width": 16, "dropout": 0.1}},
    "data": {"name": "synthetic", "config": {"kind": "Tokens", "size": 60, "sequenceLength": 8}},
}
RESUMED = {
    "local SGD": (of_local_sgd(period=4), training(ADAMW)),
    "dropout, tied weights": (of_local_sgd(period=4), training(ADAMW, **TOKENS)),
    "buffers": (of_local_sgd(period=4), training(MOMENTUM, model=user("normed_mlp"), **EVEN)),
    "post-local SGD": (of_local_sgd(period=3, warmupSteps=6), training(MOMENTUM)),
    "DiLoCo": (of_local_sgd(period=4, outerOptimizer={}), training(ADAMW)),
    "BMUF": (of_bmuf(period=4), training(MOMENTUM)),
    "BMUF, optimizers averaged": (of_bmuf(period=2, optimizerState="Average"), training(ADAMW)),
}
LONG = small(steps=16, optimizer=PLAIN_SGD, logging={"interval": 8})
MODES = {"AllReduce": {}, "LocalSGD": of_local_sgd(period=8), "warm": of_local_sgd(period=4, warmupSteps=8)}
SAVED = {"local SGD": of_local_sgd(period=4), "BMUF": of_bmuf(period=4)}


def cases(ranks, resumed=tuple(RESUMED)):
    """Two ranks show what is sent, saved and resumed, four pods."""
    for name in simulated(ranks):
        parallelism, optimizer, settings, _ = SIMULATED[name]
        clipped = {"maxGradientNorm": settings["clip"]} if "clip" in settings else {}
        yield name, [{"training": training(optimizer, **clipped), "parallelism": parallelism}]
    for name, job in AS_DDP.items() if ranks < 4 else ():
        yield f"DDP: {name}", [{"training": job}]
        yield f"period 1: {name}", [{"training": job, "parallelism": of_local_sgd(period=1)}]
    if ranks == 2:
        yield from sent_saved_and_resumed(resumed)
    if ranks == 4:
        yield from in_pods()


def sent_saved_and_resumed(names):
    for name, parallelism in MODES.items():
        yield f"bytes: {name}", [{"training": LONG, "parallelism": parallelism}]
    saved = {"checkpoint": {"interval": 2, "keepLatest": 20}}
    for name, parallelism in SAVED.items():
        yield f"saved: {name}", [{"training": training(MOMENTUM, **saved), "parallelism": parallelism}]
    steep = training(PLAIN_SGD, model=user("steep_on_one_rank"))
    yield "not finite", [{"training": steep, "parallelism": of_local_sgd(period=8)}]
    for name, (parallelism, job) in ((name, RESUMED[name]) for name in names):
        run = {"training": job, "parallelism": parallelism}
        yield f"{name}: through", [{**run, "training": {**job, "evaluation": {}}}]
        yield f"{name}: resumed", [{**run, "stop_after": 5}, {**run, "stop_after": 1}, run]
    first, then = ({"training": training(MOMENTUM), "parallelism": mode} for mode in (of_bmuf(period=4), {}))
    yield "BMUF, then AllReduce", [{**first, "stop_after": 6}, then]
    yield "AllReduce, then BMUF", [{**then, "stop_after": 6}, first]


def in_pods():
    run = {"training": training(MOMENTUM), "parallelism": of_local_sgd(**PERIODS), "ranks_per_pod": 2}
    yield HIERARCHICAL, [run]
    yield f"{HIERARCHICAL}: resumed", [{**run, "stop_after": 4}, {**run, "stop_after": 1}, run]


@pytest.fixture(scope="module")
def world(tmp_path_factory, asked_for):
    """For a number of ranks: the folder and the results of its cases."""
    resumed = sorted(asked_for("test_local_sgd", "stopped"))

    @cache
    def run(ranks):
        folder = tmp_path_factory.mktemp(f"ranks-{ranks}")
        return folder, run_cases(folder, ranks, dict(cases(ranks, resumed)))

    return run


def assert_as_simulated(result, workers):
    assert result["errors"] == [None]
    # The model that a run ends with is the one that it evaluates.
    last = workers.mean() if workers.evaluated is None else workers.evaluated
    require_same(result["parameters"], dict(named(last)))
    assert series(result) == pytest.approx(workers.losses, rel=TOLERANCE)
    # Those of the last step are evaluated once.
    found = series(result, HELD_OUT_LOSS)
    assert found == pytest.approx(workers.held_out_losses, rel=TOLERANCE)


@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks in (2, 3, 4) for name in simulated(ranks)])
def test_a_run_equals_its_simulation_in_one_process(world, name, ranks):
    _, results = world(ranks)
    _, optimizer, settings, sync = SIMULATED[name]
    assert_as_simulated(results[name], simulate(ranks, optimizer_of(optimizer), STEPS, sync(ranks), **settings))


def test_pods_average_more_often_than_all(world):
    _, results = world(4)
    sync = hierarchical(2, PERIODS["period"], PERIODS["globalPeriod"], STEPS)
    assert_as_simulated(results[HIERARCHICAL], simulate(4, optimizer_of(MOMENTUM), STEPS, sync))
    require_same_bits(results[f"{HIERARCHICAL}: resumed"]["parameters"], results[HIERARCHICAL]["parameters"])
    size = sum(value.nbytes for value in results[HIERARCHICAL]["parameters"].values())
    pod, everyone = size, size * 3 // 2
    assert series(results[HIERARCHICAL], "comm/gradient_bytes") == [0, pod, 0, pod, 0, everyone, 0, pod, 0, everyone]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", AS_DDP)
def test_period_1_is_ddp_for_sgd_without_momentum(world, name, ranks):
    _, results = world(ranks)
    ddp, found = results[f"DDP: {name}"], results[f"period 1: {name}"]
    require_same(found["parameters"], ddp["parameters"])
    assert series(found) == pytest.approx(series(ddp), rel=TOLERANCE)
    assert series(found, "comm/gradient_bytes") == series(ddp, "comm/gradient_bytes")


@pytest.mark.parametrize("stopped", RESUMED)
def test_a_run_stopped_within_a_block_equals_one_that_never_stopped(world, stopped):
    """The resumed one is also evaluated after each step, which therefore changes nothing."""
    _, results = world(2)
    through, resumed = results[f"{stopped}: through"], results[f"{stopped}: resumed"]
    assert resumed["errors"] == [
        "Stopped: SIGTERM: stopped after step 5, its checkpoint is written",
        "Stopped: SIGTERM: stopped after step 6, its checkpoint is written",
        None,
    ]
    require_same_bits(resumed["parameters"], through["parameters"])
    assert len(series(through)) == STEPS
    for key in (LOSS, "comm/gradient_bytes", "grad_norm"):
        assert series(resumed, key) == series(through, key)


def test_period_8_sends_an_eighth_of_ddp(world):
    _, results = world(2)
    ddp, found, warm = (series(results[f"bytes: {name}"], "comm/gradient_bytes") for name in MODES)
    assert ddp[0] > 0
    assert found == [bytes_of_ddp / 8 for bytes_of_ddp in ddp]
    # Eight steps of summed gradients, then two averages.
    assert warm == [ddp[0], ddp[1] / 4]


def test_a_gradient_of_one_replica_that_is_not_finite_ends_all(world):
    """The world goes on to its next case, so all ranks have left this one."""
    _, results = world(2)
    (error,) = results["not finite"]["errors"]
    assert error.startswith("NonFiniteLoss: the gradient norm of step 1 is ")


class TestCheckpoints:
    @pytest.mark.parametrize("name", SAVED)
    def test_replicas_are_alike_after_a_meeting_and_only_then(self, world, name):
        folder, _ = world(2)
        for step in range(2, STEPS + 1, 2):
            first, *others = (self.replica(folder / f"saved: {name}", step, rank) for rank in range(2))
            alike = [torch.equal(other[key], value) for other in others for key, value in first.items()]
            assert all(alike) if step % 4 == 0 or step == STEPS else not any(alike)

    def test_the_model_within_a_block_is_the_average_of_local_sgd(self, world):
        folder, _ = world(2)
        case = folder / "saved: local SGD"
        replicas = [self.replica(case, 6, rank) for rank in range(2)]
        mean = {name: torch.stack([replica[name] for replica in replicas]).mean(0) for name in replicas[0]}
        require_same(self.tensors(case, 6, "model."), mean)

    def test_the_model_within_a_block_is_the_last_one_of_bmuf(self, world):
        folder, _ = world(2)
        case = folder / "saved: BMUF"
        require_same_bits(self.tensors(case, 6, "model."), self.tensors(case, 4, "model."))
        ahead = self.replica(case, 4, 0)
        assert not any(torch.equal(ahead[name], value) for name, value in self.tensors(case, 4, "model.").items())

    def test_another_mode_goes_on_from_what_the_replicas_agree_on(self, world):
        folder, results = world(2)
        for name in ("BMUF, then AllReduce", "AllReduce, then BMUF"):
            assert results[name]["errors"][-1] is None
            assert all(math.isfinite(loss) for loss in series(results[name]))
            assert len(series(results[name])) == STEPS
        lines = [line for line in (folder / "rank-0.out").read_text().splitlines() if "holds no replicas" in line]
        assert lines == ["step-6 holds no replicas of BMUF over 2 replicas: all begin with its model"]

    def replica(self, case, step, rank):
        """Parameters of a rank's own replica."""
        found = self.tensors(case, step, f"replicas.{rank}.")
        return {name.rpartition("parameter/")[2]: value for name, value in found.items() if "parameter/" in name}

    def tensors(self, case, step, prefix):
        return stored(case / "test" / f"step-{step}", prefix)


def test_the_simulation_of_one_worker_is_plain_sgd():
    """So that the simulation is held to something, too."""
    workers = simulate(1, optimizer_of(MOMENTUM), STEPS, local_sgd(3, STEPS))
    model = local_workers.double_mlp()
    assert sum(value.numel() for value in model.parameters()) == workers.mean().numel()
    summed = simulate(3, optimizer_of(MOMENTUM), STEPS, local_sgd(1, STEPS, begin=STEPS), summed_steps=STEPS)
    assert torch.allclose(workers.mean(), summed.mean(), rtol=1e-10, atol=0)


def test_replicas_begin_with_weights_that_are_read(tmp_path):
    """Red where the model that they come back to is the one that was drawn."""
    weights = {name: value + 1.0 for name, value in double_mlp().state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    nothing = {"name": "SGD", "learningRate": 1e-30}
    given = training(nothing, checkpoint={"initialFrom": str(tmp_path / "weights.safetensors")})
    modes = {"DiLoCo": of_local_sgd(period=1, outerOptimizer={}), "BMUF": of_bmuf(period=1)}
    cases = {name: [{"training": given, "parallelism": parallelism}] for name, parallelism in modes.items()}
    for name, found in run_cases(tmp_path / "cases", 2, cases).items():
        assert found["errors"] == [None], name
        require_same(found["parameters"], weights, 1e-10)
