"""All steps of examples/llama, as its README tells people to type them: what they print, and what they have trained."""

import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor
from torch.nn import functional

from disttrain_api.chat import ChatConfig
from disttrain_api.corpus import CorpusConfig
from disttrain_trainer.data import chat, corpus
from disttrain_trainer.data.batches import Datasets
from disttrain_trainer.losses import IGNORED
from tests.documented import LLAMA, console_steps
from tools.cluster.paths import REPOSITORY

from .conftest import Workplace

CLAIM = Path("disttrain-runs", "claims", "llama")
UNIFORM = math.log(512)
"""The loss of a model that knows nothing of the 512 tokens."""
FLOAT_ERROR = 1e-4
"""Relative difference that other kernels, and sums in another order, may make."""
NUMBER = re.compile(r"\d+(\.\d+)?")


@dataclass
class Steps:
    """What the README's commands have printed, in order, and the folder that they ran in."""

    shell: Callable[[str], str]
    printed: dict[str, str]
    folder: Path

    def loaded(self, name: str) -> Any:
        # Not at the top: the gate, which has none of these tests, reads this module as well.
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(self.folder / CLAIM / name).eval()

    def adapted(self) -> Any:
        import peft

        return peft.PeftModel.from_pretrained(self.loaded("model"), self.folder / CLAIM / "adapter").eval()

    def data(self, name: str) -> dict[str, Any]:
        """The config of a job's data, with absolute paths."""
        found = yaml.safe_load((LLAMA.parent / f"{name}.yaml").read_text())["spec"]["training"]["data"]["config"]
        paths = {key: str(self.folder / found[key]) for key in ("path", "tokenizer") if key in found}
        return {**found, **paths}

    def evaluated(self, name: str) -> float:
        """The held-out loss that a job has logged last."""
        (path,) = (self.folder / "disttrain-runs").glob(f"llama-{name}-*/metrics/metrics.jsonl")
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        return float(rows[-1]["validation_metrics/global_avg_loss"])


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steps]:
    workplace = Workplace(tmp_path_factory.mktemp("llama"))
    shutil.copytree(REPOSITORY / "examples", workplace.folder / "examples")
    commands = [command for command, _ in console_steps(LLAMA)]
    # Each has a shell of its own, and so its own limit: the variables are set anew.
    variables = [command for command in commands if re.match(r"\w+=", command)]

    def shell(command: str) -> str:
        run = workplace.execute(["bash", "-c", "\n".join([*variables, command])])
        assert run.wait() == 0, f"$ {command}\n{run.stdout}{run.stderr}"
        return run.stderr + run.stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
        try:
            yield Steps(shell, {command: shell(command) for command in commands}, workplace.folder)
        finally:
            workplace.clean_up()


def loss_of(model: Any, data: Datasets) -> float:
    """The mean over all tokens of the held-out samples that count."""
    total, count = 0.0, 0
    assert data.held_out is not None
    for number in range(len(data.held_out)):
        tokens, targets = data.held_out[number]
        total += functional.cross_entropy(logits(model, tokens), targets, ignore_index=IGNORED, reduction="sum").item()
        count += int((targets != IGNORED).sum())
    return total / count


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens.unsqueeze(0)).logits[0]
    return found


def test_the_commands_print_what_the_page_shows(steps: Steps) -> None:
    """But for the numbers, which other versions of Python and processors have others of."""
    shown = [(command, line) for command, lines in console_steps(LLAMA) for line in lines]
    assert len(shown) > 8
    for command, line in shown:
        lines = [NUMBER.sub("N", printed) for printed in steps.printed[command].splitlines()]
        expected = ".*".join(re.escape(part) for part in NUMBER.sub("N", line).split("…"))
        assert any(re.fullmatch(expected, printed) for printed in lines), f"$ {command}\n{line}\n{lines}"


def test_the_same_files_give_the_same_tokenizer(steps: Steps) -> None:
    (command,) = (command for command in steps.printed if "tokenizer.py" in command)
    steps.shell(command.replace("$llama/tokenizer", "again"))
    written = sorted(path.name for path in (steps.folder / CLAIM / "tokenizer").iterdir())
    assert written == ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in written:
        assert (steps.folder / "again" / name).read_bytes() == (steps.folder / CLAIM / "tokenizer" / name).read_bytes()


def test_from_pretrained_computes_what_the_trainer_measured(steps: Steps) -> None:
    expected = steps.evaluated("pretrain")
    assert expected < 0.6 * UNIFORM
    found = loss_of(steps.loaded("model"), corpus.load(CorpusConfig.model_validate(steps.data("pretrain"))))
    assert found == pytest.approx(expected, rel=1e-5)


def test_peft_computes_what_the_trainer_measured(steps: Steps) -> None:
    data = chat.load(ChatConfig.model_validate(steps.data("finetune")))
    expected = steps.evaluated("finetune")
    assert loss_of(steps.adapted(), data) == pytest.approx(expected, rel=1e-5)
    assert expected < 0.5 * loss_of(steps.loaded("model"), data)


def test_the_merged_model_computes_what_the_adapted_one_does(steps: Steps) -> None:
    tokens = torch.arange(64)
    adapted = logits(steps.adapted(), tokens)
    torch.testing.assert_close(logits(steps.loaded("merged"), tokens), adapted, rtol=FLOAT_ERROR, atol=FLOAT_ERROR)
    assert (adapted - logits(steps.loaded("model"), tokens)).abs().max() > 0.1


def test_generation_is_deterministic_and_the_adapter_changes_it(steps: Steps) -> None:
    generated = [command for command in steps.printed if "generate.py" in command]
    assert len(generated) == 2
    before = ("def read(", "without the adapter:\n")
    texts = [steps.printed[command].partition(start)[2] for command, start in zip(generated, before, strict=True)]
    assert all(texts)
    assert all(steps.shell(command).endswith(text) for command, text in zip(generated, texts, strict=True))
    without, _, adapted = texts[1].partition("with the adapter:\n")
    assert adapted.strip()
    assert without.strip() != adapted.strip()
