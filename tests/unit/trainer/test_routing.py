"""What the router decides, on numbers that can be followed by hand."""

import pytest
import torch

from disttrain_api.builtin import config_problems
from disttrain_api.cut_sizes import cut_problems
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training
from disttrain_trainer.moe.experts import FeedForwardExperts, grouped_linear
from disttrain_trainer.moe.layer import MixtureOfExperts
from disttrain_trainer.moe.routing import (
    admit,
    assignments_per_expert,
    balance_losses,
    by_expert,
    choose,
    fractions_of,
    imbalance,
    z_losses,
)
from disttrain_trainer.moe.step import RoutingOfStep

ALL = torch.ones(5, dtype=torch.bool)
# Five tokens, two experts each: expert 0 is wanted four times, 1 and 2 three times, 3 never.
EXPERTS = torch.tensor([[0, 1], [1, 0], [2, 0], [0, 2], [2, 1]])


def test_one_expert_per_token_has_its_probability_as_gate():
    choice = choose(torch.tensor([[1.0, 3.0, 2.0]]), 1)
    assert choice.experts.tolist() == [[1]]
    torch.testing.assert_close(choice.gates, torch.tensor([[3.0]]).exp() / torch.tensor([1.0, 3.0, 2.0]).exp().sum())


def test_gates_of_several_experts_are_the_softmax_over_the_chosen():
    choice = choose(torch.tensor([[1.0, 3.0, 2.0]]), 2)
    assert choice.experts.tolist() == [[1, 2]]
    torch.testing.assert_close(choice.gates, torch.tensor([[3.0, 2.0]]).softmax(-1))


def test_without_a_capacity_all_but_padding_is_computed():
    counted = torch.tensor([True, False, True, True, False])
    assert admit(EXPERTS, counted, 4, None).tolist() == [[on, on] for on in counted.tolist()]
    assert assignments_per_expert(EXPERTS, counted, 4).tolist() == [3, 1, 2, 0]


@pytest.mark.parametrize(
    ("factor", "dropped"),
    [
        # 10 assignments to 4 experts: the even share is 2.5.
        (0.4, {(1, 0), (1, 1), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1)}),
        (0.8, {(2, 1), (3, 0), (4, 0), (4, 1)}),
        (1.0, {(3, 0)}),
        (1.2, {(3, 0)}),
        (1.21, set()),
    ],
)
def test_an_expert_takes_its_first_assignments_in_order_of_tokens(factor, dropped):
    admitted = admit(EXPERTS, ALL, 4, factor)
    assert {tuple(at) for at in (~admitted).nonzero().tolist()} == dropped


def test_padding_takes_no_room():
    """With the second token gone the even share is 2: experts 0 and 2 drop their third, expert 1 has but two."""
    counted = torch.tensor([True, False, True, True, True])
    assert (~admit(EXPERTS, counted, 4, 1.0)).nonzero().tolist() == [[1, 0], [1, 1], [3, 0], [4, 0]]


def test_assignments_are_sent_by_expert_in_order_of_tokens():
    found = by_expert(EXPERTS, admit(EXPERTS, ALL, 4, 1.0))
    assert [(int(EXPERTS.flatten()[at]), int(at) // 2) for at in found] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 4), (2, 2), (2, 3), (2, 4),
    ]  # fmt: skip


def test_the_load_balancing_loss_is_one_where_all_is_even():
    even = torch.full((8, 4), 0.25)
    assert balance_losses(even, torch.full((4,), 0.25)).mean() == pytest.approx(1)
    one_for_all = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).expand(8, 4)
    assert balance_losses(one_for_all, torch.tensor([1.0, 0, 0, 0])).mean() == pytest.approx(4)
    assert balance_losses(one_for_all, fractions_of(torch.tensor([4, 3, 3, 0]))).mean() == pytest.approx(1.6)


def test_the_z_loss_is_the_squared_log_of_the_sum_of_exponentials():
    logits = torch.tensor([[0.0, 0.0], [1.0, 2.0]])
    torch.testing.assert_close(z_losses(logits), logits.exp().sum(-1).log() ** 2)


def test_imbalance():
    assert imbalance(torch.tensor([2, 2, 2])) == 1
    assert imbalance(torch.tensor([6, 0, 0])) == 3


