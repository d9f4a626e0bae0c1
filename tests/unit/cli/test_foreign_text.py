"""Whatever others have written into whatever object, what a verb writes is text: no control character but line ends."""

import io
import json
import os
import re
import threading
import tty
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import disttrain
import disttrain.local.view
from disttrain.errors import CommandError
from disttrain.local.folder import RunFolder
from disttrain.local.summary import summary
from disttrain.local.view import PlainView, TerminalView
from disttrain.main import main
from disttrain.output import Painted, ask, drain, print_stderr, prompt, show
from disttrain.run import _as_yaml
from disttrain.terminal import console, painted, rendered, table
from disttrain_api.status import Condition, ConditionType, JobStatus, Metric, Phase, Progress
from disttrain_operator.decide.decision import Event
from tests.builders import a_manifest
from tests.unit.cli.fake_api import JOBS, TIME, FakeApi, a_condition
from tests.unit.cli.hostile_world import EVIL, a_world, any_text, bad_in, is_identity, poisoned, put, strings

# On a terminal: colours, and how a live table is drawn again.
OWN_ESCAPES = re.compile(r"\x1b\[(\d+(;\d+)*m|2K|\d*A|\?25[hl])|\r")


TABLES = [
    *(["list"], ["list", "-A"], ["list", "-o", "wide"], ["get", "digits"], ["describe", "digits"]),
    *(["events", "digits"], ["logs", "digits"], ["top"]),
]
PLAIN = [["why", "digits"], ["doctor"]]
OBJECTS = [
    [*arguments, "-o", form]
    for arguments in (["list"], ["get", "digits"], ["events", "digits"])
    for form in ("json", "yaml")
]
READS = TABLES + PLAIN + OBJECTS
CHANGES = [["suspend", "digits"], ["resume", "digits"], ["delete", "digits"], ["delete", "digits", "--yes"]]
STATES = ("Failed", "Running", "Suspended", "Pending", "Succeeded")
ALL_STRINGS = {
    state: [path for path in strings(world) if not is_identity(path)]
    for state, world in ((state, a_world(state)) for state in STATES)
}


def output_of(arguments: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    capfd.readouterr()
    main(arguments)
    return "".join(capfd.readouterr())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("arguments", READS + CHANGES, ids=" ".join)
def test_hostile_texts_in_every_string_are_shown_as_text(api, capfd, arguments, state):
    put(api, poisoned(a_world(state), EVIL, ALL_STRINGS[state]), EVIL)
    assert not bad_in(output_of(arguments, capfd))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(any_text, st.sampled_from(READS + CHANGES), st.sampled_from(STATES), st.data())
def test_any_text_in_any_string_is_shown_as_text(api, capfd, text, arguments, state, data):
    paths = data.draw(st.lists(st.sampled_from(ALL_STRINGS[state]), min_size=1, max_size=5))
    put(api, poisoned(a_world(state), text, paths), text)
    assert not bad_in(output_of(arguments, capfd))


@pytest.mark.parametrize("arguments", TABLES + PLAIN, ids=" ".join)
def test_what_others_wrote_can_be_read(api: FakeApi, capfd: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    put(api, poisoned(a_world("Failed"), EVIL, ALL_STRINGS["Failed"]), EVIL)
    printed = output_of(arguments, capfd)
    assert "\\u202e[bold]x[/bold]\\u2066" in printed


@pytest.mark.parametrize("arguments", [["get", "digits"], ["logs", "digits"], ["submit"]], ids=" ".join)
@pytest.mark.parametrize("answer", [{"message": EVIL}, EVIL.encode()], ids=["JSON", "text"])
def test_what_the_api_server_refuses_is_text(api, capfd, tmp_path, arguments, answer):
    api.answers[f"{JOBS.format('default')}/digits"] = (500, answer)
    api.answers[JOBS.format("default")] = (500, answer)
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(a_manifest()))
    printed = output_of([*arguments, str(file)] if arguments == ["submit"] else arguments, capfd)
    assert "\\x1b]52;c;eA==" in printed or "500" in printed
    assert not bad_in(printed)


@pytest.mark.parametrize("arguments", [*READS, ["submit", "--wait"]], ids=" ".join)
def test_half_a_character_is_a_sentence(api, capfd, tmp_path, arguments):
    put(api, poisoned(a_world("Failed"), "\ud800", ALL_STRINGS["Failed"]), "a line")
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(a_manifest()))
    printed = output_of([*arguments, str(file)] if arguments[0] == "submit" else arguments, capfd)
    assert printed
    assert not bad_in(printed)


