"""What may stand in `config` of the built-in models and data sets, and which of them go together."""

import pytest
import torch
from torch.nn import functional

from disttrain_api.builtin import config_problems, data_config, model_config
from disttrain_api.cut_sizes import cut_problems
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training
from disttrain_trainer.parallel.layers import layers_of
from disttrain_trainer.tasks.supervised import build_model

DIGITS = {"name": "digits"}
TEXT = {"name": "text"}
IMAGES = {"name": "synthetic", "config": {"kind": "Images"}}
TOKENS = {"name": "synthetic", "config": {"kind": "Tokens"}}
MINE = {"entrypoint": "mine:make"}


def named(name, **config):
    return {"name": name, "config": config}


LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "num_key_value_heads": 2, "vocab_size": 256}

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_key_value_heads": 1}
GRANITE = LLAMA | SIZES | {"model_type": "granite", "embedding_multiplier": 2.0, "logits_scaling": 3.0}


def llama(**config):
    return named("transformers", config=LLAMA | config)


def training(model, data, **changes):
    return Training.model_validate({"model": model, "data": data, "steps": 1, "microBatchSize": 1, **changes})


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (named("mlp"), DIGITS),
        (named("mlp", hiddenSizes=[], inputSize=64, outputSize=10), DIGITS),
        (named("resnet"), IMAGES),
        (named("gpt"), TEXT),
        (named("gpt", sequenceLength=500, vocabularySize=1000), TEXT),
        (named("gpt"), TOKENS),
        (named("gpt", sequenceLength=8), MINE),
        (named("mlp", inputSize=2, outputSize=2), MINE),
        (llama(), TEXT),
        (named("transformers", path="/models/any"), TEXT),
        (named("transformers", path="/models/any", sequenceLength=8), MINE),
        (named("transformers", config=LLAMA, lora={"rank": 4}), TEXT),
        (MINE, DIGITS),
        (MINE, MINE),
    ],
)
def test_what_goes_together(model, data):
    assert config_problems(training(model, data)) == []


@pytest.mark.parametrize(
    ("checkpoint", "fits"), [({}, False), ({"initialFrom": "/models/any"}, True), ({"folder": "another-job"}, True)]
)
def test_adapters_need_the_weights_that_they_adapt(checkpoint, fits):
    model = named("transformers", path="/models/any", lora={"rank": 4})
    problems = config_problems(training(model, TEXT, checkpoint=checkpoint))
    assert [path for path, _ in problems] == ([] if fits else ["training.model.config.lora"])
    assert fits or "would adapt random numbers" in problems[0][1]


IMAGES_WITH_LENGTH = named("synthetic", kind="Images", sequenceLength=3)


@pytest.mark.parametrize(
    ("model", "data", "path", "part"),
    [
        (named("gpt"), DIGITS, "training.data.name", "model 'gpt' takes tokens, data 'digits' has images"),
        (named("gpt"), IMAGES, "training.data.name", "takes tokens, data 'synthetic' has images"),
        (named("resnet"), TEXT, "training.data.name", "model 'resnet' takes images, data 'text' has tokens"),
        (named("mlp"), TOKENS, "training.data.name", "choose digits, or synthetic of kind Images"),
        (named("mlp", layers=3), DIGITS, "training.model.config.layers", "unknown field"),
        (named("mlp", hidden_sizes=[3]), DIGITS, "training.model.config.hidden_sizes", "unknown field"),
        (named("mlp", hiddenSizes=[3, 0]), DIGITS, "training.model.config.hiddenSizes.1", "greater than or equal to 1"),
        (named("mlp", dropout=1.0), DIGITS, "training.model.config.dropout", "less than 1"),
        (named("resnet", width=12), DIGITS, "training.model.config.width", "multiple of 8"),
        (named("resnet", inputChannels=3), DIGITS, "training.model.config.inputChannels", "3 must be 1"),
        (named("mlp", outputSize=2), DIGITS, "training.model.config.outputSize", "2 must be 10"),
        (named("gpt", heads=3), TEXT, "training.model.config.heads", "width 128 must be a multiple of heads"),
        (named("gpt", sequenceLength=64), TEXT, "training.model.config.sequenceLength", "64 must be greater than or"),
        (named("gpt", vocabularySize=255), TEXT, "training.model.config.vocabularySize", "which is 256"),
        (named("mlp"), MINE, "training.model.config.inputSize", "must be given with data from an entry point"),
        (named("resnet"), MINE, "training.model.config.inputChannels", "must be given"),
        (named("gpt"), MINE, "training.model.config.sequenceLength", "must be given"),
        (named("transformers"), TEXT, "training.model.config", "exactly one of `path` and `config`"),
        (named("transformers", path="/m"), DIGITS, "training.data.name", "model 'transformers' takes tokens"),
        (named("transformers", path="/m"), MINE, "training.model.config.sequenceLength", "must be given"),
        (llama(model_type="bert"), TEXT, "training.model.config.config.model_type", "found 'bert'"),
        (llama(vocab_size=255), TEXT, "training.model.config.config.vocab_size", "which is 256"),
        (
            named("transformers", path="/m", lora={"rank": 0}),
            TEXT,
            "training.model.config.lora.rank",
            "greater than or equal to 1",
        ),
        (MINE, named("digits", heldOutFraction=1), "training.data.config.heldOutFraction", "less than 1"),
        (MINE, named("synthetic"), "training.data.config.kind", "must be given"),
        (MINE, IMAGES_WITH_LENGTH, "training.data.config.sequenceLength", "must be left out with kind 'Images'"),
    ],
)
def test_what_does_not_is_refused_by_name(model, data, path, part):
    problems = config_problems(training(model, data))
    assert path in [found for found, _ in problems]
    assert part in " ".join(message for _, message in problems)


