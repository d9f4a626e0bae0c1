"""Which strategy takes the steps of a job: a line for each."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

from disttrain_api.parallelism import DataParallelMode
from disttrain_trainer.build import build_state
from disttrain_trainer.parallel.pipedream.flow import Flow
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.state import State
from disttrain_trainer.strategies.base import Strategy, Surroundings
from disttrain_trainer.strategies.local_sgd import LocalSgd
from disttrain_trainer.strategies.pipedream import PipeDream
from disttrain_trainer.strategies.synchronous import Synchronous


def build_job_state(config: Config, world: World) -> State:
    """The State before the first step. Raises InvalidConfiguration, EntrypointNotImportable or DataNotFound."""
    if has_servers(config):
        # Not above: only such a job needs ZeroMQ.
        from disttrain_trainer.parameter_server.worker.worker import build_worker_state

        return build_worker_state(config, world)
    return build_state(config, world)


def open_strategy(around: Surroundings) -> AbstractContextManager[Strategy]:
    """The strategy that the job asks for; when the context is left, the steps are over."""
    return next(choice.open(around) for choice in STRATEGIES if choice.when(around))


def has_servers(config: Config) -> bool:
    """Whether the job's parameters lie on servers."""
    return config.job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER


class Choice(NamedTuple):
    """A strategy, and when it takes the steps."""

    when: Callable[[Surroundings], bool]
    """Whether the job asks for it, by its manifest or by what was built of it."""
    open: Callable[[Surroundings], AbstractContextManager[Strategy]]


def _leading(around: Surroundings) -> AbstractContextManager[Strategy]:
    from disttrain_trainer.strategies.parameter_server import leading

    return leading(around)


STRATEGIES = [
    Choice(lambda around: has_servers(around.config), _leading),
    Choice(lambda around: isinstance(around.state.pipeline, Flow), lambda around: nullcontext(PipeDream(around))),
    Choice(lambda around: around.state.replicas is not None, lambda around: nullcontext(LocalSgd(around))),
    Choice(lambda around: True, lambda around: nullcontext(Synchronous(around))),
]
"""The first that is asked for counts."""