OWN = a_manifest(training=None, workers={"replicas": 1, "image": "an/image", "command": ["python", "train.py"]})


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    any_text,
    st.sampled_from([["validate"], ["submit"], ["plan"], ["plan", "-o", "json"]]),
    st.sampled_from(["yaml", "json"]),
    st.data(),
)
def test_a_hostile_manifest_is_checked_in_text(api, capfd, tmp_path, text, verb, form, data):
    paths = data.draw(st.lists(st.sampled_from([*strings(OWN), ("spec", "workers", "replicas")]), max_size=3))
    raw = poisoned(OWN, text, paths) | ({text: text} if not paths else {})
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(raw) if form == "json" else yaml.safe_dump(raw))
    printed = output_of([*verb, str(file)], capfd)
    assert not bad_in(printed)
    assert printed


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(st.characters(exclude_categories=())))
def test_every_way_to_a_person_leads_through_one_escape(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Red where `show` or `tell` writes a text as it is."""
    capfd.readouterr()
    show(text)
    print_stderr(text)
    show(rendered(text, table([text], [[text]])))
    drain()
    assert not bad_in("".join(capfd.readouterr()))


class Terminal:
    """A terminal in place of standard output and standard error, and what is written on it."""

    def __enter__(self) -> "Terminal":
        drain()
        self._master, slave = os.openpty()
        tty.setraw(slave)
        self._kept = [os.dup(number) for number in (1, 2)]
        for number in (1, 2):
            os.dup2(slave, number)
        os.close(slave)
        self._parts: list[bytes] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        return self

    def _read(self) -> None:
        while True:
            try:
                part = os.read(self._master, 65536)
            except OSError:
                return
            if not part:
                return
            self._parts.append(part)

    def __exit__(self, *_: object) -> None:
        drain()
        for number, kept in zip((1, 2), self._kept, strict=True):
            os.dup2(kept, number)
            os.close(kept)
        # The last end of the terminal is closed now.
        self._reader.join()
        os.close(self._master)

    @property
    def text(self) -> str:
        return b"".join(self._parts).decode()


@pytest.mark.parametrize("state", ["Failed", "Succeeded"])
@pytest.mark.parametrize("arguments", READS, ids=" ".join)
def test_on_a_terminal_only_colours_and_cursors_of_ours_are_no_text(api, monkeypatch, arguments, state):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "400")
    put(api, poisoned(a_world(state), EVIL, ALL_STRINGS[state]), EVIL)
    with Terminal() as terminal:
        main(arguments)
    assert ("\x1b[" in terminal.text) == (arguments in TABLES)
    assert "\x1b[8m" not in terminal.text
    assert not bad_in(OWN_ESCAPES.sub("", terminal.text))


def test_a_run_says_what_others_have_written_as_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines, drawn = io.StringIO(), io.StringIO()
    monkeypatch.setattr(disttrain.local.view, "standard_error", lambda: drawn)
    event, status = Event(EVIL, EVIL, warning=True), JobStatus(phase=Phase.RUNNING, attempt=1)
    for view in (PlainView("digits", stream=lines), TerminalView("digits")):
        with view:
            view.event(event)
            view.status(status)
            view.log(EVIL)
    assert len(lines.getvalue().splitlines()) == 3
    assert not bad_in(lines.getvalue())
    assert "\x1b[8m" not in drawn.getvalue()
    assert not bad_in(OWN_ESCAPES.sub("", drawn.getvalue()))
    assert "\\x1b]52;c;eA==" in drawn.getvalue()


def test_the_end_of_a_run_is_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder(tmp_path)
    folder.logs.mkdir()
    folder.log("p").write_text("\x1b[32mgreen\x1b[0m\nover\rwritten\n" + EVIL)
    failed = Condition.model_validate(a_condition("Failed") | {"reason": EVIL, "message": EVIL})
    attempt = {"number": 1, "startTime": TIME, "verdict": {"reason": EVIL, "message": EVIL, "pod": "p"}}
    status = JobStatus.model_validate({"attempts": [attempt]}).model_copy(update={"conditions": [failed]})
    print_stderr(summary(status, folder, storage=None))
    done = JobStatus(conditions=[failed.model_copy(update={"type": ConditionType.COMPLETE})]).model_copy(
        update={"progress": Progress(step=1, total_steps=1, metrics=[Metric(name=EVIL, value=1.0)], update_time=TIME)}
    )
    print_stderr(summary(done, folder, storage=EVIL))
    drain()
    printed = capfd.readouterr().err
    assert not bad_in(printed)
    assert "    green\n    over\n    written\n" in printed


def test_the_status_of_a_run_is_text_and_the_same_value() -> None:
    for word in (EVIL, "é ½", "\u202e"):
        progress = Progress(step=1, total_steps=1, evaluation_failure=word, update_time=TIME)
        text = _as_yaml(JobStatus(progress=progress))
        assert not bad_in(text)
        assert yaml.safe_load(text)["status"]["progress"]["evaluationFailure"] == word
    assert "é ½" in _as_yaml(JobStatus(mesh="é ½"))


def test_a_question_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disttrain.output._reads_terminal", lambda: True)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nname\n"))
    with Terminal() as terminal:
        assert ask(EVIL) is True
        assert prompt(EVIL) == "name"
    assert terminal.text.count("\\x1b]52;c;eA==") == 2
    assert not bad_in(terminal.text)


def test_what_a_live_table_says_below_it_is_text() -> None:
    made = table(["NAME"], [["digits"]])
    made.caption = EVIL
    out = console(io.StringIO(), terminal=True)
    out.print(made)
    assert not bad_in(OWN_ESCAPES.sub("", out.file.getvalue()))


def test_an_error_is_text(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise CommandError(EVIL)

    monkeypatch.setattr("disttrain.main._run", fail)
    assert not bad_in(output_of([], capfd))


def test_only_what_was_painted_here_has_colours(capfd: pytest.CaptureFixture[str]) -> None:
    show(Painted("\x1b[32mgreen\x1b[0m"))
    show("\x1b[32mgreen\x1b[0m")
    assert painted(EVIL, 32, EVIL).count("\x1b") == 2
    assert capfd.readouterr().out == "\x1b[32mgreen\x1b[0m\n\\x1b[32mgreen\\x1b[0m\n"


PAINTERS = {"terminal.py"}


def test_consoles_and_colours_are_made_in_one_place() -> None:
    for path in Path(next(iter(disttrain.__path__))).rglob("*.py"):
        if path.name not in PAINTERS:
            assert not re.search(r"(?<!Plain)\bConsole\(|\bPainted\(|\\x1b", path.read_text()), path