def test_sizes_follow_from_the_data():
    assert model_config(training(named("mlp"), DIGITS)).input_size == 64
    assert model_config(training(named("resnet"), IMAGES)).input_channels == 1
    assert model_config(training(named("gpt"), named("text", sequenceLength=33))).sequence_length == 33
    assert data_config(training(MINE, TOKENS).data).vocabulary_size == 256


@pytest.mark.parametrize(
    ("model", "data"),
    [
        (named("mlp", hiddenSizes=[]), DIGITS),
        (named("mlp", hiddenSizes=[8, 8]), DIGITS),
        (named("resnet", width=8, blocks=[1, 2]), DIGITS),
        (named("resnet", width=8, norm="Batch"), DIGITS),
        (named("gpt", width=8, layers=3), TEXT),
        (named("gpt", width=8, layers=1, tieWeights=False), TEXT),
        (named("transformers", config=GRANITE), TEXT),
    ],
)
def test_layers_are_counted_without_the_model_as_they_are_with_it(model, data):
    settings = training(model, data)
    layers = layers_of(build_model(settings))
    to_split = sum(any(True for _ in layer.parameters()) for layer in layers)

    def problems(**layout):
        return list(cut_problems(settings, Parallelism.model_validate(layout)))

    assert problems(pipelineParallelDegree=to_split) == []
    assert problems(pipelineParallelDegree=to_split + 1)
    assert problems(devicesPerProcess=len(layers), deviceMode="Place") == []
    assert problems(devicesPerProcess=len(layers) + 1, deviceMode="Place")
    assert problems(pipeline={"layersPerStage": [len(layers)]}) == []
    assert problems(pipeline={"layersPerStage": [len(layers), 1]})


@pytest.mark.parametrize(("given", "approximate"), [({}, "tanh"), ({"activation": "Gelu"}, "none")])
def test_gpt_has_the_activation_that_the_manifest_names(given, approximate):
    tokens = 50 * torch.randn(3, 4)
    dense = build_model(training(named("gpt", width=4, heads=1, layers=1, bias=False, **given), TEXT))
    expand, contract = dense.blocks[0].feed_forward[0].weight, dense.blocks[0].feed_forward[2].weight
    expected = functional.gelu(tokens @ expand.T, approximate=approximate) @ contract.T
    torch.testing.assert_close(dense.blocks[0].feed_forward(tokens), expected, rtol=0, atol=1e-6)
    experts = build_model(training(named("gpt", width=4, heads=1, layers=1, experts=2, **given), TEXT))
    one = experts.blocks[0].feed_forward.experts
    expected = functional.gelu(tokens @ one.expand[0], approximate=approximate) @ one.contract[0]
    torch.testing.assert_close(one(tokens, torch.tensor([3, 0])), expected, rtol=0, atol=1e-6)
