"""Which strategy takes the steps of a job: a line for each."""

from contextlib import AbstractContextManager, nullcontext

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
    """The strategy that the manifest asks for; when the context is left, the steps are over."""
    state = around.state
    if has_servers(around.config):
        from disttrain_trainer.strategies.parameter_server import leading

        return leading(around)
    if isinstance(state.pipeline, Flow):
        return nullcontext(PipeDream(around, state.pipeline))
    if state.replicas is not None:
        return nullcontext(LocalSgd(around, state.replicas))
    return nullcontext(Synchronous(around))


def has_servers(config: Config) -> bool:
    """Whether the job's parameters lie on servers."""
    return config.job.parallelism.data_parallel.mode is DataParallelMode.PARAMETER_SERVER
