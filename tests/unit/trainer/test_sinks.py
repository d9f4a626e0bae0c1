"""Figures that go to MLflow and Weights & Biases, as their own packages hold them afterwards."""

import json
import os
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow.entities import Run
from mlflow.tracking import MlflowClient
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record

from disttrain_api.jobconfig import JobConfig
from disttrain_api.names import ExitCode
from disttrain_trainer.metrics.sinks import open as opening
from disttrain_trainer.metrics.sinks.mlflow import MLflowSink, flat, key_of
from disttrain_trainer.metrics.sinks.sink import Background, Samples, Values
from disttrain_trainer.metrics.sinks.wandb import WandBSink
from disttrain_trainer.metrics.tensorboard import open_events
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.worlds import job, run_ranks, small
from tests.waiting import GENEROUS

LOSS = "loss_metrics/global_avg_loss"
TRAINING = small(logging={"interval": 1, "sinks": ["MLflow", "WandB"]}, checkpoint={"interval": 3})


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two ranks that is stopped after its first checkpoint and goes on; both services keep files here."""
    folder = tmp_path_factory.mktemp("sinks")
    environment = {
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "DISTTRAIN_METRICS_DIR": str(folder / "metrics"),
        "HOME": str(folder),
    }
    for attempt, steps in enumerate((3, 6), start=1):
        config = job({**TRAINING, "steps": steps})
        ended = run_ranks(folder / str(attempt), config, 2, folder / "storage", attempt, **environment)
        assert [rank.code for rank in ended] == [0, 0], ended[0].err
        assert "figures are lost" not in ended[0].err
    return folder


def logged(place: Path) -> dict[int, float]:
    """Loss of each step, as metrics.jsonl has it."""
    lines = [json.loads(line) for line in (place / "metrics" / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line[LOSS] for line in lines if LOSS in line}


@pytest.fixture
def run(place: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[MlflowClient, Run]:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = MlflowClient((place / "mlruns").as_uri())
    experiment = client.get_experiment_by_name("disttrain")
    (found,) = client.search_runs([experiment.experiment_id])
    return client, found


def test_mlflow_has_one_run_with_the_figures_of_both_attempts(place: Path, run: tuple[MlflowClient, Run]) -> None:
    client, found = run
    history = client.get_metric_history(found.info.run_id, LOSS)
    assert {metric.step: metric.value for metric in history} == logged(place)
    assert sorted(logged(place)) == [1, 2, 3, 4, 5, 6]
    assert found.info.run_name == "test"
    assert found.info.status == "FINISHED"
    assert client.get_metric_history(found.info.run_id, "validation_metrics/accuracy")
    assert client.get_metric_history(found.info.run_id, "throughput_sps")


def test_mlflow_knows_the_settings(run: tuple[MlflowClient, Run]) -> None:
    parameters = run[1].data.params
    assert parameters["optimizer.name"] == "SGD"
    assert parameters["optimizer.learning_rate"] == "0.1"
    assert parameters["model.entrypoint"].endswith("user_code:double_mlp")


def records(file: Path) -> Iterator[Record]:
    """What a .wandb file holds: records of protobuf in LevelDB's log format, after a header of 7 bytes."""
    data, block = file.read_bytes(), 32768
    at, begun = 7, b""
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        begun = begun + part if kind in (3, 4) else part
        if kind in (1, 4):
            yield Record.FromString(begun)


def test_wandb_has_the_figures_of_both_attempts_under_one_id(place: Path) -> None:
    files = sorted((place / "metrics" / "wandb").glob("offline-run-*/*.wandb"))
    assert [file.name for file in files] == ["run-uid-1.wandb"] * 2
    found: dict[int, float] = {}
    for file in files:
        for record in records(file):
            items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
            if LOSS in items:
                found[json.loads(items["step"])] = json.loads(items[LOSS])
    assert found == pytest.approx(logged(place))


def test_settings_are_logged_by_path() -> None:
    assert flat({"model": {"name": "gpt", "config": {}}, "steps": 3, "seed": None}) == [
        ("model.name", "gpt"),
        ("steps", "3"),
    ]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("throughput(tps)", "throughput_tps"),
        ("time_metrics/end_to_end(s)", "time_metrics/end_to_end_s"),
        ("mfu(%)", "mfu"),
        (LOSS, LOSS),
    ],
)
def test_mlflow_gets_the_names_that_it_takes(name: str, key: str) -> None:
    assert key_of(name) == key


SAMPLES = [("# a title\n<b>", " and *more*\n\n| a"), ("é", "\udc80")]


def test_texts_are_in_event_files_as_they_stand(tmp_path: Path) -> None:
    """TensorBoard reads Markdown: no text of a model has an effect in it, and half a character ends no training."""
    events = open_events(True, tmp_path)
    events.write_samples(7, SAMPLES)
    events.close()
    found = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    texts = [found.Tensors(f"samples/{number}/text_summary") for number in range(2)]
    assert [[one.step for one in series] for series in texts] == [[7], [7]]
    first, second = (series[0].tensor_proto.string_val[0].decode() for series in texts)
    assert first == "    # a title\n    <b>\n\n→\n\n     and *more*\n    \n    | a"
    assert second == "    é\n\n→\n\n    ?"


