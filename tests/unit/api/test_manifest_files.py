"""What a file holds: its encoding, its documents, the only job among them, and a name that is still to be made."""

from pathlib import Path

import pytest

from disttrain_api import ManifestError, load, parse
from disttrain_api.bounds import MAX_LISTED
from disttrain_api.manifest import MAX_BYTES, read
from disttrain_api.names import MAX_JOB_NAME_LENGTH
from tests.unit.api.test_manifest import GOOD, refused


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty: it must hold a DistTrainingJob"),
        (b"# only this\n---\n", "empty: it must hold a DistTrainingJob"),
        (b"\xff\xfe", "not UTF-8 text: save the file in that encoding"),
        (b"a: 1\nb: \xe9\n", "not UTF-8 text: save the file in that encoding"),
        (b"x" * (MAX_BYTES + 1), f"larger than {MAX_BYTES} bytes, which no Kubernetes object can be"),
        (
            b"kind: DistTrainingJob\nmetadata: {name: a}\n---\nkind: Job\n---\nkind: DistTrainingJob\nmetadata: []\n",
            (
                "3 objects (DistTrainingJob a, Job, DistTrainingJob), and 2 are a DistTrainingJob: put each job in a"
                " file of its own"
            ),
        ),
        (
            b"kind: Secret\nmetadata: {name: s}\n---\nkind: distTrainingJob\n",
            "2 objects (Secret s, distTrainingJob), and none is a DistTrainingJob",
        ),
        (b"kind: Secret\n---\nspec: {}\n", "one of 2 documents, but no object with a `kind`"),
        (b"kind: Secret\n---\nkind: [a]\n", "one of 2 documents, but no object with a `kind`"),
        (b"kind: Secret\n---\n- a\n", "one of 2 documents, but no object with a `kind`"),
        (b"kind: List\nitems: []\n", "empty: it must hold a DistTrainingJob"),
        (b"kind: List\nitems: [3, 4]\n", "one of 2 documents, but no object with a `kind`"),
        (b"just words", "must be an object with keys and values, not the string 'just words'"),
        (b"- a\n", "must be an object with keys and values, not a list"),
    ],
)
def test_a_file_that_is_no_job_says_so_in_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(content)
    with pytest.raises(ManifestError) as caught:
        load(file)
    assert [str(problem) for problem in caught.value.problems] == [message]
    assert str(caught.value).startswith(f"{file}:")


CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: models}
spec: {accessModes: [ReadWriteMany]}
"""


def indented(text: str) -> str:
    """The text as an item of a list."""
    return "- " + text.replace("\n", "\n  ").rstrip() + "\n"


@pytest.mark.parametrize(
    "whole",
    [
        "{claim}---\n{job}",
        "{job}---\n---\n{claim}---\n",
        "apiVersion: v1\nkind: List\nmetadata: {{}}\nitems:\n{claim_item}{job_item}",
        "kind: DistTrainingJobList\nitems:\n{job_item}---\n{claim}",
    ],
)
def test_the_only_job_among_other_objects_is_taken_with_its_lines(tmp_path: Path, whole: str) -> None:
    def text(job: str) -> str:
        return whole.format(claim=CLAIM, job=job, claim_item=indented(CLAIM), job_item=indented(job))

    file = tmp_path / "all.yaml"
    file.write_text(text(GOOD))
    found = read(file)
    assert (found.job, found.others) == (parse(GOOD), "PersistentVolumeClaim models")
    wrong = text(GOOD.replace("steps: 10", "stepz: 10"))
    line = 1 + wrong[: wrong.index("stepz")].count("\n")
    assert f"{line}: spec.training.stepz: unknown field; did you mean `steps`?" in refused(wrong)


def test_what_stands_beside_a_job_is_reported_within_bounds(tmp_path: Path) -> None:
    file = tmp_path / "all.yaml"
    others = "".join(f"---\nkind: K{'x' * 5000}{number}\nmetadata: {{name: n}}\n" for number in range(MAX_LISTED + 7))
    file.write_text(GOOD + others)
    others = read(file).others
    assert others.startswith("Kxxx")
    assert others.endswith("… n and 7 more")
    assert len(others) < 100 * MAX_LISTED
    (problem,) = refused(others)
    assert len(problem) < 100 * MAX_LISTED


def named(metadata: str) -> str:
    return GOOD.replace("{name: digits}", f"{{{metadata}}}", 1)


def test_what_is_wrong_with_another_object_is_not_of_interest() -> None:
    other = "---\nkind: Pod\nmetadata: {name: n, name: m}\nspec: {on: !!binary aGk=, mode: 0755}\n"
    assert parse(GOOD + other) == parse(GOOD)
    (problem,) = refused(GOOD.replace("steps: 10", "steps: 010") + other)
    assert problem.startswith("9: 010 means one thing to YAML 1.2 and another to kubectl: write 8 as kubectl reads it")
    (problem,) = refused(other)
    assert problem.startswith("3: n means one thing to YAML 1.2")


@pytest.mark.parametrize("length", [1, MAX_JOB_NAME_LENGTH - 5])
def test_a_name_may_be_left_to_the_api_server(length: int) -> None:
    begin = "s" * length
    metadata = parse(named(f"generateName: {begin}")).metadata
    assert (metadata.generate_name, len(metadata.name)) == (begin, length + 5)
    assert metadata.name.startswith(begin)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            f"generateName: {'s' * (MAX_JOB_NAME_LENGTH - 4)}",
            (
                f"3: metadata.generateName: the name has {MAX_JOB_NAME_LENGTH + 1} characters and may have at most"
                f" {MAX_JOB_NAME_LENGTH}: names of pods and hosts contain it; the API server adds 5 characters"
            ),
        ),
        (
            "generateName: Sweep-",
            (
                "3: metadata.generateName: 'Sweep-xxxxx' must begin with a lower-case letter, hold lower-case letters,"
                " digits and '-' only, and end with a letter or digit: a Service has this name; the API server adds 5"
                " characters"
            ),
        ),
        ("generateName: ''", "3: metadata.name: must be given"),
        ("name: Digits, generateName: sweep-", "3: metadata.name: 'Digits' must begin with a lower-case letter"),
    ],
)
def test_the_begin_of_a_name_is_held_to_what_the_name_is_held_to(metadata: str, message: str) -> None:
    (problem,) = refused(named(metadata))
    assert problem.startswith(message)


def test_a_name_that_is_given_counts_alone() -> None:
    assert parse(named("name: digits, generateName: sweep-")) == parse(GOOD)
    # As for the API server.
    assert parse(named("name: '', generateName: a")).metadata.name == "axxxxx"


def test_what_is_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="no such file"):
        load(tmp_path / "absent.yaml")
    with pytest.raises(ManifestError, match="this is a folder; give the file of one job"):
        load(tmp_path)
    with pytest.raises(ManifestError, match="cannot be read"):
        load("a\0b")


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + GOOD.encode())
    assert load(file).metadata.name == "digits"
