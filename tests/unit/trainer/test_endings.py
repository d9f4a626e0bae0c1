"""Every way in which a rank can end: exit code, sentence on stderr, report. Real processes."""

import errno
import os
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from disttrain_api.names import ExitCode
from disttrain_trainer.checkpoint.storage import _write_nonce
from disttrain_trainer.runtime.errors import InvalidConfiguration
from tests.unit.trainer.worlds import job, launch, run_ranks, small, user
from tests.waiting import GENEROUS
from tools.cluster.ports import free_port

MISSING_TEXT = {"model": {"name": "gpt"}, "data": {"name": "text", "config": {"paths": ["/no/such/corpus"]}}}
DIVERGING = small(
    model=user("double_mlp"),
    optimizer={"name": "SGD", "learningRate": 1e200},
    loss={"name": "MeanSquaredError"},
    logging={"interval": 2},
)

# Name: (training, ranks, exit code, reason, parts of the sentence)
LONE = {
    "all done": (small(), ExitCode.DONE, None, []),
    "batch sizes that do not fit": (
        small(globalBatchSize=24, microBatchSize=7),
        ExitCode.INVALID_CONFIGURATION,
        "InvalidConfiguration",
        ["globalBatchSize", "24", "7"],
    ),
    "a model's config with an unknown field": (
        small(model={"name": "mlp", "config": {"layers": 3}}, data={"name": "digits"}),
        ExitCode.INVALID_CONFIGURATION,
        "InvalidConfiguration",
        ["training.model.config.layers"],
    ),
    "a setting of another optimizer": (
        small(optimizer={"name": "AdamW", "momentum": 0.9}),
        ExitCode.INVALID_CONFIGURATION,
        "InvalidConfiguration",
        ["momentum", "AdamW"],
    ),
    "a path that does not exist": (
        small(**MISSING_TEXT),
        ExitCode.DATA_NOT_FOUND,
        "DataNotFound",
        ["training.data.config.paths", "/no/such/corpus"],
    ),
    "a module that does not exist": (
        small(model={"entrypoint": "nowhere.to_be:found"}),
        ExitCode.ENTRYPOINT_NOT_IMPORTABLE,
        "EntrypointNotImportable",
        ["training.model.entrypoint", "nowhere", "ModuleNotFoundError"],
    ),
    "a function that does not exist": (
        small(data=user("no_such_function")),
        ExitCode.ENTRYPOINT_NOT_IMPORTABLE,
        "EntrypointNotImportable",
        ["training.data.entrypoint", "no_such_function", "nothing"],
    ),
    "an entry point that is no function": (
        small(model=user("NOT_CALLABLE")),
        ExitCode.ENTRYPOINT_NOT_IMPORTABLE,
        "EntrypointNotImportable",
        ["NOT_CALLABLE", "int"],
    ),
    "arguments that do not fit": (
        small(model=user("double_mlp", colour="red")),
        ExitCode.INVALID_CONFIGURATION,
        "InvalidConfiguration",
        ["training.model.config", "colour"],
    ),
    "an entry point that returns no model": (
        small(model=user("no_model")),
        ExitCode.INVALID_CONFIGURATION,
        "InvalidConfiguration",
        ["training.model.entrypoint", "str", "torch.nn.Module"],
    ),
    "an exception in the user's code": (
        small(model=user("broken_model")),
        1,
        "RankFailed",
        ["ZeroDivisionError", "the user's own mistake"],
    ),
    "a loss that is not finite": (DIVERGING, ExitCode.NON_FINITE_LOSS, "NonFiniteLoss", ["step", "learningRate"]),
}


def ending(how, **config):
    """Data from ending_code.py."""
    return {"entrypoint": "tests.unit.trainer.ending_code:ending_samples", "config": {"how": how, **config}}


@pytest.fixture(scope="module")
def lone(tmp_path_factory):
    """All worlds of one rank, three at a time."""
    folder = tmp_path_factory.mktemp("lone")
    ended = {}
    names = list(LONE)
    for start in range(0, len(names), 3):
        with ExitStack() as stack:
            worlds = {
                name: stack.enter_context(launch(folder / str(names.index(name)), job(LONE[name][0])))
                for name in names[start : start + 3]
            }
            ended |= {name: world.ended()[0] for name, world in worlds.items()}
    return ended


@pytest.mark.parametrize("name", LONE)
def test_a_lone_rank_says_why_it_ends(lone, name):
    _, code, reason, parts = LONE[name]
    rank = lone[name]
    assert rank.code == code, rank.err
    if reason is None:
        assert rank.report.done
        assert rank.report.error is None
        return
    assert not rank.report.done
    assert (rank.report.error.exit_code, rank.report.error.reason) == (code, reason)
    last_line = rank.err.splitlines()[-1]
    assert last_line == f"disttrain: {reason}: {rank.report.error.message}"
    for part in parts:
        assert part in last_line


def test_a_loss_that_is_not_finite_is_recognised_by_its_step(lone):
    error = lone["a loss that is not finite"].report.error
    assert error.signature.error == "NonFiniteLoss"
    assert f"step {error.signature.step} is" in error.message


