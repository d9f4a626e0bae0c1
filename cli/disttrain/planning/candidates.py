"""Layouts of a job with what is known of them, in the order of the time of a step. Pure."""

from dataclasses import dataclass

from disttrain.planning.cost import Machine, StepTime
from disttrain.planning.layouts import Layout
from disttrain_api.spec import DistTrainingJob

TOO_LARGE = "does not fit"


@dataclass(frozen=True)
class Candidate:
    """A layout, and what is known of it."""

    layout: Layout
    job: DistTrainingJob
    needed: int | None = None
    """Bytes of the rank that needs most; None: not all of it is known."""
    time: StepTime | None = None
    """The time of the rank that takes longest."""
    reason: str | None = None
    """Why it is left out; None where it is ranked."""


@dataclass
class Ranking:
    """What was found so far."""

    device_bytes: int | None
    machine: Machine
    candidates: list[Candidate]
    unasked: int = 0
    """Layouts that were not estimated: there was no time left."""

    @property
    def ranked(self) -> list[Candidate]:
        """Those that fit, the fastest first."""
        fitting = [one for one in self.candidates if one.reason is None and one.time is not None]
        return sorted(fitting, key=lambda one: one.time.total if one.time is not None else 0.0)

    @property
    def left_out(self) -> list[Candidate]:
        """Those that do not fit, or are not known."""
        return [one for one in self.candidates if one.reason is not None]
