"""Jobs from functions: what travels, what does not, and what is refused before anything is sent."""

import functools
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import disttrain
from disttrain.errors import CommandError
from disttrain.function import ARGUMENTS, SOURCE, program_of
from disttrain.local.launch import expand
from disttrain_api.errors import ManifestError

OUTSIDE = 7


@disttrain.train(workers=2)
def written(path: str, *words: object, **more: object) -> None:
    """Write what it was called with."""
    import json
    from pathlib import Path

    class Kept:
        name = __name__

    # $(HOME) and $$ are no references of a kubelet's: "quoted" 'text' \n é
    text = "$(HOME) $$ \\ 'x'"
    Path(path).write_text(json.dumps([text, *words, more, Kept.name, written.__name__]))


def variables(job: dict[str, Any]) -> dict[str, str]:
    """Return the variables of a rank as a kubelet expands them."""
    found: dict[str, str] = {}
    for entry in job["spec"]["workers"]["env"]:
        found[entry["name"]] = expand(entry["value"], {"HOME": "wrong", **found})
    return found


def test_ranks_call_the_function_with_its_arguments(tmp_path: Path) -> None:
    """Red where the kubelet's references change the source, or a decorator travels with it."""
    job = written.job(str(tmp_path / "out"), 1, [None, {"a": True}], rate=0.5, text="$(HOME)")
    command = job["spec"]["workers"]["command"]
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "TMPDIR": str(tmp_path), **variables(job)}
    subprocess.run(command, env=environment, check=True, timeout=60)
    text = "$(HOME) $$ \\ 'x'"
    more = {"rate": 0.5, "text": "$(HOME)"}
    assert json.loads((tmp_path / "out").read_text()) == [text, 1, [None, {"a": True}], more, "__main__", "written"]
    assert (tmp_path / "written.py").read_text() == variables(job)[SOURCE]


def test_a_call_is_a_plain_call(tmp_path: Path) -> None:
    written(str(tmp_path / "here"))
    assert json.loads((tmp_path / "here").read_text())[-1] == "written"
    assert written.__doc__ == "Write what it was called with."


def test_the_job_has_what_the_decorator_says() -> None:
    @disttrain.train(
        workers=4, gpus=8, image="me/train:1", name="mine", storage="10Gi", env={"A": "b"},
        spec={"runPolicy": {"maxRestarts": 5}, "workers": {"resources": {"limits": {"memory": "1Gi"}}}},
    )  # fmt: skip
    def fit() -> None: ...

    job = fit.job()
    workers = job["spec"]["workers"]
    assert job["metadata"] == {"name": "mine"}
    assert (workers["replicas"], workers["gpusPerPod"], workers["image"]) == (4, 8, "me/train:1")
    assert workers["resources"] == {"limits": {"memory": "1Gi"}}
    assert workers["env"][0] == {"name": "A", "value": "b"}
    assert workers["command"][-1].endswith('exec torchrun "$file"'), "a pod of several ranks"
    assert job["spec"]["runPolicy"] == {"maxRestarts": 5}
    assert job["spec"]["storage"]["volumeClaimTemplate"]["spec"]["resources"]["requests"] == {"storage": "10Gi"}
    assert written.job("x")["metadata"] == {"generateName": "written-"}
    assert json.loads(variables(written.job("x"))[ARGUMENTS]) == {"args": ["x"], "kwargs": {}}


def test_a_text_in_the_source_may_hold_what_ends_a_line_elsewhere(tmp_path: Path) -> None:
    """Python's own lines end with \\n alone."""
    body = 'def odd():\n    text = "a\u2028b\x0cc"\n    return text + "end"\n'
    (tmp_path / "odd_lines.py").write_text(body)
    scope = runpy.run_path(str(tmp_path / "odd_lines.py"))
    assert body in program_of(scope["odd"])


def uses_a_global() -> int:
    return OUTSIDE


def uses_a_module_in_a_class() -> object:
    class Model(functools.partial):  # type: ignore[type-arg]
        pass

    return Model


def has_a_default_from_outside(rate: int = OUTSIDE) -> int:
    return rate


def calls_another() -> object:
    return uses_a_global()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (uses_a_global, "OUTSIDE"),
        (uses_a_module_in_a_class, "functools"),
        (has_a_default_from_outside, "OUTSIDE"),
        (calls_another, "uses_a_global"),
    ],
)
def test_what_a_function_uses_from_outside_is_named(function, names) -> None:
    with pytest.raises(CommandError, match=f"{function.__name__} uses {names} from outside"):
        disttrain.train()(function).job()


def test_annotations_and_its_own_name_are_no_use_of_something_outside() -> None:
    def fit(data: "Path", more: Path | None = None) -> Path | None:
        steps: functools.partial[int] | None = None
        return fit(data, more) if steps else None

    assert "def fit(" in program_of(fit)


def test_variables_of_an_outer_function_are_outside() -> None:
    rate = 0.1

    def fit() -> float:
        return rate

    with pytest.raises(CommandError, match="fit uses rate from outside"):
        disttrain.train()(fit).job()


@pytest.mark.parametrize("value", [(1, 2), {1: "a"}, Path("x"), b"x", {"a": [{1}]}, float], ids=repr)
def test_an_argument_that_would_come_out_as_another_is_refused(value) -> None:
    with pytest.raises(CommandError, match=f"argument rate is {type(value).__name__}: expected numbers, texts"):
        written.job("x", rate=value)


def test_a_call_that_the_function_does_not_take_is_refused_here() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'path'"):
        written.job()  # type: ignore[call-arg]
    with pytest.raises(CommandError, match=f"{ARGUMENTS} would have .* bytes; the most is 100000"):
        written.job("x" * 200_000)
    with pytest.raises(ManifestError, match="replicas"):
        disttrain.train(workers=0)(uses_nothing).job()


def uses_nothing() -> None: ...


def as_it_is(function: Any) -> Any:
    return function


@disttrain.train()
@as_it_is
def decorated_twice() -> None: ...


def test_what_is_no_plain_function_is_refused() -> None:
    with pytest.raises(CommandError, match="decorated_twice has other decorators"):
        decorated_twice.job()

    def yielding() -> Any:
        yield 1

    for wrong in (yielding, lambda: None, len, disttrain.Client, functools.cache(uses_nothing)):
        with pytest.raises(CommandError, match=r"write @disttrain.train\(\) before a `def`"):
            disttrain.train()(wrong)
    space: dict[str, Any] = {}
    exec("def made(): pass", space)
    with pytest.raises(CommandError, match=r"the source of made cannot be read"):
        program_of(space["made"])