def test_texts_are_an_artifact_of_the_mlflow_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    sink = MLflowSink(JobConfig.model_validate(job(small())), "disttrain")
    sink.write_samples(7, SAMPLES)
    sink.close()
    (file,) = tmp_path.glob("mlruns/**/samples/step-7.jsonl")
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        {"step": 7, "prompt": prompt, "text": text} for prompt, text in SAMPLES
    ]


def test_texts_are_a_table_of_the_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("HOME", str(tmp_path))
    sink = WandBSink(JobConfig.model_validate(job(small())), tmp_path)
    sink.write_samples(7, SAMPLES[:1])
    sink.close()
    (file,) = tmp_path.glob("wandb/offline-run-*/files/media/table/samples*.json")
    table = json.loads(file.read_text())
    assert (table["columns"], table["data"]) == (["step", "prompt", "text"], [[7, *SAMPLES[0]]])


class Service:
    """A sink that can be away, and that can hold its answer back."""

    def __init__(self) -> None:
        self.away, self.lines, self.closed = False, list[Values](), False
        self.answers = threading.Event()
        self.answers.set()
        self.seen = threading.Semaphore(0)

    def write(self, values: Values) -> None:
        self.answers.wait()
        self.seen.release()
        if self.away:
            raise ConnectionError("no route to host\nand much more")
        self.lines.append(values)

    def write_samples(self, step: int, samples: Samples) -> None:
        self.write({"step": step, "samples": samples})

    def close(self) -> None:
        self.closed = True


def test_a_service_that_is_away_costs_its_lines_and_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    service = Service()
    sink = Background("MLflow", lambda: service)
    for step, away in enumerate([False, True, True, False, True]):
        service.away = away
        sink.write({"step": step})
        assert service.seen.acquire(timeout=GENEROUS)
    sink.close()
    assert service.lines == [{"step": 0}, {"step": 3}]
    assert service.closed
    message = "disttrain: MLflow: figures are lost: no route to host … and much more"
    assert capsys.readouterr().err.splitlines() == [message] * 2


def test_a_service_that_is_away_at_the_start_is_asked_again(capsys: pytest.CaptureFixture[str]) -> None:
    service, tries = Service(), list[int]()

    def connect() -> Service:
        tries.append(1)
        if len(tries) == 1:
            raise ConnectionError("refused")
        return service

    sink = Background("MLflow", connect)
    sink.write({"step": 1})
    sink.write_samples(2, SAMPLES)
    sink.close()
    assert service.lines == [{"step": 2, "samples": SAMPLES}]
    assert capsys.readouterr().err == "disttrain: MLflow: figures are lost: refused\n"


def test_a_service_that_does_not_answer_keeps_nobody_waiting(capsys, monkeypatch):
    monkeypatch.setattr("disttrain_trainer.metrics.sinks.sink.CLOSING_SECONDS", 0.05)
    service = Service()
    service.answers.clear()
    sink = Background("WandB", lambda: service)
    for step in range(1100):
        sink.write({"step": step})
    sink.close()
    assert "disttrain: WandB: figures are lost: 1000 lines wait to be written" in capsys.readouterr().err
    service.answers.set()


def config(*sinks: str) -> JobConfig:
    return JobConfig.model_validate(job(small(logging={"sinks": list(sinks)})))


@pytest.mark.parametrize(
    ("name", "package"), [("MLflow", "package `mlflow`.* install mlflow-skinny"), ("WandB", "package `wandb`")]
)
def test_an_image_without_the_package_is_refused(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "find_spec", lambda module: None)
    with pytest.raises(InvalidConfiguration, match=package):
        opening.open_sinks(config(name), None, {"MLFLOW_TRACKING_URI": "http://x", "WANDB_API_KEY": "k"})


@pytest.mark.parametrize(
    ("name", "message"),
    [("MLflow", "the address of its server in MLFLOW_TRACKING_URI"), ("WandB", "a key in WANDB_API_KEY")],
)
def test_a_service_without_address_or_key_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfiguration, match=message) as refused:
        opening.open_sinks(config(name), None, {"HOME": str(tmp_path)})
    assert refused.value.exit_code == ExitCode.INVALID_CONFIGURATION


def test_no_package_is_imported_that_nobody_asked_for(tmp_path: Path) -> None:
    program = (
        "import os, sys, runpy\n"
        "exit_ = os._exit\n"
        "def record(code):\n"
        "    print([name for name in ('mlflow', 'wandb') if name in sys.modules], flush=True)\n"
        "    exit_(code)\n"
        "os._exit = record\n"
        "runpy.run_module('disttrain_trainer', run_name='__main__')\n"
    )
    module = tmp_path / "program_that_tells.py"
    module.write_text(program)
    (rank,) = run_ranks(tmp_path / "run", job(small()), module="program_that_tells", fresh=True, **on_path(tmp_path))
    assert rank.code == 0, rank.err
    assert rank.out.splitlines()[-1] == "[]"


def on_path(folder: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
