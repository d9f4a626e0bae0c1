"""Files -> jobs: everything that is wrong is said at once, each with its line, and nothing ends in a traceback."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from disttrain_api import DistTrainingJob, ManifestError, load, parse
from disttrain_api.crd import openapi_schema
from disttrain_api.moved import CARRIED, MOVED, RESHAPED, carried_over
from disttrain_api.validate import problems, read_job, read_spec
from tests.builders import a_claim_template, a_manifest, merge
from tests.suites import examples

GOOD = """\
apiVersion: disttrain.io/v1alpha1
kind: DistTrainingJob
metadata: {name: digits}
spec:
  workers: {replicas: 2}
  training:
    model: {name: mlp}
    data: {name: digits}
    steps: 10
    microBatchSize: 8
    optimizer: {learningRate: 3e-4}
"""


def refused(text: str) -> list[str]:
    """All problems of a text, as `line: problem`."""
    with pytest.raises(ManifestError) as caught:
        parse(text)
    return [f"{problem.line}: {problem}" for problem in caught.value.problems]


def test_a_manifest_is_read(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD)
    job = load(file)
    assert isinstance(job, DistTrainingJob)
    assert (job.metadata.name, job.spec.world_size) == ("digits", 2)
    assert job.spec.training.optimizer.learning_rate == 0.0003


@pytest.mark.parametrize(
    ("good", "bad", "sentence"),
    [
        ("replicas: 2", "replica: 2", "5: spec.workers.replica: unknown field; did you mean `replicas`?"),
        (
            "microBatchSize: 8",
            "micro_batch_size: 8",
            "10: spec.training.micro_batch_size: unknown field; did you mean `microBatchSize`?",
        ),
        (
            "    steps: 10",
            "    zzz: 1\n    steps: 10",
            (
                "9: spec.training.zzz: unknown field; known here: `activationCheckpointing`, `attention`, "
                "`callbacks`, `checkpoint`, `compile`, `data`, `dataWorkers`, `evaluation`, `float8`, "
                "`globalBatchSize`, "
                "`gradientAccumulationSteps`, `logging`, `loss`, `lrSchedule`, `maxGradientNorm`, `microBatchSize`, "
                "`model`, `offload`, `optimizer`, `precision`, `preflight`, `profiling`, `seed`, `skipSteps`, "
                "`steps`, `task`"
            ),
        ),
        (
            "spec:",
            "stuff: 1\nspec:",
            "4: stuff: unknown field; known here: `apiVersion`, `kind`, `metadata`, `spec`, `status`",
        ),
        (
            "steps: 10",
            "steps: '10'",
            "9: spec.training.steps: must be an integer, not the string '10'; write it without quotes",
        ),
        ("steps: 10", "steps: 1.5", "9: spec.training.steps: must be an integer, not the number 1.5"),
        ("steps: 10", "steps: true", "9: spec.training.steps: must be an integer, not true"),
        ("steps: 10", "steps: 0", "9: spec.training.steps: must be greater than or equal to 1, not 0"),
        ("steps: 10", "steps: [10]", "9: spec.training.steps: must be an integer, not a list"),
        ("steps: 10", "steps:", "9: spec.training.steps: has no value: set one, or remove the key"),
        ("    steps: 10\n", "", "6: spec.training.steps: must be given"),
        ("3e-4", "0", "11: spec.training.optimizer.learningRate: must be greater than 0, not 0"),
        (
            "{learningRate: 3e-4}",
            "{name: adamw}",
            (
                "11: spec.training.optimizer.name: must be one of 'SGD', 'Adam', 'AdamW', 'Adafactor', 'Muon', not the"
                " string 'adamw'; did you mean 'AdamW'?"
            ),
        ),
        ("{replicas: 2}", "[]", "5: spec.workers: must be an object with keys and values, not a list"),
        ("  workers: {replicas: 2}\n", "", "4: spec.workers: must be given"),
        (
            "metadata: {name: digits}",
            "metadata: {name: 7}",
            "3: metadata.name: must be a string, not the number 7; write it in quotes",
        ),
        (
            "metadata: {name: digits}",
            "metadata: {name: digits, lables: {}}",
            "3: metadata.lables: unknown field; did you mean `labels`?",
        ),
        ("metadata: {name: digits}", "metadata: {}", "3: metadata.name: must be given"),
        ("kind: DistTrainingJob", "kind: Pod", "2: kind: must be 'DistTrainingJob', not the string 'Pod'"),
        (
            "apiVersion: disttrain.io/v1alpha1",
            "apiVersion: v1",
            "1: apiVersion: must be 'disttrain.io/v1alpha1', not the string 'v1'",
        ),
        (
            "model: {name: mlp}",
            "model: {entrypoint: mine}",
            ("7: spec.training.model.entrypoint: 'mine' must match ^[A-Za-z_][A-Za-z0-9_.]*:[A-Za-z_][A-Za-z0-9_]*$"),
        ),
        (
            "{replicas: 2}",
            "{template: {spec: {containers: [{name: trainer, imagee: x}]}}}",
            "5: spec.workers.template.spec.containers[0].imagee: unknown field; did you mean `image`?",
        ),
        (
            "{replicas: 2}",
            "{template: {spec: {containers: [{name: a, resources: {limits: {cpu: 0.5}}}]}}}",
            (
                "5: spec.workers.template.spec.containers[0].resources.limits.cpu: must be an integer or a string, not"
                " the number 0.5; write it in quotes"
            ),
        ),
        (
            "{replicas: 2}",
            "{template: {spec: {containers: [{name: a}, {name: a}]}}}",
            "5: spec.workers.template.spec.containers[1]: name 'a' is already in [0]",
        ),
        (
            "{replicas: 2}",
            "{template: {spec: {containers: [{image: a}]}}}",
            "5: spec.workers.template.spec.containers[0].name: must be given",
        ),
        (
            "{replicas: 2}",
            "{template: {spec: {nodeSelector: }}}",
            "5: spec.workers.template.spec.nodeSelector: has no value: set one, or remove the key",
        ),
        (
            "{replicas: 2}",
            "{template: {metadata: {name: mine}}}",
            "5: spec.workers.template.metadata.name: unknown field; known here: `annotations`, `labels`",
        ),
    ],
)
def test_a_mistake_is_the_one_problem_reported(good: str, bad: str, sentence: str) -> None:
    assert good in GOOD
    assert refused(GOOD.replace(good, bad, 1)) == [sentence]


def test_all_mistakes_are_reported_at_once_in_the_order_of_the_file() -> None:
    text = (
        GOOD.replace("name: digits}\nspec", "name: Digits}\nspec")
        .replace("{replicas: 2}", "{replicas: 2, processesPerPod: 4}\n  parallelism: {dataParallelReplicateDegree: 6}")
        .replace("steps: 10", "stepz: 10")
        .replace("{learningRate: 3e-4}", "{name: SGD, beta1: 0.9}\n    offload: {parameters: 1}")
    )
    assert [problem.partition(" ")[0] + problem.split(":")[1] for problem in refused(text)] == [
        "3: metadata.name",
        "6: spec.parallelism",
        "7: spec.training.steps",
        "10: spec.training.stepz",
        "12: spec.training.optimizer",
        "13: spec.training.offload.parameters",
    ]


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (
            [{"action": "FailJob"}, {"onExitCodes": {"operator": "In", "values": [7, 999]}}],
            [
                "spec.runPolicy.failurePolicy.rules[1].action: must be given",
                (
                    "spec.runPolicy.failurePolicy.rules[1].onExitCodes.values[1]: must be less than or equal to 255,"
                    " not 999"
                ),
            ],
        ),
        ([3], ["spec.runPolicy.failurePolicy.rules[0]: must be an object with keys and values, not the number 3"]),
        ([], ["spec.runPolicy.failurePolicy.rules: must have at least 1 item"]),
        (
            [{"action": "Ignore", "onPodConditions": [{"type": "A", "reasn": "b"}]}],
            ["spec.runPolicy.failurePolicy.rules[0].onPodConditions[0].reasn: unknown field; did you mean `reason`?"],
        ),
    ],
)
def test_mistakes_in_lists_are_reported_and_leave_the_rest_to_the_rules(rules: list[Any], expected: list[str]) -> None:
    """Among them the rule that is broken elsewhere: a wrong item takes its list out of doubt, not the whole job."""
    wrong = a_manifest(runPolicy={"failurePolicy": {"rules": rules}}, parallelism={"dataParallelReplicateDegree": 3})
    found = [str(problem) for problem in problems(wrong)]
    assert found[: len(expected)] == expected
    assert [problem.partition(":")[0] for problem in found[len(expected) :]] == ["spec.parallelism"]


def test_numbers_are_not_compared_while_one_of_them_is_wrong() -> None:
    text = GOOD.replace("{replicas: 2}", "{replicas: two}\n  parallelism: {dataParallelReplicateDegree: 6}")
    assert refused(text) == ["5: spec.workers.replicas: must be an integer, not the string 'two'"]


def test_the_config_of_a_built_in_model_is_checked() -> None:
    (sentence,) = refused(GOOD.replace("{name: mlp}", "{name: mlp, config: {hiddenSizes: [0]}}"))
    assert sentence.startswith("7: spec.training.model.config.hiddenSizes[0]: ")


def test_a_job_read_back_from_a_cluster_is_a_manifest() -> None:
    job = a_manifest()
    job["metadata"] |= {
        "uid": "x",
        "resourceVersion": "1",
        "generation": 1,
        "creationTimestamp": None,
        "managedFields": [],
    }
    assert read_job(job | {"status": {"phase": "Running"}})[1] == []


def test_the_spec_of_a_stored_job_is_read_like_a_manifest() -> None:
    spec, found = read_spec(a_manifest()["spec"])
    assert spec is not None
    assert found == []
    spec, found = read_spec({"workers": {"replicas": "2"}})
    assert spec is None
    assert [problem.path for problem in found] == ["spec.workers.replicas", "spec.workers"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["spec", "workers", "template", "containers", "training", "model", "config", "name", "x"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


def values_of(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything in a manifest."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [path, *(found for key, item in items for found in values_of(item, (*path, key)))]


FULL = a_manifest(
    parallelism={"dataParallelReplicateDegree": 2, "dataParallel": {"mode": "AllReduce"}},
    storage=a_claim_template(),
    suspend=False,
    workers={
        "template": {
            "metadata": {"labels": {"a": "b"}},
            "spec": {"containers": [{"name": "trainer", "env": [{"name": "A"}]}], "volumes": [{"name": "v"}]},
        }
    },
)


@settings(max_examples=examples(300))
@given(st.sampled_from(values_of(FULL)), anything)
def test_nothing_in_place_of_anything_ends_in_a_traceback(path: tuple[Any, ...], value: Any) -> None:
    def replaced(tree: Any, rest: tuple[Any, ...]) -> Any:
        if not rest:
            return value
        if isinstance(tree, dict):
            return {key: replaced(item, rest[1:]) if key == rest[0] else item for key, item in tree.items()}
        return [replaced(item, rest[1:]) if index == rest[0] else item for index, item in enumerate(tree)]

    job, found = read_job(replaced(FULL, path))
    assert job is not None or found
    for problem in found:
        assert problem.message
        assert "\n" not in str(problem)


@pytest.mark.parametrize(
    ("written", "sentence"),
    [
        ("runPolicy: {suspend: true}", "spec.runPolicy.suspend: unknown field; it is `spec.suspend` now"),
        ("runPolicy: {activeDeadlineSeconds: 60}", "it is `spec.activeDeadlineSeconds` now"),
        ("runPolicy: {managedBy: a.b/c}", "spec.runPolicy.managedBy: unknown field; it is `spec.managedBy` now"),
        ("runPolicy: {schedulingPolicy: {gang: Gate}}", "it is `spec.runPolicy.schedulingPolicy.gangScheduler` now"),
        (
            "runPolicy: {failurePolicy: {rules: [{action: FailJob, exitCodes: {values: [7]}}]}}",
            (
                "spec.runPolicy.failurePolicy.rules[0].exitCodes: unknown field; it is"
                " `spec.runPolicy.failurePolicy.rules[].onExitCodes` now, whose `operator` must be given"
            ),
        ),
        (
            "storage: {url: s3://a, retentionPolicy: Delete}",
            (
                "spec.storage.retentionPolicy: must be an object with keys and values, not the string 'Delete'; it is"
                " `spec.storage.retentionPolicy.whenDeleted` now"
            ),
        ),
    ],
)
def test_a_field_of_an_earlier_version_is_refused_with_where_it_went(written: str, sentence: str) -> None:
    (problem,) = refused(f"{GOOD}  {written}\n")
    assert problem.endswith(sentence)


@given(st.sampled_from(sorted(MOVED)), anything)
def test_whatever_an_old_field_holds_its_successor_is_named(path: str, value: Any) -> None:
    *above, name = path.split(".")
    parent = manifest = a_manifest(storage={"claimName": "mine"})
    for part in above:
        key, is_list, _ = part.partition("[]")
        parent = parent.setdefault(key, [{}] if is_list else {})
        parent = parent[0] if is_list else parent
    parent[name] = value
    _, found = read_job(manifest)
    assert (path.replace("[]", "[0]"), MOVED[path]) in {(problem.path, problem.hint) for problem in found}


def fields_of(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the paths of all fields of a schema."""
    yield path
    for name, field in schema.get("properties", {}).items():
        yield from fields_of(field, f"{path}.{name}")
    if "items" in schema:
        yield from fields_of(schema["items"], f"{path}[]")


