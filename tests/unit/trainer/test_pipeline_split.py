"""Which layers make up a stage."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from torch import nn

from disttrain_api.parallelism import Parallelism
from disttrain_trainer.parallel.pipeline.split import split_layers
from disttrain_trainer.parallel.pipeline.stages import Stage, drop_others, holders_of, require_apart
from disttrain_trainer.runtime.errors import InvalidConfiguration


def model(*widths: int) -> nn.Sequential:
    """A leading layer without parameters, then a Linear and an activation for each pair of widths."""
    layers: list[nn.Module] = [nn.Flatten()]
    for size, following in pairwise(widths):
        layers += [nn.Linear(size, following), nn.ReLU()]
    return nn.Sequential(*layers)


def split(module: nn.Module, degree: int, seconds: Sequence[float] = (), **pipeline: object) -> list[int]:
    """Numbers of layers."""
    parallelism = Parallelism.model_validate({"pipelineParallelDegree": degree, "pipeline": pipeline})
    return [len(layers) for layers in split_layers(module, parallelism, lambda layers: list(seconds))]


def test_layers_without_parameters_stay_with_their_neighbour() -> None:
    assert split(model(2, 2, 2, 2, 2), 2) == [5, 4]
    assert split(model(2, 2, 2, 2, 2), 4) == [3, 2, 2, 2]


def test_stages_of_about_as_many_parameters() -> None:
    assert split(model(100, 100, 2, 2, 2), 2, split="Parameters") == [3, 6]


def test_stages_that_take_about_as_long() -> None:
    assert split(model(2, 2, 2, 2, 2), 2, [0, 1, 0, 1, 0, 1, 0, 7, 1], split="Time") == [7, 2]


def test_stages_as_given() -> None:
    assert split(model(2, 2, 2, 2, 2), 2, layersPerStage=[2, 7]) == [2, 7]


@pytest.mark.parametrize(
    ("module", "degree", "pipeline", "sentence"),
    [
        (model(2, 2), 2, {}, "Sequential has 1 layers with parameters, there are 2 stages"),
        (model(2, 2, 2), 2, {"layersPerStage": [2, 2]}, r"2 \+ 2 = 4, but the model has 5 layers"),
        (model(2, 2, 2), 2, {"layersPerStage": [1, 4]}, r"stage 0 \(Flatten\) has no parameters"),
        (nn.Bilinear(2, 2, 2), 2, {}, "Bilinear does not say what its layers are"),
    ],
)
def test_what_has_no_split_is_named(module: nn.Module, degree: int, pipeline: dict[str, object], sentence: str) -> None:
    with pytest.raises(InvalidConfiguration, match=sentence):
        split(module, degree, **pipeline)


def test_a_rank_keeps_its_own_layers_and_what_it_shares() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.middle, self.last = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
            self.last.weight = self.first.weight

    tied = Tied()
    stages = [[tied.first], [tied.middle], [tied.last]]
    holders = holders_of(stages, (0, 1, 2))
    assert holders[tied.first.weight] == (0, 2)
    assert holders[tied.last.bias] == (2,)
    drop_others(tied, stages[2])
    assert list(tied.state_dict()) == ["first.weight", "last.weight", "last.bias"]
    assert [name for name, _ in Stage(stages[2]).named_parameters()] == ["layers.0.weight", "layers.0.bias"]


def test_two_stages_of_a_rank_that_share_a_parameter_cannot_be_sharded() -> None:
    layers = [nn.Linear(3, 3) for _ in range(4)]
    layers[2].weight = layers[0].weight
    stages = [[layer] for layer in layers]
    require_apart(holders_of(stages, (0, 1, 1, 0)), stages)
    with pytest.raises(InvalidConfiguration, match="two stages of one rank share the tied weights"):
        require_apart(holders_of(stages, (0, 1, 0, 1)), stages)
