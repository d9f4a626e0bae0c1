"""Callbacks of the user's (`training.callbacks`): built, checked, and called between steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from disttrain_api.training import Training
from disttrain_trainer.protocols import Moment, offered
from disttrain_trainer.runtime.entrypoint import call_entrypoint
from disttrain_trainer.runtime.errors import (
    CallbackFailed,
    InvalidConfiguration,
    TrainerError,
    no_room,
    one_line,
    peer_lost,
)
from disttrain_trainer.runtime.mesh import World
from disttrain_trainer.runtime.randomness import keeping_random_state

if TYPE_CHECKING:
    from disttrain_trainer.state import State

METHODS = ("on_start", "on_step", "on_evaluation", "on_checkpoint", "on_end")
_EVALUATING = "evaluating"
_STATE = ("state_dict", "load_state_dict")


@dataclass(frozen=True)
class Callback:
    """A user's callback, checked."""

    field: str
    """The manifest's field, for messages."""
    name: str
    """Its entry point, with a number where an earlier callback has the same; its state is saved under this name."""
    own: Any

    @property
    def keeps_state(self) -> bool:
        """Whether checkpoints hold its state."""
        return offered(self.own, _STATE[0]) is not None

    def call(self, method: str, moment: Moment) -> Any:
        """Return what one of the methods returns; None where it is not offered. Raises CallbackFailed."""
        own = offered(self.own, method)
        if own is None:
            return None
        with self._named(f"{self.name}.{method}", moment):
            return own(moment)

    @contextmanager
    def evaluating(self, moment: Moment) -> Iterator[None]:
        """The context that it offers for an evaluation. Raises CallbackFailed for what entering and leaving raise."""
        name = f"{self.name}.{_EVALUATING}"
        context = self.call(_EVALUATING, moment)
        if context is None:
            yield
            return
        if not isinstance(context, AbstractContextManager):
            raise InvalidConfiguration(
                f"`{self.field}`: {name} returned a {type(context).__name__}, expected a context manager"
            )
        with self._named(name, moment):
            context.__enter__()
        try:
            yield
        finally:
            with self._named(name, moment):
                context.__exit__(None, None, None)

    @contextmanager
    def _named(self, call: str, moment: Moment) -> Iterator[None]:
        """Raises CallbackFailed, which names the call, for what is raised inside."""
        try:
            yield
        except Exception as error:
            # What is not of its making says more under its own name.
            if isinstance(error, TrainerError) or peer_lost(error) or no_room(error):
                raise
            raise CallbackFailed(
                f"`{self.field}`: {call} raised {type(error).__name__} after step {moment.step}: {one_line(error)}"
            ) from error


@dataclass(frozen=True)
class Callbacks:
    """A job's callbacks, in order. Every method of theirs is called on every rank, after the same step."""

    every: Sequence[Callback] = ()
    total_steps: int = 0
    rank: int = 0
    world_size: int = 1
    called: frozenset[str] = field(default_factory=frozenset)
    """The methods that some callback offers."""

    def call(self, method: str, state: State, metrics: Mapping[str, float] | None = None) -> None:
        """Call one of METHODS of all callbacks. What they draw at random does not count. Raises CallbackFailed."""
        if method not in self.called:
            return
        moment = self._moment(state, metrics or {})
        for callback in self.every:
            with keeping_random_state():
                callback.call(method, moment)

    @contextmanager
    def evaluating(self, state: State) -> Iterator[None]:
        """The contexts of all callbacks, inside each other, in which held-out samples are evaluated."""
        with ExitStack() as stack:
            for callback in self.every:
                stack.enter_context(callback.evaluating(self._moment(state, {})))
            yield

    def _moment(self, state: State, metrics: Mapping[str, float]) -> Moment:
        return Moment(
            step=state.step,
            total_steps=self.total_steps,
            model=state.module,
            optimizer=state.optimizer,
            replicas_agree=state.replicas is None,
            metrics=metrics,
            rank=self.rank,
            world_size=self.world_size,
        )


def build_callbacks(training: Training, world: World) -> Callbacks:
    """The callbacks that the manifest names. Raises InvalidConfiguration or EntrypointNotImportable."""
    every: list[Callback] = []
    for number, settings in enumerate(training.callbacks):
        place = f"training.callbacks[{number}]"
        own = call_entrypoint(place, settings.entrypoint, settings.config)
        _require_callback(place, settings.entrypoint, own)
        same = [one.entrypoint for one in training.callbacks[:number]].count(settings.entrypoint)
        every.append(Callback(place, f"{settings.entrypoint}#{same + 1}" if same else settings.entrypoint, own))
    called = frozenset(name for name in METHODS if any(offered(one.own, name) for one in every))
    return Callbacks(every, training.steps, world.rank, world.size, called)


def _require_callback(place: str, entrypoint: str, own: object) -> None:
    """Raise InvalidConfiguration for a callback without methods, or with methods that would never be called."""
    returned = f"`{place}.entrypoint`: {entrypoint} returned a {type(own).__name__}"
    known = f"a callback may offer {', '.join((*METHODS, _EVALUATING))} (disttrain_trainer.protocols)"
    offers = [name for name in dir(own) if name.startswith("on_") and offered(own, name)]
    for name in offers:
        if name not in METHODS:
            raise InvalidConfiguration(f"{returned} with a method {name}, which nobody calls: {known}")
    if not offers and offered(own, _EVALUATING) is None:
        raise InvalidConfiguration(f"{returned} without any method to call: {known}")
    there = [name for name in _STATE if offered(own, name)]
    if len(there) == 1:
        (missing,) = set(_STATE) - set(there)
        raise InvalidConfiguration(f"{returned} with {there[0]} and without {missing}: offer both, or none")
