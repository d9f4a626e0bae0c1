"""What ranks find imported when they are forked, and which cases a world need run."""

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.unit.trainer import worlds

TRANSFORMERS = "transformers.models.llama.modeling_llama"


def pytest_collection_modifyitems(items):
    if any(item.path.stem.startswith("test_transformers") for item in items):
        # It takes each rank as long as all its cases.
        worlds.PRELOADED.append(TRANSFORMERS)


@pytest.fixture(scope="session")
def asked_for(request):
    """The values of a parameter with which the tests of a module run, beside given other ones: a world of cases need
    not run those that no test of this run looks at."""

    def values(module, name, **given):
        specs = [getattr(item, "callspec", None) for item in request.session.items if item.path.stem == module]
        found = [spec.params for spec in specs if spec and name in spec.params]
        return {one[name] for one in found if given.items() <= one.items()}

    return values


@pytest.fixture
def mesh():
    """A mesh of this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
