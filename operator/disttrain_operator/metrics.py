"""The Prometheus metrics at /metrics. No label holds a name of a job, a pod or a namespace, because their number is
unbounded."""

import time
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from disttrain_api.goodput import UNKNOWN
from disttrain_api.status import FailureClass, GoodputState, JobStatus, Phase
from disttrain_operator.transitions import (
    IN_PLACE,
    SINGLE_POD,
    Moved,
    PhaseClock,
    Ran,
    Skipped,
    Slowed,
    Suspected,
    happenings,
)

# The phases in which a job waits, works, or recovers.
_UNFINISHED = (Phase.PENDING, Phase.STARTING, Phase.RUNNING, Phase.RESTARTING, Phase.SUSPENDING, Phase.SUSPENDED)
_LATENCIES = (0.05, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60, 120, 300, 600, 1800)

_PHASES = frozenset(Phase)
_STATES = frozenset(GoodputState)
_CLASSES = frozenset((*FailureClass, SINGLE_POD, IN_PLACE))

Gauges = Callable[[], Mapping[str, float]]


@dataclass(frozen=True)
class Figures(Collector):
    """Figures that others keep, by name, when they are asked for: register it with the metrics."""

    gauges: Gauges
    counters: Gauges
    unreadable: Gauges = dict
    """How many objects cannot be read, by the plural of their kind."""

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        unreadable = GaugeMetricFamily("disttrain_unreadable_objects", "Objects that cannot be read", labels=["kind"])
        for kind, count in self.unreadable().items():
            unreadable.add_metric([kind], count)
        yield unreadable
        for name, value in self.gauges().items():
            yield GaugeMetricFamily(f"disttrain_{name}", name.replace("_", " "), value=value)
        for name, value in self.counters().items():
            yield CounterMetricFamily(f"disttrain_{name}", name.replace("_", " "), value=value)


class Metrics(Collector):
    """All counters and histograms of this process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._phases, self._states = PhaseClock(), PhaseClock()
        self._moved: dict[str, int] = {}
        """Seconds that turned out to be another state's, by state."""
        self._shown: dict[str, float] = {}
        """Seconds of each state at the last scrape: a counter never falls."""
        self._first_seen: dict[str, float] = {}
        self._hanging: set[str] = set()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.registry.register(self)
        self._restarts = self._counter("restarts", "Restarts of gangs and single pods, by class of the cause", "class")
        self._stragglers = self._counter("stragglers", "Ranks that were named as slow")
        self._suspicions = self._counter("hang_suspicions", "Ranks that were named as if they hung")
        self._withdrawn = self._counter("hang_suspicions_withdrawn", "Those of them that went on in the same attempt")
        self._skipped = self._counter("skipped_steps", "Steps of which skipSteps made no update")
        self._roll_backs = self._counter("roll_backs", "Times that it rolled a job back")
        self._requests = self._counter("api_requests", "Requests to the API server; code 0: no answer", "verb", "code")
        self._request_seconds = self._histogram("api_request_seconds", "Time to an answer of the API server", "verb")
        self._to_pods = self._histogram("job_to_pods_seconds", "From the first sight of a job to all pods created")
        self._to_running = self._histogram("begin_to_running_seconds", "From an attempt's begin to all pods running")
        self._recovery = self._histogram("failure_to_running_seconds", "From a failure to all pods running again")

    def leads(self, leads: bool) -> None:
        """This replica acts from now on, or no longer: the time of jobs is counted by one replica at a time."""
        now = self._clock()
        for clock in (self._phases, self._states):
            clock.run(leads, now)

    def answered(self, method: str, code: int, seconds: float) -> None:
        """A request to the API server was answered."""
        self._requests.labels(method, str(code)).inc()
        self._request_seconds.labels(method).observe(seconds)

    def saw_job(self, uid: str, phase: str | None, state: str | None, *, gone: bool, hangs: bool = False) -> None:
        """A job is, or is no longer, in the cache. state: of its goodput. hangs: one of its ranks seems to."""
        now = self._clock()
        (self._hanging.add if hangs and not gone else self._hanging.discard)(uid)
        self._states.see(uid, _known(state, _STATES) if state and not gone else None, now)
        if gone:
            self._first_seen.pop(uid, None)
            self._phases.see(uid, None, now)
            return
        self._first_seen.setdefault(uid, now)
        # Anybody who may write statuses may write any word there.
        self._phases.see(uid, _known(phase or Phase.PENDING, _PHASES), now)

    def wrote_status(self, old: JobStatus, new: JobStatus) -> None:
        """This process changed a job's status."""
        for happening in happenings(old, new):
            if isinstance(happening, Ran):
                self._to_running.observe(happening.since_begin)
                if happening.since_failure is not None:
                    self._recovery.observe(happening.since_failure)
            elif isinstance(happening, Slowed):
                self._stragglers.inc()
            elif isinstance(happening, Skipped):
                self._skipped.inc(happening.steps)
                self._roll_backs.inc(happening.roll_backs)
            elif isinstance(happening, Moved):
                for word, seconds in happening.seconds.items():
                    state = _known(word, _STATES)
                    self._moved[state] = self._moved.get(state, 0) + seconds
            elif isinstance(happening, Suspected):
                (self._withdrawn if happening.withdrawn else self._suspicions).inc()
            else:
                self._restarts.labels(_known(happening.class_, _CLASSES)).inc()

    def made_pods(self, uid: str, attempt: int) -> None:
        """All pods of an attempt are created."""
        seen = self._first_seen.get(uid)
        if attempt == 1 and seen is not None:
            self._to_pods.observe(self._clock() - seen)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Metrics that are computed at each scrape."""
        now = self._clock()
        counts, seconds, goodput = self._phases.counts(), self._phases.seconds(now), self._states.seconds(now)
        jobs = GaugeMetricFamily("disttrain_jobs", "Jobs by phase", labels=["phase"])
        spent = CounterMetricFamily("disttrain_job_seconds", "Time that jobs spent in each phase", labels=["phase"])
        for phase in (*Phase, UNKNOWN):
            jobs.add_metric([phase], counts.get(phase, 0))
        for phase in _UNFINISHED:
            spent.add_metric([phase], seconds.get(phase, 0.0))
        states = CounterMetricFamily("disttrain_job_state_seconds", "What jobs spent their time on", labels=["state"])
        for state in (*GoodputState, UNKNOWN):
            counted = goodput.get(state, 0.0) + self._moved.get(state, 0)
            self._shown[state] = max(self._shown.get(state, 0.0), counted)
            states.add_metric([state], self._shown[state])
        yield jobs
        yield GaugeMetricFamily("disttrain_suspected_hangs", "Jobs of which a rank seems to hang", len(self._hanging))
        yield spent
        yield states

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"disttrain_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"disttrain_{name}", text, labels, registry=self.registry, buckets=_LATENCIES)


def _known(word: str, known: Container[str]) -> str:
    return word if word in known else UNKNOWN