@pytest.mark.parametrize("number_format", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("counts", [[3, 0, 4], [0, 0, 0], [0, 0, 7]])
@pytest.mark.parametrize("width", [16, 6])
def test_grouped_linear_is_a_product_per_group(number_format, counts, width):
    """With and without torch's grouped product, which takes neither float64 nor rows of 6."""
    torch.manual_seed(0)
    tokens = torch.randn(sum(counts), width, dtype=number_format, requires_grad=True)
    weights = torch.randn(3, width, 8, dtype=number_format, requires_grad=True)
    found = grouped_linear(tokens, weights, torch.tensor(counts))
    expert = torch.arange(3).repeat_interleave(torch.tensor(counts))
    expected = torch.einsum("na,nab->nb", tokens, weights[expert])
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    towards = torch.randn_like(found)
    gradients = [torch.autograd.grad(value, (tokens, weights), towards) for value in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def layer(**options: object) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(FeedForwardExperts(4, 8, 16, deviation=0.3), 4, 8, **options).double()


def test_initial_values_of_the_router_are_drawn_before_those_of_the_experts():
    """A seed gives the model that it has always given: values are drawn in the order of the parameters."""
    names = [name.split(".")[0] for name, _ in layer().named_parameters()]
    assert names == ["router", *["experts"] * (len(names) - 1)]


def test_a_token_is_the_sum_of_its_experts_weighted_by_their_gates():
    module, inputs = layer(), torch.randn(2, 3, 8, dtype=torch.float64)
    tokens = inputs.flatten(0, 1)
    choice = choose(module.router(tokens), 2)
    expected = torch.stack([
        sum(gate * module.experts(token[None], torch.eye(4, dtype=torch.int64)[expert])[0]
            for gate, expert in zip(gates, experts, strict=True))
        for token, gates, experts in zip(tokens, choice.gates, choice.experts, strict=True)
    ])  # fmt: skip
    torch.testing.assert_close(module(inputs), expected.view_as(inputs))


def test_capacity_is_for_training_alone():
    module, inputs = layer(capacity_factor=0.1), torch.randn(1, 8, 8, dtype=torch.float64)
    assert (module(inputs) == 0).all(-1).any(), "some token is dropped by both of its experts"
    torch.testing.assert_close(module.eval()(inputs), layer().eval()(inputs))


def test_padding_changes_neither_the_losses_nor_what_is_computed_of_the_others():
    inputs = torch.randn(3, 4, 8, dtype=torch.float64)

    def gradients(samples: torch.Tensor, weights: list[float]) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        module, step = layer(capacity_factor=1.0, auxiliary_loss_weight=0.5, z_loss_weight=0.5), RoutingOfStep()
        module.step = step
        step.gradient = torch.tensor(0.5)
        with step.microbatch(torch.tensor(weights)):
            outputs = module(samples)
        outputs[: len(inputs) - 1].sum().backward()
        figures = step.take_figures(2.0, 1)
        return outputs, [parameter.grad for parameter in module.parameters()], figures.sums

    outputs, expected, figures = gradients(inputs[:2], [1.0, 1.0])
    padded_outputs, found, padded_figures = gradients(inputs, [1.0, 1.0, 0.0])
    torch.testing.assert_close(padded_outputs[:2], outputs)
    assert not padded_outputs[2].any()
    torch.testing.assert_close(padded_figures, figures)
    for one, other in zip(found, expected, strict=True):
        assert one is not None
        torch.testing.assert_close(one, other)


def training(**config: object) -> Training:
    """A gpt on text with this config."""
    model = {"name": "gpt", "config": config}
    return Training.model_validate({"model": model, "data": {"name": "text"}, "steps": 1, "microBatchSize": 1,
                                    "optimizer": {"name": "SGD", "learningRate": 0.1}})  # fmt: skip


@pytest.mark.parametrize(
    ("config", "field", "message"),
    [
        ({"capacityFactor": 1.0}, "capacityFactor", "needs `experts`: set it, or remove this field"),
        ({"zLossWeight": 0.0}, "zLossWeight", "needs `experts`: set it, or remove this field"),
        ({"experts": 4, "expertsPerToken": 5}, "expertsPerToken",
         "5 must be less than or equal to experts, which is 4"),
    ],
)  # fmt: skip
def test_configs_that_contradict_themselves(config, field, message):
    assert config_problems(training(**config)) == [(f"training.model.config.{field}", message)]


@pytest.mark.parametrize(
    ("config", "parallelism", "message"),
    [
        ({}, {"expertParallelDegree": 2, "dataParallelShardDegree": 2},
         "must be given, and be a multiple of `expertParallelDegree`, which is 2"),
        ({"experts": 3}, {"expertParallelDegree": 2, "dataParallelShardDegree": 2},
         "3 must be a multiple of `expertParallelDegree`, which is 2"),
        ({"experts": 4}, {"devicesPerProcess": 2},
         "experts conflict with `devicesPerProcess`: they need a process per device; remove one of the two"),
        ({"experts": 4}, {"dataParallel": {"mode": "ParameterServer"}},
         "experts do not go with ParameterServer: how busy each is is counted over all workers in each step"),
        ({"experts": 4}, {"expertParallelDegree": 2, "dataParallelShardDegree": 2}, None),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit_the_experts(config, parallelism, message):
    found = list(cut_problems(training(**config), Parallelism.model_validate(parallelism)))
    assert found == ([("training.model.config.experts", message)] if message else [])
