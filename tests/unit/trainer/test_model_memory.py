"""Sizes of models that are counted and sizes of models that are built are the same; what cannot fit is refused."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from disttrain_api.builtin import model_config
from disttrain_api.jobconfig import JobConfig
from disttrain_api.memory import ModelSize, builtin_size
from disttrain_api.mesh import Mesh
from disttrain_api.names import ExitCode
from disttrain_api.training import Training
from disttrain_trainer.checks import model_memory
from disttrain_trainer.checks.model_memory import require_memory_to_train, size_of
from disttrain_trainer.runtime.config import Config, resolve
from disttrain_trainer.runtime.errors import InvalidConfiguration
from disttrain_trainer.runtime.host_limits import memory_available, memory_limit
from disttrain_trainer.tasks.supervised import build_model
from tests.unit.trainer.worlds import job, run_ranks

GIB = 2**30
WIDTHS = st.integers(1, 300)
IMAGES = {"name": "digits"}
TOKENS = {"name": "text", "config": {"sequenceLength": 33}}

mlps = st.fixed_dictionaries({"hiddenSizes": st.lists(WIDTHS, max_size=5)})
resnets = st.fixed_dictionaries(
    {
        "width": st.integers(1, 4).map(lambda groups: 8 * groups),
        "blocks": st.lists(st.integers(1, 3), min_size=1, max_size=4),
        "norm": st.sampled_from(["Group", "Batch"]),
    }
)
gpts = st.fixed_dictionaries(
    {
        "layers": st.integers(1, 4),
        "heads": st.just(4),
        "width": st.integers(1, 20).map(lambda groups: 4 * groups),
        "vocabularySize": st.integers(256, 400),
        "tieWeights": st.booleans(),
        "bias": st.booleans(),
        "experts": st.none() | st.integers(2, 5),
    }
)


def training(name: str, config: dict[str, Any]) -> Training:
    given_ = {key: value for key, value in config.items() if value is not None}
    model, data = {"name": name, "config": given_}, TOKENS if name == "gpt" else IMAGES
    whole = {"model": model, "data": data, "steps": 1, "microBatchSize": 1}
    return Training.model_validate(whole, by_alias=True, by_name=False)


@given(
    st.tuples(st.just("mlp"), mlps) | st.tuples(st.just("resnet"), resnets) | st.tuples(st.just("gpt"), gpts)
)  # fmt: skip
def test_the_size_that_is_counted_is_that_of_the_model_that_is_built(chosen: tuple[str, dict[str, Any]]) -> None:
    described = training(*chosen)
    model_config(described)
    with torch.device("meta"):
        built = size_of(build_model(described))
    assert builtin_size(described) == built


def test_frozen_parameters_and_other_formats_are_counted_as_they_are() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.Linear(4, 5, bias=False)).bfloat16()
    module[0].requires_grad_(False)
    assert size_of(module) == ModelSize(parameters=32, trained=20, bytes=64, trained_bytes=40)


# ranks -> what of the training is too large; each rank says so by itself, before anything is built.
HUGE = {
    "a trillion parameters": {"name": "mlp", "config": {"hiddenSizes": [1_000_000, 1_000_000]}},
    "cut, but built whole": {"name": "gpt", "config": {"width": 100_000, "heads": 100, "layers": 100}},
    "without values": {"name": "gpt", "config": {"width": 100_000, "heads": 100, "layers": 100}, "metaDevice": True},
    "of the user": {"entrypoint": "tests.unit.trainer.meta_code:huge", "metaDevice": True},
}


@pytest.mark.parametrize("name", HUGE)
def test_a_model_that_cannot_fit_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    data = IMAGES if HUGE[name].get("name") == "mlp" else TOKENS
    described = {"model": HUGE[name], "data": data, "steps": 1, "microBatchSize": 1}
    parallelism = {"dataParallelShardDegree": 2}
    ended = run_ranks(tmp_path, job(described, parallelism=parallelism), 2)
    for rank in ended:
        assert rank.code == ExitCode.INVALID_CONFIGURATION, rank.err
        assert "parameters, for which the ranks of this pod (2) need at least" in rank.error.message
        assert "Traceback" not in rank.err


def test_a_model_whose_weights_are_read_need_not_fit_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank holds its part of a transformers model alone, also without `metaDevice`."""
    module = torch.nn.Linear(1000, 1000, bias=False)
    world = SimpleNamespace(mesh=Mesh(shard=4), device=SimpleNamespace(computes_on_host=False))
    monkeypatch.setattr(model_memory, "memory_limit", lambda: 3_000_000)
    described = {
        "model": {"name": "transformers", "config": {"path": "/models/llama"}},
        "data": TOKENS,
        "steps": 1,
        "microBatchSize": 1,
    }
    for checkpoint in (None, {"initialFrom": "/models/llama"}):
        parsed = JobConfig.model_validate(job({**described, "checkpoint": checkpoint}))
        config = Config(parsed, *resolve(parsed, 1, 1))
        with nullcontext() if checkpoint else pytest.raises(InvalidConfiguration, match="need at least"):
            require_memory_to_train(module, config, world)


MEMINFO = "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\nSwapTotal: 0 kB\n"


@pytest.mark.parametrize(
    ("files", "limit", "available"),
    [
        ({"proc/meminfo": MEMINFO}, 8 * GIB, 4 * GIB),
        ({"proc/meminfo": MEMINFO.replace("SwapTotal: 0", "SwapTotal: 2097152")}, 10 * GIB, 4 * GIB),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
                "sys/fs/cgroup/memory.current": f"{GIB}\n",
                "sys/fs/cgroup/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file {GIB // 4}\n",
            },
            2 * GIB,
            3 * GIB // 2,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "0::/a/b/c\n",
                "sys/fs/cgroup/a/b/c/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.max": f"{3 * GIB}\n",
                "sys/fs/cgroup/a/memory.max": f"{4 * GIB}\n",
            },
            3 * GIB,
            4 * GIB,
        ),
        (
            # The path is the host's, the mount the container's own.
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "9:cpu:/x\n4:memory:/kubepods/pod1\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB // 2}\n",
            },
            GIB,
            GIB // 2,
        ),
        (
            {
                "proc/meminfo": MEMINFO,
                "proc/self/cgroup": "4:memory:/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            },
            8 * GIB,
            4 * GIB,
        ),
    ],
    ids=["machine", "swap", "container", "group above", "version 1", "version 1, no limit"],
)
def test_the_limit_is_the_smallest_that_holds(tmp_path, files, limit, available):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert memory_limit(tmp_path) == limit
    assert memory_available(tmp_path) == available


def test_this_machine_has_memory() -> None:
    limit, available = memory_limit(), memory_available()
    assert limit is not None
    assert available is not None
    assert 0 < available <= limit
