"""What the agents of running pods answer: where their ranks are, and which of them holds up the others."""

from dataclasses import dataclass

from disttrain_api.report import RankPhase, RankReport, RestartsInPlace


@dataclass(frozen=True)
class Blame:
    """The rank that holds up the others, by the calls of all ranks that could be asked; or where they are."""

    rank: int | None
    """None: none is to blame alone."""
    why: str
    """What it does, and what the others do: the end of a sentence that the rank begins. Without a rank it is all of the
    sentence."""
    certain: bool = False
    """Whether nothing but a hang looks so: it is stopped, or ranks wait in different collective calls. One that
    computes or reads may be slow."""
    awaited: bool = False
    """Whether the others do nothing but wait for the rank: no rank is in a call that it should not be in."""


@dataclass(frozen=True)
class Stall:
    """A report that all ranks of a pod train and have done no step for a while, by their agent's clock; or, with
    `limit_seconds`, that all ranks of the job show no sign that they get on with what they do."""

    rank: int
    """The lowest of them."""
    seconds: float
    """Since the last step, or sign, of the one that did it last."""
    step: int
    seconds_per_step: float | None
    """At the pace so far."""
    in_training: bool = True
    """Whether they say that they train. Else they are a program whose lines are read: nobody knows what it does."""
    stack: str = ""
    """Where the rank is: the calls of its main thread, the innermost first."""
    blame: Blame | None = None
    """None: no rank does something else than the others, or nobody knows."""
    recorded: str = ""
    """Where the groups of ranks are in their collective calls; "" where nobody knows, or none waits."""
    phase: RankPhase = RankPhase.TRAINING
    """What the rank does."""
    limit_seconds: float | None = None
    """How long the rank may show no sign (phase_clocks.py). None: it is judged by its steps."""


@dataclass(frozen=True)
class Suspicion:
    """The rank that seems to hang, and the figures of when that was found."""

    blame: Blame
    still_seconds: float
    """How long no rank had ended a step."""
    median_seconds: float
    """How long a step takes."""
    longest_seconds: float
    """The longest of the last steps."""


@dataclass(frozen=True)
class Live:
    """Answer of a pod's agent while the pod ran."""

    pod_uid: str
    attempt: int
    report: RankReport | None
    """The report of the pod's lowest rank that knows how many steps there are. None: no rank knows yet."""
    stall: Stall | None = None
    """None: its ranks get on, or do something else than to train, or it is not known where they are."""
    restarts_in_place: RestartsInPlace | None = None
    """How often the agent has started its ranks again. None: never."""
    awaited: frozenset[int] = frozenset()
    """Workers whose pods it has lost, and whose replacements all ranks wait for."""
    missing: frozenset[int] = frozenset()
    """Workers at whose addresses nothing answers, while the ranks of all others stand still and wait."""
    silent: frozenset[int] = frozenset()
    """Workers whose agents do not answer though something is at their addresses, while the same is so."""
    taken_request: str | None = None
    """The last request for a checkpoint that it has taken. None: none that is known."""
    suspicion: Suspicion | None = None
    """None: its ranks take their steps as they use to, do something else, or it is not known which of them hangs."""

    @property
    def generation(self) -> int:
        """How often its ranks have started again."""
        return self.restarts_in_place.count if self.restarts_in_place is not None else 0

    @property
    def restarting(self) -> bool:
        """Whether its ranks have failed and have not come to training again, in the same pod."""
        begins = (RankPhase.STARTING, RankPhase.RESTORING)
        return self.restarts_in_place is not None and (self.report is None or self.report.phase in begins)
