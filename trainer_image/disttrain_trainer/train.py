"""The training loop. The program around it: program.py; how steps are taken: strategies/; what a step is: step.py.

build the state, restore the latest checkpoint, or what a rank has left that survived a failure in place
until all steps are done:
    take steps up to the next moment when something is due, and record their results
    at the parameters of exactly one step: checkpoint, evaluation, a stop that ranks have agreed on
"""

from contextlib import closing, nullcontext

from disttrain_trainer.between_steps import BetweenSteps, completing
from disttrain_trainer.checkpoint.checkpoints import Checkpoints
from disttrain_trainer.checks.cut_errors import explaining_cuts
from disttrain_trainer.checks.layer_watch import watching_layers
from disttrain_trainer.checks.preflight.check import check_network
from disttrain_trainer.metrics.profiling import profiling
from disttrain_trainer.metrics.report import Reporter
from disttrain_trainer.roll_back import marking
from disttrain_trainer.runtime.checkpoint_request import CheckpointRequest
from disttrain_trainer.runtime.config import Config
from disttrain_trainer.runtime.connections import cut_connections
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.stop import StopRequest
from disttrain_trainer.start import open_checkpoints, start_callbacks, start_metrics
from disttrain_trainer.state import State
from disttrain_trainer.strategies.base import Surroundings
from disttrain_trainer.strategies.choose import build_job_state, has_servers, open_strategy
from disttrain_trainer.survivors.memory import open_memory
from disttrain_trainer.survivors.survivor import Survivor


def train(config: Config, world: World, reporter: Reporter, stop: StopRequest) -> State:
    """Run the job to its last step and return the State it ends in. Raises TrainerError.

    config: of the job. world: the ranks that take steps together, with parameter servers those of one worker.
    """
    training = config.training
    if training.preflight:
        check_network(config.node, world)
    state = build_job_state(config, world)
    memory = open_memory(config, world)
    checkpoints, resumed = open_checkpoints(config, world, state, reporter, memory)
    survivor = Survivor(config, world, state, memory)
    reporter.follow(lambda: state.step)
    stop.end_waits = cut_connections
    stop.loop_started(config.grace_seconds)
    profiled = profiling(training.profiling, world, config.metrics_folder, state.step)
    watched = watching_layers(state.layer_order, world, reporter)
    read = nullcontext() if state.loader is None else closing(state.loader)
    times = reporter.times
    with (
        completing(checkpoints, reporter), profiled as profiler, explaining_cuts(config, world, state), watched, read,
        closing(times),
    ):  # fmt: skip

        def updated() -> None:
            survivor.updated()
            profiler.step()
            times.stepped()
            _report_saved(checkpoints, reporter)

        request = CheckpointRequest(None if checkpoints is None or has_servers(config) else config.report_dir)
        around = Surroundings(
            config,
            world,
            state,
            lambda: _must_end(stop, checkpoints),
            lambda: _must_save(request, state),
            updated,
            survivor.computed,
            survivor.agree,
        )

        with open_strategy(around) as strategy, marking(config, world, state, checkpoints), survivor.leaving():
            metrics = start_metrics(config, world, state, reporter, strategy)
            between = BetweenSteps(config, world, state, strategy, metrics, checkpoints, request, reporter)
            with closing(metrics.sink):
                start_callbacks(state, checkpoints, resumed)
                if not strategy.joined:
                    between.evaluate_restored()
                survivor.begin(due=resumed is not None and resumed.due)
                if resumed is not None and resumed.due:
                    with survivor.doing_what_is_due():
                        between.do_what_is_due(state.step)
                while state.step < training.steps:
                    until = between.next_due
                    with times.counted():
                        for result in strategy.run(until):
                            figures = metrics.record(result)
                            with survivor.calling_callbacks():
                                state.callbacks.call("on_step", state, figures)
                    with survivor.doing_what_is_due():
                        between.do_what_is_due(until)
                state.callbacks.call("on_end", state)
    return state


def _must_end(stop: StopRequest, checkpoints: Checkpoints | None) -> bool:
    """Return whether this rank must stop or knows of a failed checkpoint; the save of the stop raises the cause."""
    return stop.requested or (checkpoints is not None and checkpoints.failed)


def _must_save(request: CheckpointRequest, state: State) -> bool:
    """Return whether this rank was asked for a checkpoint. Before the first step there is nothing to keep."""
    return state.step > 0 and request.pending


def _report_saved(checkpoints: Checkpoints | None, reporter: Reporter) -> None:
    """Report a checkpoint that was written in the background, where one is complete by now."""
    if checkpoints is not None and checkpoints.collect():
        reporter.update(checkpoint=checkpoints.latest)
