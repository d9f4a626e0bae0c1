"""`disttrain init` and `disttrain explain`."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain.errors import CommandError
from disttrain.explain import explain
from disttrain.init import BuiltIn, ManifestOptions, manifest_text
from disttrain.main import main
from disttrain_api import manifest

NAMES = st.from_regex(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", fullmatch=True)
TEXTS = st.one_of(st.none(), st.text(min_size=1, max_size=60))
OPTIONS = st.builds(
    ManifestOptions,
    name=NAMES,
    model=st.sampled_from(BuiltIn),
    script=TEXTS,
    image=TEXTS,
    workers=st.integers(1, 10_000),
    gpus=st.integers(0, 1024),
    steps=st.integers(1, 10**9),
    storage=st.sampled_from([None, "1Gi", "500Mi"]),
)


@settings(max_examples=15, deadline=None)
@given(OPTIONS)
def test_any_options_give_a_valid_manifest_or_a_sentence(options: ManifestOptions) -> None:
    try:
        text = manifest_text(options)
    except CommandError:
        assert options.script is not None or options.image is not None
        return
    job = manifest.parse(text)
    assert job.metadata.name == options.name
    assert job.spec.workers.replicas == options.workers
    assert (job.spec.workers.gpus_per_pod or 0) == options.gpus
    assert job.spec.workers.image == options.image
    assert job.spec.workers.command == (None if options.script is None else ["torchrun", options.script])
    assert (job.spec.storage is None) == (options.storage is None)


@pytest.mark.parametrize("model", BuiltIn)
def test_every_model_has_data_and_plain_options_are_never_refused(model: BuiltIn) -> None:
    for options in (ManifestOptions(model=model), ManifestOptions(model=model, storage="10Gi", gpus=8)):
        assert manifest.parse(manifest_text(options)).spec.training is not None
    assert "torchrun, train.py" in manifest_text(ManifestOptions(script="train.py", image="me/image:1"))


def test_it_replaces_no_file(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["init", "--name", "first"]) == 0
    assert main(["validate", "job.yaml"]) == 0
    assert main(["init", "--name", "second"]) == 1
    assert "job.yaml exists" in capfd.readouterr().err
    assert "name: first" in (tmp_path / "job.yaml").read_text()
    assert main(["init", "--name", "second", "--force"]) == 0
    assert "name: second" in (tmp_path / "job.yaml").read_text()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--name", "A"],
        ["--workers", "0"],
        ["--gpus", "-1"],
        ["--model", "x"],
        ["--script", "a.py"],
        ["--storage", "x"],
        ["--model", "gpt", "--script", "a"],
    ],
)
def test_what_cannot_be_is_usage(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", *arguments]) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("spec.training.steps", ["spec.training.steps <integer>  (required", "steps"]),
        ("training.steps", ["spec.training.steps <integer>"]),
        ("runPolicy.maxRestarts", ["default 3, ≥ 0, ≤ 1000", "before the job fails"]),
        ("spec.runPolicy.failurePolicy.rules", ["list of object", "action <FailJob | RestartGang"]),
        ("training.model.config", ["FIELDS for name: gpt", "vocabularySize <integer>"]),
        (
            "training.evaluation.samples",
            ["prompts <list of string>  (required)", "maxNewTokens <integer>  (default 64"],
        ),
        ("training.evaluation.choices.delimiter", ["between a context and each choice"]),
        ("status.attempts", ["verdict <object>"]),
        (None, ["spec <object>", "status <object>"]),
        ("training.evaluation.choices", ["FIELDS", "tasks <object>  (required)", "tokenizer <string>", 'default " "']),
        ("training.evaluation.choices.tasks", ["tasks <object>  (required)", "The file of each task, by its name"]),
        ("training.model.config.heads", ["heads <integer>  (default 4", "name: gpt", "must divide the width"]),
        ("training.model.config.sequenceLength", ["name: gpt", "name: transformers", "Longest sequence"]),
        ("training.model.config.lora", ["name: transformers", "FIELDS", "rank <integer>"]),
        ("training.model.config.lora.rank", ["lora.rank <integer>", "name: transformers"]),
        ("training.data.config.cacheFolder", ["name: corpus"]),
    ],
)
def test_a_field_is_explained_as_the_reference_does(field: str | None, expected: list[str]) -> None:
    text = explain(field)
    for message in expected:
        assert message in text


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("spec.training.stepz", "spec.training has no field 'stepz'; did you mean `steps`?"),
        ("spec.workers.template.spec", "`kubectl explain pod` has these"),
        ("spec.suspend.x", "spec.suspend has no fields of its own"),
        ("training.evaluation.choices.task", "choices has no field 'task'; did you mean `tasks`?"),
        ("training.model.config.headz", "config has no field 'headz'; did you mean `heads`?"),
        ("\x1b[31m", "has no field '\\x1b[31m'"),
    ],
)
def test_a_field_that_is_not_there_is_usage(field: str, expected: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", field]) == 2
    assert expected in capfd.readouterr().err
