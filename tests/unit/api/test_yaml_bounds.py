"""What a text costs, it costs by its own length: bombs are refused, each by its sentence, before anything is built."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api import yaml12, yaml_bounds
from disttrain_api.yaml_bounds import MAX_BYTES, MAX_DEPTH, MAX_DOCUMENTS, MAX_KEY, YamlError
from tests.unit.api.yaml_bombs import BOMBS, OF_MANIFESTS, OF_OTHER_FILES

READERS = {"manifest": "yaml12.read", "other": "yaml_bounds.load"}
# What 100,000 values cost, and far less than a bomb.
SPARE_BYTES = 320 * 2**20
IN_A_CHILD = f"""
import pathlib, resource, sys
from disttrain_api import yaml12, yaml_bounds
text = pathlib.Path(sys.argv[1]).read_text()
pages = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + {SPARE_BYTES},) * 2)
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
try:
    READER(text)
except yaml_bounds.YamlError as error:
    sys.exit(str(error))
"""


@pytest.mark.parametrize(
    ("reader", "text", "sentence"),
    [
        *(pytest.param("manifest", *bomb, id=f"manifest: {name}") for name, bomb in (BOMBS | OF_MANIFESTS).items()),
        *(pytest.param("other", *bomb, id=f"other: {name}") for name, bomb in (BOMBS | OF_OTHER_FILES).items()),
    ],
)
def test_a_bomb_is_refused_by_its_own_sentence(tmp_path: Path, reader: str, text: str, sentence: str) -> None:
    """Red where an alias costs nothing, and without the bound on values, on bytes, or on levels."""
    file = tmp_path / "bomb.yaml"
    file.write_text(text)
    code = IN_A_CHILD.replace("READER", READERS[reader])
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[: len(sentence)]) == (1, sentence), done.stderr[-2000:]
    assert len(done.stderr) < 1000


def test_strings_of_aliases_are_one_string() -> None:
    (document,) = yaml12.read(f"a: &a 'é{'x' * 1000}'\nb: [{', '.join(['*a'] * 900)}]")
    found = document.value
    assert {id(item) for item in found["b"]} == {id(found["a"])}


def test_at_its_bounds_a_text_is_read() -> None:
    repeated = "x" * 1000
    (document,) = yaml12.read(f"a: &a {repeated}\nb: [{', '.join(['*a'] * 1000)}]")
    assert document.value["b"] == [repeated] * 1000
    assert yaml12.read("[" * MAX_DEPTH + "]" * MAX_DEPTH)[0].value is not None
    assert len(yaml12.read("---\na: 1\n" * MAX_DOCUMENTS)) == MAX_DOCUMENTS
    assert yaml12.read(f"? {'k' * MAX_KEY}\n: 1")[0].value == {"k" * MAX_KEY: 1}


def test_a_text_without_aliases_stands_for_no_more_than_it_says() -> None:
    length = MAX_BYTES + 1
    assert len(yaml_bounds.load("x" * length)) == length


@pytest.mark.parametrize("text", ["a: &a [*a]", "a: &a {b: *a}", "&a [&b [*a, *b]]", "a: &a {<<: *a}"])
def test_what_is_a_part_of_itself_is_refused(text: str) -> None:
    for read in (yaml12.read, yaml_bounds.load):
        with pytest.raises(YamlError, match="an alias refers to a value that contains it"):
            read(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("a: [1", "not YAML: "),
        ("a:\n\tb: 1", "a tab stands where YAML needs spaces"),
        ("a: \x07", "character '\\x07' is not allowed in YAML"),
        ("a: !!python/object:os.system {}", "not YAML: could not determine a constructor"),
        ("a: 2026-99-99", "not YAML: "),
        ("a: 1\n---\nb: 2", "2 documents, where one is expected"),
    ],
)
def test_what_is_wrong_with_another_file_is_a_sentence(text: str, sentence: str) -> None:
    with pytest.raises(YamlError) as caught:
        yaml_bounds.load(text)
    assert str(caught.value).startswith(sentence)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.dates(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=20), inner, max_size=3),
    max_leaves=10,
)


@given(values, st.booleans())
def test_another_file_is_read_as_pyyaml_reads_it(value: object, twice: bool) -> None:
    text = yaml.safe_dump([value, value] if twice else value)
    assert yaml_bounds.load(text) == yaml.safe_load(text)
    merged = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: [*b, {z: 4}], y: 5}"
    assert yaml_bounds.load(merged) == yaml.safe_load(merged)


def test_an_empty_file_is_none() -> None:
    assert yaml_bounds.load("") is None
    assert yaml_bounds.load("# nothing\n") is None
