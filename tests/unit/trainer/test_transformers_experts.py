"""Models of transformers with experts: the library's loss of the router, and every layout as one process."""

from functools import partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from disttrain_trainer.moe.step import RoutingOfStep
from disttrain_trainer.parallel.expert import expert_layers
from tests.soak import SOAK
from tests.unit.trainer.comparisons import (
    require_same_bits,
    require_same_figures,
    require_same_training,
    series,
)
from tests.unit.trainer.layouts import (
    ACCUMULATE,
    ADAMW,
    CONTEXT,
    FULL,
    OFFLOAD,
    PIPELINE,
    REPLICATE,
    RING,
    SELECTIVE,
    SHARD,
    TENSOR,
)
from tests.unit.trainer.test_transformers import library_model
from tests.unit.trainer.test_transformers_layouts import EVERYTHING, training
from tests.unit.trainer.transformers_code import double_transformers
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases

pytest.importorskip("transformers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

EXPERT = "expertParallelDegree"
EP2 = {SHARD: 2, EXPERT: 2}
WITH_EXPERTS = ("mixtral", "mixtral, window", "qwen3_moe", "qwen3_moe, dense layer, windows")
# Powers of two: the library computes its loss in float32, and so exactly.
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
IN_TWO = {"gradientAccumulationSteps": 2}
LORA = {"rank": 2, "alpha": 6.0, "targets": ["q_proj", "o_proj"]}


def watched(module):
    """What the model's layers with experts share in a step, as the trainer makes it."""
    layers = expert_layers(module)
    step = RoutingOfStep(len(layers))
    for number, layer in enumerate(layers):
        layer.number, layer.step = number, step
    return step


class TestLossOfTheRouter:
    @pytest.mark.parametrize("recomputed", [False, True])
    @pytest.mark.parametrize("asked", [{}, {"router_aux_loss_coef": 0.5}, BALANCED])
    @pytest.mark.parametrize("family", WITH_EXPERTS)
    def test_gradients_are_the_librarys(self, family, asked, recomputed):
        torch.manual_seed(0)
        own, theirs = double_transformers(family, **asked), library_model(family, **asked)
        theirs.load_state_dict(own.state_dict())
        tokens = torch.randint(16, (4, 8))
        weights = torch.randn(4, 8, 16, dtype=torch.float64)
        expected = theirs(tokens)
        loss = (expected.logits * weights).sum() / 4
        if expected.aux_loss is not None:
            loss = loss + 0.5 * expected.aux_loss
        loss.backward()

        step = watched(own)
        step.gradient = torch.tensor(1 / 4, dtype=torch.float64)
        compute = partial(torch.utils.checkpoint.checkpoint, own, use_reentrant=False) if recomputed else own
        with step.microbatch(torch.ones(4)):
            found = (compute(tokens) * weights).sum() / 4
        found.backward()
        for name, parameter in theirs.named_parameters():
            torch.testing.assert_close(own.get_parameter(name).grad, parameter.grad, rtol=1e-10, atol=1e-12)

    def test_it_is_part_of_the_gradient_where_the_config_asks_for_it(self):
        """So that the equality above is not that of losses that nobody adds."""
        norms = {}
        for name, asked in {"without": {}, "with": BALANCED}.items():
            torch.manual_seed(0)
            module = double_transformers("mixtral", **asked)
            with watched(module).microbatch(torch.ones(4)):
                module(torch.arange(32).view(4, 8) % 16).sum().backward()
            norms[name] = module.get_parameter("model.layers.0.mlp.gate.weight").grad.norm()
        assert abs(norms["with"] / norms["without"] - 1) > 1e-3

    def test_figures_count_what_the_library_chooses(self):
        torch.manual_seed(0)
        own, theirs = double_transformers("mixtral"), library_model("mixtral")
        theirs.load_state_dict(own.state_dict())
        tokens, step = torch.randint(16, (3, 8)), watched(own)
        with step.microbatch(torch.ones(3)):
            own(tokens)
        figures = step.take_figures(3.0, 1)
        logits = theirs(tokens, output_router_logits=True).router_logits
        chosen = [of_layer.topk(2).indices.flatten().bincount(minlength=4) for of_layer in logits]
        assert [load.tolist() for load in figures.loads] == [load.tolist() for load in chosen]
        _, _, dropped, assigned, layers = figures.sums.tolist()
        assert (dropped, assigned, layers) == (0, 2 * 3 * 8 * 2, 2)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_the_router_computes_in_fp32_what_is_trained_in_half_precision(family):
    torch.manual_seed(0)
    module = double_transformers(family).float()
    (block, _), tokens = expert_layers(module), torch.randn(6, 16)
    exact, chosen = block.route(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        logits, choice = block.route(tokens)
    assert torch.equal(logits, exact)
    assert torch.equal(choice.gates, chosen.gates)
    block.bfloat16()
    assert block(tokens.bfloat16().view(2, 3, 16)).dtype is torch.bfloat16
    assert block.route(tokens.bfloat16())[0].dtype is torch.float32


@pytest.mark.parametrize("lora", [None, LORA])
def test_experts_that_do_not_compute_a_token_need_no_flops(lora):
    """torch's counter knows no attention of CPUs, and the parts without products are alike."""
    tokens, needed, counted = torch.zeros(3, 8, dtype=torch.int64), [], []
    for per_token in (1, 3):
        module = double_transformers("mixtral", lora, num_experts_per_tok=per_token)
        needed.append(module.flops_per_token())
        with FlopCounterMode(display=False) as counter:
            module(tokens).sum().backward()
        counted.append(counter.get_total_flops() / tokens.numel())
    assert needed[1] - needed[0] == pytest.approx(counted[1] - counted[0], rel=1e-12)


TRAININGS = {
    "mixtral": training("mixtral", ADAMW),
    "mixtral, balanced": training("mixtral", **BALANCED),
    "mixtral, window": training("mixtral, window"),
    "qwen3_moe, balanced": training("qwen3_moe", ADAMW, **BALANCED),
    # The first layer has no experts.
    "dense layer": training("qwen3_moe, dense layer, windows"),
    "lora": training("mixtral", ADAMW, lora=LORA),
    # The loss is that of a microbatch, and what is one pass through a pipeline are two of them here.
    "balanced, in turn": training("mixtral", **BALANCED) | IN_TWO,
    "five layers, in turn": training("qwen3_moe, dense layer, windows", ADAMW, **BALANCED, num_hidden_layers=5)
    | {"gradientAccumulationSteps": 4},
}
IN_TURN = {"pipeline": {"microbatches": 2}}
ONE_PASS = {"gradientAccumulationSteps": 1}


def in_pipeline(schedule, microbatches=4):
    """Two ranks of a pipeline."""
    return {PIPELINE: 2, "pipeline": {"schedule": schedule, "microbatches": microbatches}}


# ranks, training, parallelism, changes of the training
LAYOUTS = {
    "dp2, balanced": (2, "mixtral, balanced", {}, SELECTIVE),
    "fsdp2, balanced": (2, "mixtral, balanced", {SHARD: 2}, FULL),
    "fsdp2 + ep2": (2, "mixtral", EP2, ACCUMULATE),
    "fsdp2 + ep2, balanced": (2, "mixtral, balanced", EP2, FULL),
    "fsdp2 + ep2, lora": (2, "lora", EP2, {}),
    "tp2, sequence": (2, "mixtral, balanced", EVERYTHING, FULL),
    "tp2 + ep2": (2, "mixtral", {**EVERYTHING, EXPERT: 2}, {}),
    "fsdp2 + ep2, qwen3_moe": (2, "qwen3_moe, balanced", EP2, FULL),
    "tp2 + ep2, dense layer": (2, "dense layer", {**EVERYTHING, EXPERT: 2}, FULL),
    "pp2, InterleavedZeroBubble": (
        2,
        "mixtral",
        {PIPELINE: 2, "pipeline": {"schedule": "InterleavedZeroBubble", "microbatches": 4}},
        {},
    ),
    "pp2, dense layer": (2, "dense layer", {PIPELINE: 2, **IN_TURN}, {}),
    "pp2": (2, "mixtral", {PIPELINE: 2, **IN_TURN}, FULL),
    "pp2 x fsdp2 + ep2": (4, "mixtral", {PIPELINE: 2, **EP2, **IN_TURN}, {}),
    "fsdp2 x tp2 + ep4, qwen3_moe": (4, "qwen3_moe, balanced", {SHARD: 2, **EVERYTHING, EXPERT: 4}, {}),
    "fsdp4 + ep4": (4, "mixtral, window", {SHARD: 4, EXPERT: 4}, {}),
    "pp2, balanced": (2, "balanced, in turn", {PIPELINE: 2, **IN_TURN}, ONE_PASS | FULL),
    "pp2, balanced, InterleavedZeroBubble": (
        2,
        "five layers, in turn",
        in_pipeline("InterleavedZeroBubble"),
        ONE_PASS,
    ),
    **{
        f"pp2, balanced, {schedule}": (
            2,
            "five layers, in turn",
            in_pipeline(schedule),
            ONE_PASS | (FULL if schedule in ("1F1B", "LoopedBFS", "ZBVZeroBubble") else {}),
        )
        for schedule in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "ZBVZeroBubble", "DualPipeV")
    },
    "cp2, ring, balanced": (2, "mixtral, balanced", {CONTEXT: 2, **RING}, {}),
    "cp2 + ep2, qwen3_moe": (2, "qwen3_moe, balanced", {CONTEXT: 2, EXPERT: 2}, FULL),
    "cp2 x fsdp2 + ep2, dense layer": (4, "dense layer", {CONTEXT: 2, **EP2}, {}),
}
if SOAK:
    LAYOUTS |= {
        "dp2": (2, "mixtral", {}, ACCUMULATE),
        "fsdp2, window": (2, "mixtral, window", {SHARD: 2}, {}),
        "fsdp2 + ep2, offloaded": (2, "mixtral", EP2, OFFLOAD | SELECTIVE),
        "tp2": (2, "mixtral", {TENSOR: 2}, {}),
        "tp2, lora": (2, "lora", EVERYTHING, {}),
        "dp2 x fsdp2 + ep2": (4, "mixtral, balanced", {REPLICATE: 2, **EP2}, {}),
        "fsdp2 x tp2 + ep4": (4, "mixtral, balanced", {SHARD: 2, **EVERYTHING, EXPERT: 4}, FULL),
        **{
            f"{name}, qwen3_moe": (2, "qwen3_moe, balanced", at, {})
            for name, at in (("dp2", {}), ("fsdp2", {SHARD: 2}))
        },
        "tp2, dense layer": (2, "dense layer", {TENSOR: 2}, {}),
        "pp2 x fsdp2 + ep2, dense layer": (4, "dense layer", {PIPELINE: 2, **EP2, **IN_TURN}, FULL),
        "pp2 x tp2": (4, "mixtral", {PIPELINE: 2, **EVERYTHING, **IN_TURN}, {}),
        "pp2, balanced, two passes": (2, "five layers, in turn", in_pipeline("1F1B", 2), IN_TWO),
        "pp4, balanced": (
            4,
            "five layers, in turn",
            {PIPELINE: 4, "pipeline": {"schedule": "1F1B", "microbatches": 4}},
            ONE_PASS,
        ),
        "pp2 x cp2 + ep2, balanced": (
            4,
            "balanced, in turn",
            {PIPELINE: 2, CONTEXT: 2, EXPERT: 2, **RING, **IN_TURN},
            ONE_PASS,
        ),
        "pp2 x fsdp2 + ep2, balanced": (
            4,
            "five layers, in turn",
            {**in_pipeline("InterleavedZeroBubble"), **EP2},
            ONE_PASS | FULL,
        ),
        "pp2 x tp2, balanced": (4, "balanced, in turn", {PIPELINE: 2, **EVERYTHING, **IN_TURN}, ONE_PASS),
        "cp2, window": (2, "mixtral, window", {CONTEXT: 2}, ACCUMULATE),
        "cp2 + ep2, lora": (2, "lora", {CONTEXT: 2, EXPERT: 2, **RING}, FULL),
        "cp2 x fsdp2 + ep4, ring": (4, "mixtral, balanced", {CONTEXT: 2, SHARD: 2, EXPERT: 4, **RING}, FULL),
        "cp2 x tp2 + ep2": (4, "qwen3_moe, balanced", {CONTEXT: 2, **EVERYTHING, EXPERT: 2}, {}),
        "pp2 x cp2 + ep2, ring": (4, "mixtral", {PIPELINE: 2, CONTEXT: 2, EXPERT: 2, **RING, **IN_TURN}, {}),
    }
# training, parallelism, how the sentence begins
REFUSED = {
    "no experts": (
        training("llama"),
        EP2,
        "`parallelism.expertParallelDegree` 2: the model CausalLanguageModel has no",
    ),
    "five ways": (
        training("mixtral", num_local_experts=5),
        EP2,
        "`parallelism.expertParallelDegree`: 5 experts (parameter `model.layers.0.mlp.experts.gate_up_proj`) must be",
    ),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def alone(folder):
    cases = {name: [{"training": described}] for name, described in TRAININGS.items()}
    return run_cases(folder / "alone", 1, cases)


@pytest.fixture(scope="module")
def together(folder, asked_for):
    """Those cases of several ranks that are looked at, by name."""
    asked = partial(asked_for, "test_transformers_experts")
    cases = {
        name: (ranks, [{"training": TRAININGS[training] | changes, "parallelism": layout}])
        for name, (ranks, training, layout, changes) in LAYOUTS.items()
        if name in asked("layout")
    }
    cases |= {case: (2, [{"training": REFUSED[case][0], "parallelism": REFUSED[case][1]}]) for case in asked("case")}
    run = {"training": TRAININGS["mixtral, balanced"], "parallelism": EP2}
    cases |= {"through": (2, [run]), "resumed": (2, [{**run, "stop_after": 2}, run])}
    found = {}
    for world in sorted({ranks for ranks, _ in cases.values()}):
        of_world = {name: runs for name, (ranks, runs) in cases.items() if ranks == world}
        found |= run_cases(folder / f"world-of-{world}", world, of_world)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_equals_one_process(alone, together, layout):
    found, expected = together[layout], alone[LAYOUTS[layout][1]]
    adapters_alone = "lora" in LAYOUTS[layout][1]
    require_same_training(found, expected, "moe/max_load_over_mean", adapters_alone=adapters_alone)
    _, name, parallelism, changes = LAYOUTS[layout]
    if "in turn" in name or (PIPELINE not in parallelism and changes != ACCUMULATE):
        # That of a microbatch, and they are the same ones.
        require_same_figures(found, expected, ["moe/load_balancing_loss"])
    assert series(found, "moe/dropped_fraction") == [0.0] * 3


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_spread_so_is_refused_by_name(together, case):
    (error,) = together[case]["errors"]
    assert error.startswith(f"InvalidConfiguration: {REFUSED[case][2]}")


def test_a_stopped_run_resumes_to_the_last_bit(together):
    stopped, ended = together["resumed"]["errors"]
    assert "stopped after step 2" in stopped
    assert ended is None
    require_same_bits(together["resumed"]["parameters"], together["through"]["parameters"])