def test_no_field_that_is_reported_as_moved_exists() -> None:
    known = set(fields_of(openapi_schema()["properties"]["spec"], "spec"))
    assert known & set(MOVED) == set(CARRIED)
    assert known.issuperset(RESHAPED)
    successors = [word for hint in (MOVED | RESHAPED).values() for word in re.findall(r"`(spec[^`]*)`", hint)]
    assert set(successors) <= known


@pytest.mark.parametrize(
    ("stored", "read", "counting"),
    [
        ({"suspend": True}, {"suspend": True}, ["spec.runPolicy.suspend"]),
        ({"suspend": False}, {}, []),
        ({"managedBy": "a.example/b"}, {"managedBy": "a.example/b"}, ["spec.runPolicy.managedBy"]),
        ({"schedulingPolicy": {"gang": "None"}}, {"runPolicy": {"schedulingPolicy": {"gangScheduler": "None"}}}, []),
        (
            {"schedulingPolicy": {"gang": "Gate"}},
            {"runPolicy": {"schedulingPolicy": {"gangScheduler": "Gate"}}},
            ["spec.runPolicy.schedulingPolicy.gang"],
        ),
    ],
)
def test_what_a_stored_job_waits_for_counts_at_its_former_place(stored, read, counting):
    filled_in = {"suspend": False, "runPolicy": {"maxRestarts": 3, "schedulingPolicy": {"gangScheduler": "None"}}}
    spec = merge(filled_in, {"runPolicy": stored})
    before = copy.deepcopy(spec)
    assert carried_over(spec) == (merge(filled_in, read), tuple(counting))
    assert spec == before


@pytest.mark.parametrize("odd", [None, 3, [], {"runPolicy": None}, {"runPolicy": {"schedulingPolicy": ["gang"]}}])
def test_what_is_no_spec_is_left_as_it_is(odd: Any) -> None:
    assert carried_over(odd) == (odd, ())
