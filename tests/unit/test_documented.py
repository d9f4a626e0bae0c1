"""Every documented command is run by a test: those of a cluster by tests/e2e/test_as_written.py, those of
examples/llama by tests/local/test_llama.py."""

import re
from pathlib import Path

import pytest

from tests.documented import LLAMA, commands_on_a_cluster, console_commands, console_steps, notes_commands, pages
from tools.cluster.paths import REPOSITORY

RUN_BY_OTHERS = {
    "make run": "tests/local/test_examples.py trains the same file",
    "make test": "is what runs this test",
    "disttrain data prepare docs --pattern '*.md' --tokenizer bytes --output corpus": "tests/local/test_examples.py",
    "disttrain data inspect corpus": "tests/unit/cli/test_corpora.py",
    "disttrain data verify corpus": "tests/unit/cli/test_corpora.py",
    "disttrain run examples/corpus.yaml": "tests/local/test_examples.py",
    "kubectl get dtj oom -o jsonpath='{.status.attempts[0].verdict}'": "tests/e2e/test_faults.py",
}
INSTALLING = REPOSITORY / "docs" / "installing.md"


def test_a_command_is_what_a_shell_would_run(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```console\n$ a 'b # c'   # why\noutput\n$ d --e='{.f}'\n```\n\n```sh\ng\n```\n")
    assert console_commands(page) == ["a 'b # c'", "d --e='{.f}'"]
    assert console_steps(page) == [("a 'b # c'", ["output"]), ("d --e='{.f}'", [])]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_every_console_command_is_run_by_a_test(page: Path) -> None:
    known = {*commands_on_a_cluster(), *console_commands(LLAMA), *RUN_BY_OTHERS}
    assert [command for command in console_commands(page) if command not in known] == []


def test_the_readme_and_the_chart_say_what_the_installing_page_says() -> None:
    assert len(notes_commands()) == 3
    assert set(notes_commands()) <= set(console_commands(INSTALLING))
    assert len(console_commands(REPOSITORY / "README.md")) == 7


def test_each_test_that_the_security_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)((?:::\w+)+)`", (REPOSITORY / "docs" / "security.md").read_text())
    assert len(named) > 20
    for file, path in named:
        module = REPOSITORY / file
        assert module.exists(), file
        source = module.read_text()
        for name in path.split("::")[1:]:
            assert re.search(rf"^\s*(?:async def|def|class) {name}\b", source, re.MULTILINE), f"{file}{path}"
