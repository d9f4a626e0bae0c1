"""lm-evaluation-harness itself reads what is exported, and finds what `evaluation.choices` has found."""

import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from disttrain_api.transformers_config import TransformersConfig
from disttrain_trainer.checkpoint.export import StoredModel
from disttrain_trainer.transformers_export import export_model, tokenizer_files
from tests.chats import CHATML, VOCABULARY, write_chats, write_tokenizer
from tests.unit.trainer.test_choices import LENGTH, QUESTIONS, question
from tests.unit.trainer.transformers_code import described
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small
from tools.cluster.locks import exclusive
from tools.cluster.paths import REPOSITORY

pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

VERSION = "0.4.13"
HARNESS = REPOSITORY / "build" / "lm-eval"
CONFIG = {"vocab_size": VOCABULARY, "initializer_range": 0.3}
FIGURES = ("acc", "acc_norm", "acc_bytes")


@pytest.fixture(scope="module")
def harness():
    """The Python of an environment with the harness alone: all else is that of the tests."""
    python, done = HARNESS / "bin" / "python", HARNESS / f"has-{VERSION}"
    with exclusive("lm-eval"):
        if not done.exists():
            own = Path(sysconfig.get_path("purelib"))
            subprocess.run([own_python(), "-m", "venv", "--clear", "--without-pip", HARNESS], check=True)
            packages = HARNESS / own.relative_to(sysconfig.get_path("data"))
            (packages / "rest.pth").write_text(f"import site; site.addsitedir({str(own)!r})\n")
            install = ["-m", "pip", "--python", python, "install", "--quiet", f"lm_eval=={VERSION}", "accelerate"]
            installed = subprocess.run([own_python(), *install], capture_output=True, text=True, check=False)
            if installed.returncode:
                # Skipped, a green suite would say that the harness reads what is exported.
                pytest.fail(f"lm_eval {VERSION} cannot be installed: {installed.stderr[-500:]}")
            done.touch()
    return python


def own_python():
    return Path(sysconfig.get_path("scripts")) / "python"


def task_of(name: str, questions: Path) -> str:
    """The harness's description of a task of such questions, which is YAML, and so may be JSON."""
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(questions)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{context}}",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "target_delimiter": " ",
        "metric_list": [{"metric": figure, "aggregation": "mean", "higher_is_better": True} for figure in FIGURES],
    }
    return json.dumps(task)


def judged(harness: Path, folder: Path, model: Path, name: str) -> dict[str, float]:
    """The figures that the harness finds, without a network."""
    command = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", f"pretrained={model},dtype=float64"]
    command += ["--tasks", name, "--include_path", str(folder / "tasks"), "--device", "cpu", "--batch_size", "4"]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "HF_HOME": str(folder / "cache"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    ended = subprocess.run(
        [harness, *command, "--output_path", str(folder / "results.json")],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (results,) = folder.glob("results*.json")
    found = json.loads(results.read_text())["results"][name]
    return {figure: found[f"{figure},none"] for figure in FIGURES}


def begin_texts(tokenizer: Path) -> None:
    """Have a tokenizer put a token before each text, as Llama's does."""
    library = tokenizers.Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    special = [("<s>", library.token_to_id("<s>"))]
    template = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=special)
    library.post_processor = tokenizers.processors.Sequence([library.post_processor, template])
    library.save(str(tokenizer / "tokenizer.json"))


@pytest.mark.parametrize("begins", [False, True], ids=["the text alone", "a token before the text"])
def test_the_harness_finds_what_an_evaluation_has_found(tmp_path, harness, begins):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", CHATML)
    if begins:
        begin_texts(tokenizer)
    settings = json.loads((tokenizer / "tokenizer_config.json").read_text())
    # As the library writes it; without it the class of the model's own tokenizer is taken.
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    (tokenizer / "tokenizer_config.json").write_text(json.dumps(settings))
    asked = [*map(question, range(QUESTIONS)), question(QUESTIONS) | {"context": ""}]
    questions = write_chats(tmp_path / "words.jsonl", asked)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "words.yaml").write_text(task_of("words", questions))

    tokens = {"kind": "Tokens", "sequenceLength": LENGTH, "vocabularySize": VOCABULARY, "size": 40}
    training = small(
        model={"entrypoint": "tests.unit.trainer.transformers_code:double_transformers", "config": CONFIG},
        data={"name": "synthetic", "config": tokens},
        evaluation={"choices": {"tasks": {"words": str(questions)}, "tokenizer": str(tokenizer)}},
        # Little changes, so that the three figures stay unlike.
        steps=3,
        optimizer={"name": "SGD", "learningRate": 1e-4},
    )
    found = run_cases(tmp_path / "world", 1, {"one": [{"training": training}]})["one"]
    assert found["errors"] == [None]
    metrics = found["report"].metrics

    model = tmp_path / "model"
    given = TransformersConfig(config=described("llama") | CONFIG)
    checkpoint = StoredModel(tmp_path / "world" / "one" / "test" / "step-3")
    export_model(checkpoint, given, model, tokenizer_files(tokenizer))
    shutil.rmtree(tokenizer)
    expected = {figure: metrics[f"words/{figure}"] for figure in FIGURES}
    assert len(set(expected.values())) == len(FIGURES)
    # The same questions are answered rightly; a mean of floats may differ in its last bit.
    assert judged(harness, tmp_path, model, "words") == pytest.approx(expected, abs=1e-12)
