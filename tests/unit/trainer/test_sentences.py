"""What is said of an exception: what happened, on one line, and nothing that a terminal obeys."""

from collections.abc import Callable
from pathlib import Path

import pytest

from disttrain_api.report import RankError
from disttrain_trainer.runtime.entrypoint import call_entrypoint
from disttrain_trainer.runtime.errors import (
    CallbackFailed,
    EntrypointNotImportable,
    InvalidConfiguration,
    describe,
    describe_exit,
    one_line,
    own_errors,
)
from disttrain_trainer.runtime.failures import Failure

ADVICE = "the device is lost\nIt may have been lost before.\nFor more see the manual.\n"
BOTH = "the device is lost … For more see the manual."


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a sentence", "a sentence"),
        ("", "no message"),
        (" \n\t\n", "no message"),
        (ADVICE, BOTH),
        ("\n\n  a sentence\n\n", "a sentence"),
        ("twice\n\ntwice\n", "twice"),
        ("Error(s) in loading:\n\tmissing `a`\n\tmissing `b`", "Error(s) in loading: missing `b`"),
        ("red\x1b[31m and\x07 rung", "red\\x1b[31m and\\x07 rung"),
        ("cleared\x1b[2J\nthe \x9b2Jend", "cleared\\x1b[2J … the \\x9b2Jend"),
        ("a file \udcff", "a file \\udcff"),
        ("over\rwritten", "over … written"),
    ],
)
def test_first_and_last_line_on_one(text: str, sentence: str) -> None:
    assert one_line(ValueError(text)) == sentence


def test_a_long_line_leaves_room_for_the_last_one() -> None:
    sentence = one_line(ValueError("x" * 100_000 + "\n" + "y" * 100_000))
    assert "x… … y" in sentence
    assert sentence.endswith("y…")
    assert len(sentence) < 1100


def described(error: BaseException) -> str:
    return describe(error).message or ""


def test_what_torch_raises_from_the_error_of_a_lost_peer_says_that_a_peer_is_lost() -> None:
    def schedule() -> None:
        try:
            raise RuntimeError("gloo/pair")
        except RuntimeError as error:
            raise RuntimeError("the backward pass of a stage failed") from error

    with pytest.raises(RuntimeError) as caught, own_errors():
        schedule()
    assert described(caught.value) == "another rank is gone or cannot be reached: gloo/pair"


@pytest.mark.parametrize(
    ("error", "describes", "sentence"),
    [
        (RuntimeError(ADVICE), described, f"RuntimeError: {BOTH}"),
        (ConnectionError(ADVICE), described, f"ConnectionError: {BOTH}"),
        (RuntimeError("gloo/pair\nend"), described, "another rank is gone or cannot be reached: gloo/pair … end"),
        (InvalidConfiguration("`a` is \x1b[2J\nb"), described, "`a` is \\x1b[2J b"),
        (CallbackFailed("`a` is \x1b[2J\nb"), described, "`a` is \\x1b[2J b"),
        (RuntimeError(ADVICE), lambda error: Failure.of(error).message, f"RuntimeError: {BOTH}"),
        (RuntimeError("gloo/pair\nend"), lambda error: Failure.of(error).message, "gloo/pair … end"),
        (SystemExit(ADVICE), lambda error: describe_exit(error, 1, 2).message.split("called ")[1], f"sys.exit: {BOTH}"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_descriptions_are_lines(error: BaseException, describes: Callable[[BaseException], str], sentence: str) -> None:
    # What was raised has a place.
    with pytest.raises(type(error)) as caught:
        raise error
    assert describes(caught.value) == sentence


def test_what_an_import_raises_is_such_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "raises_lines.py").write_text(f"raise RuntimeError({ADVICE!r} + '\\x1b[2J')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(EntrypointNotImportable, match=r"raised RuntimeError: the device is lost … \\x1b\[2J; Python"):
        call_entrypoint("training.model", "raises_lines:model", {})


def _raised_from(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("report", "unquoted"),
    [
        (describe(InvalidConfiguration("`a` is 7")), None),
        (
            describe(_raised_from(EntrypointNotImportable("m1 raised KeyError: 1; try again"), KeyError(1))),
            "m1 raised KeyError: …; try again",
        ),
        (describe(ValueError("a secret")), "ValueError"),
        (describe(_raised_from(CallbackFailed("`f`: x: a secret"), ValueError("a secret"))), "`f`: x: …"),
        (describe(RuntimeError("gloo/pair a secret")), "another rank is gone or cannot be reached: …"),
    ],
)
def test_a_report_has_a_sentence_without_the_exceptions_text(report: RankError, unquoted: str | None) -> None:
    assert report.unquoted == unquoted


@pytest.mark.parametrize(
    ("module", "config", "kept"), [("raises_secret", {}, False), ("not_there", {}, True), ("json", {"odd": 1}, True)]
)
def test_a_sentence_is_cut_where_code_of_others_raised_what_it_quotes(tmp_path, monkeypatch, module, config, kept):
    (tmp_path / "raises_secret.py").write_text("raise RuntimeError('a secret')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises((EntrypointNotImportable, InvalidConfiguration)) as caught:
        call_entrypoint("training.model", f"{module}:loads", config)
    report = describe(caught.value)
    assert caught.value.__cause__ is not None
    assert (report.unquoted is None) == kept
    assert "a secret" not in (report.unquoted or "")


def test_what_code_passed_to_sys_exit_is_text_of_its_own() -> None:
    report = describe_exit(SystemExit("a secret"), 3, 5)
    assert report.message.endswith("called sys.exit: a secret")
    assert (report.unquoted or "").endswith("called sys.exit")