def test_an_exception_in_the_users_code_is_recognised_by_its_line(lone):
    error = lone["an exception in the user's code"].report.error
    assert (error.signature.error, error.signature.step, error.signature.steps_done) == ("ZeroDivisionError", 0, 0)
    file, _, line = error.signature.place.rpartition(":")
    assert "the user's own mistake" in Path(file).read_text().splitlines()[int(line) - 1]


def test_a_failure_that_comes_again_after_a_restart_has_the_same_signature(tmp_path):
    training = small(steps=20, data=ending("raise"), checkpoint={"interval": 1})
    signatures = []
    for attempt in (1, 2):
        folder = tmp_path / str(attempt)
        (rank,) = run_ranks(folder, job(training), storage=tmp_path / "storage", attempt=attempt)
        assert rank.code == 1, rank.err
        signatures.append(rank.report.error.signature)
    first, second = signatures
    assert first.error == "ValueError"
    assert first.step > 2, "a checkpoint is complete before"
    assert second.repeats(first)
    assert second.steps_done < first.steps_done, "the second attempt went on from a checkpoint"


@pytest.mark.parametrize(("how", "code"), [("", 0), ("raise", 1)], ids=["done", "failed"])
def test_a_rank_ends_with_its_exit_handlers_and_whole_files(tmp_path, how, code):
    data = {
        "entrypoint": "tests.unit.trainer.ending_code:logged_samples",
        "config": {"folder": str(tmp_path), "how": how},
    }
    (rank,) = run_ranks(tmp_path / "world", job(small(steps=20, data=data)))
    assert rank.code == code, rank.err
    assert (tmp_path / "log").read_text() == "a line"
    assert (tmp_path / "handled").exists()


@pytest.mark.parametrize("name", [name for name, case in LONE.items() if case[2] not in (None, "RankFailed")])
def test_no_traceback_for_what_has_a_sentence(lone, name):
    assert "Traceback" not in lone[name].err


def test_no_configuration_at_all(tmp_path):
    (rank,) = run_ranks(tmp_path, None)
    assert rank.code == ExitCode.INVALID_CONFIGURATION
    assert str(tmp_path / "job.json") in rank.err
    assert "DISTTRAIN_CONFIG" in rank.err


def test_without_storage_the_log_says_so_once(lone):
    assert lone["all done"].out.count("no storage") == 1


def test_ranks_with_unlike_data_are_distinguished(tmp_path):
    ranks = run_ranks(tmp_path, job(small(data=user("unlike_samples"))), ranks=2)
    assert [rank.code for rank in ranks] == [ExitCode.DATA_NOT_FOUND] * 2
    assert "rank 1 finds 51 training" in ranks[0].err


def test_a_peer_that_is_killed_leaves_a_symptom(tmp_path):
    """The other rank must not claim a cause of its own."""
    ranks = run_ranks(tmp_path, job(small(steps=50, data=user("deadly_samples", rank=1))), ranks=2)
    assert ranks[1].code == -9
    assert ranks[0].code == ExitCode.PEER_LOST
    assert ranks[0].report.error.reason == "PeerLost"
    assert ranks[0].report.error.signature is None


def test_a_foreign_program_on_the_master_port(tmp_path):
    port = free_port()
    with socket.socket() as foreign:
        foreign.bind(("0.0.0.0", port))
        foreign.listen()
        with launch(tmp_path, job(small()), ranks=2, port=port) as world:
            assert world.processes[0].wait(GENEROUS) == ExitCode.PORT_IN_USE
            assert str(port) in world.text(0, "err")
            assert world.report(0).error.reason == "PortInUse"


def test_storage_that_ranks_do_not_share(tmp_path):
    ranks = run_ranks(tmp_path / "run", job(small()), ranks=2, storage=[tmp_path / "a", tmp_path / "b"])
    assert [rank.code for rank in ranks] == [ExitCode.STORAGE_NOT_SHARED] * 2
    assert "ranks 1 do not see" in ranks[0].report.error.message


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM])
def test_who_may_not_write_to_storage_is_named_with_what_to_do(tmp_path, monkeypatch, number):
    def refused(*_, **__):
        raise OSError(number, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    monkeypatch.setattr(os, "getegid", lambda: 77)
    with pytest.raises(InvalidConfiguration) as failed:
        _write_nonce(tmp_path / "checkpoints")
    assert str(failed.value).startswith(
        f"`storage`: rank 0 cannot write to {tmp_path}/checkpoints: Permission denied to user 65532 of group 77: let"
    )
    assert "`fsGroup`" in str(failed.value)
    assert "`runAsUser`" in str(failed.value)


def test_storage_that_is_a_file(tmp_path):
    storage = tmp_path / "storage"
    storage.write_text("")
    (rank,) = run_ranks(tmp_path / "run", job(small()), storage=storage)
    assert rank.code == ExitCode.INVALID_CONFIGURATION
    assert f"rank 0 cannot write to {storage}" in rank.err
