"""The held-out part of each corpus of a mixture is also judged by itself, in every layout."""

import pytest

from disttrain_api.corpus import MixedCorpus
from disttrain_trainer.data.corpus import _names
from tests.corpora import TEXT, prepared
from tests.unit.trainer.comparisons import HELD_OUT_LOSS, series
from tests.unit.trainer.layouts import PIPELINE, SHARD
from tests.unit.trainer.worlds import WORLDS_WITHIN_SECONDS, run_cases, small, user

pytestmark = pytest.mark.timeout(WORLDS_WITHIN_SECONDS)

LAYOUTS = {"dp2": {}, "fsdp2": {SHARD: 2}, "pp2": {PIPELINE: 2, "pipeline": {"microbatches": 2}}}
LENGTH, FRACTION = 8, 0.1


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpora")
    texts = {"web": TEXT.encode() * 20, "digits": b"3141592653589793 " * 50}
    for name, text in texts.items():
        (path / name).mkdir()
        prepared(path / name, text).rename(path / f"{name}.tokens")

    def training(**data):
        common = {"sequenceLength": LENGTH, "heldOutFraction": FRACTION}
        return small(
            model=user("double_gpt", vocabularySize=256),
            data={"name": "corpus", "config": common | data},
            # The model stays as it is, whatever it is trained on.
            optimizer={"name": "SGD", "learningRate": 1e-300},
            steps=1,
            globalBatchSize=8,
            microBatchSize=4,
            evaluation={"interval": 1},
            checkpoint={"keepBest": 1, "bestMetric": "web.tokens/loss", "bestMode": "Min", "interval": 1}
            if "mixture" in data
            else {},
        )

    mixture = [{"path": str(path / f"{name}.tokens"), "weight": weight} for name, weight in (("web", 1), ("digits", 9))]
    alone = {name: [{"training": training(path=str(path / f"{name}.tokens"))}] for name in texts}
    alone["one rank"] = [{"training": training(mixture=mixture)}]
    two = {name: [{"training": training(mixture=mixture), "parallelism": layout}] for name, layout in LAYOUTS.items()}
    return run_cases(path / "one", 1, alone) | run_cases(path / "two", 2, two)


@pytest.mark.parametrize("layout", ["one rank", *LAYOUTS])
def test_the_loss_of_each_corpus_is_that_of_the_corpus_alone(results, layout):
    found = results[layout]
    assert found["errors"] == [None]
    expected = {name: series(results[name], HELD_OUT_LOSS)[0] for name in ("web", "digits")}
    assert abs(expected["web"] - expected["digits"]) > 1e-3
    for name, loss in expected.items():
        assert series(found, f"validation_metrics/{name}.tokens/loss") == pytest.approx([loss], rel=1e-10)
        assert found["report"].metrics[f"{name}.tokens/loss"] == pytest.approx(loss, rel=1e-10)
    (whole,) = series(found, HELD_OUT_LOSS)
    assert min(expected.values()) < whole < max(expected.values())


def test_one_corpus_has_no_figure_of_its_own(results):
    assert [key for line in results["web"]["metrics"] for key in line if key.endswith("/loss")] == []


def test_names_are_of_paths_and_differ():
    paths = ["/a/web", "s3://b/web", "/c/x y.bin", "/d/web", "/e/..", "/f/" + "n" * 300]
    assert _names([MixedCorpus(path=path) for path in paths]) == [
        "web",
        "web-2",
        "x-y.bin",
        "web-3",
        "corpus",
        "n" * 40,
    ]
