"""Hours of evaluations, saves, restarts, compilation and pauses, in a time of their own: no alarm without a cause, one
with it.

The clocks are those of a job: the agents' over the report files and the times of steps, the operator's over the agents'
answers, and rank 0's over the own times of all ranks. Two pods have two ranks each.
"""

import random
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from disttrain_agent.reports import LOOK_SECONDS, Reports, report_path
from disttrain_agent.step_clock import StepClock
from disttrain_agent.work import Work
from disttrain_api.report import AgentStatus, RankPhase, RankReport, RankStatus
from disttrain_api.spec import JobSpec
from disttrain_operator.decide.clock import timestamp
from disttrain_operator.decide.gang import Gang
from disttrain_operator.decide.hang import exceeds, hang_of, stall_of
from disttrain_operator.decide.live import Blame, Live, Stall
from disttrain_operator.decide.phase_clocks import idle_stall_of, together
from disttrain_operator.decide.reading import observe
from disttrain_operator.decide.suspicion import Suspicion, standstill_of, suspect
from disttrain_trainer.metrics.stragglers import Stragglers
from disttrain_trainer.runtime.step_times import StepTimes
from tests.soak import SOAK
from tests.unit.decide.world import World, a_running_world

STEPS = 100_000
TICK_SECONDS = 0.5
TICKS_OF_LOOK = round(LOOK_SECONDS / TICK_SECONDS)
ASKED_EVERY = 5
"""Looks of the agent between two questions of the operator."""
SILENT_SECONDS = 40.0
"""After which a node that does not report is not ready."""
SEEDS = [random.randrange(10**9) for _ in range(100)] if SOAK else list(range(10))
SLOW_RANK = 2
WAITS = Blame(2, "is in another call than those that wait for it", certain=True)
READS = Blame(2, "reads, and the others wait for it")
NOTHING = Work(1.0, 0.0, 0, has_gpu=False)


@dataclass
class Hours:
    """A job in its own time, with the clocks that watch it. slow: how much longer rank 2 works than others."""

    folder: Path
    chance: random.Random
    deadline: int
    slow: float = 1.0
    now: float = 0.0
    step: int = 0
    looks: int = 0
    """What the agents say at the times of steps."""
    line: tuple[int, float] = (0, 0.0)
    """Step and time of the last line of the log."""
    owns: list[list[float]] = field(default_factory=list)
    """The ranks' own times of each step since then."""
    disturbed: bool = False
    """Whether something has happened since then that makes a step long."""
    frozen: tuple[int, ...] = ()
    """The pods whose machines stand still."""
    done: Work = NOTHING
    """What the ranks' processes have done, as far as that shows that they get on."""
    blame: Blame | None = WAITS
    """What the stacks tell whenever they are asked for: at worst the same as of a hang."""
    suspicions: list[tuple[float, Suspicion]] = field(default_factory=list)
    """When the operator would have named a rank that seems to hang."""
    hangs: list[float] = field(default_factory=list)
    """When the operator would have restarted the job."""
    evaluated: bool = False
    stragglers: set[int] = field(default_factory=set)
    """The ranks that were named."""

    def __post_init__(self) -> None:
        self.interval = self.chance.choice([1, 2, 5, 10])
        self.seconds = self.chance.uniform(1.0, 60.0 / self.interval)
        self.watch = Stragglers([range(4)])
        self.reports = Reports(self.folder, [0, 1], lambda: self.now)
        self.reports.prepare()
        self.times = [StepTimes(2 * pod, self.folder, lambda: self.now) for pod in (0, 1)]
        # The first pod's second rank has the same steps.
        self.clocks = [StepClock(self.folder, [2 * pod], lambda: self.now, lambda process: self.done) for pod in (0, 1)]
        self.world: World = a_running_world(
            workers={"replicas": 2, "processesPerPod": 2},
            runPolicy={"progressDeadlineSeconds": self.deadline},
            training={"steps": STEPS, "logging": {"interval": self.interval}, "microBatchSize": 1},
        )
        self.began = self.world.now
        self.report = RankReport(rank=0, total_steps=STEPS, phase=RankPhase.STARTING)
        self.say(phase=RankPhase.TRAINING)
        self.take_steps(True)

    @property
    def spec(self) -> JobSpec:
        found = self.world.job.spec
        assert found is not None
        return found

    def say(self, **changes: Any) -> None:
        """The ranks report."""
        self.report = self.report.model_copy(update=changes)
        for rank in (0, 1):
            text = self.report.model_copy(update={"rank": rank}).model_dump_json(by_alias=True)
            report_path(self.folder, rank).write_text(text)

    def pass_time(self, seconds: float) -> None:
        """Let time pass, in which the agent looks and the operator asks, unless the first pod's machine is frozen."""
        end = self.now + seconds
        while self.looks * TICK_SECONDS <= end:
            self.now = max(self.now, self.looks * TICK_SECONDS)
            self.looks += 1
            for pod, clock in enumerate(self.clocks):
                if pod not in self.frozen:
                    clock.look()
            if self.looks % TICKS_OF_LOOK or 0 in self.frozen:
                continue
            if not self.frozen:
                self.look_for_hangs()
            for rank in (0, 1):
                self.reports.of(rank)
            if self.looks % (TICKS_OF_LOOK * ASKED_EVERY) == 0:
                self.ask()
        self.now = end

    def ask(self) -> None:
        ranks = [
            RankStatus(
                rank=rank, seconds_since_step=self.reports.seconds_since_step(rank), report=self.reports.of(rank)
            )
            for rank in (0, 1)
        ]
        stall = stall_of(AgentStatus(job_uid="u", attempt=1, ranks=ranks))
        stall = stall if stall is not None and exceeds(stall, self.spec) else self.idle()
        if stall is None:
            return
        pod = self.world.pod()
        observed = observe(self.world.pods.values(), live=Live(pod["metadata"]["uid"], 1, self.report, stall))
        gang = Gang(self.spec, self.world.job.status, observed)
        if hang_of(gang, self.began + timedelta(seconds=self.now)) is not None:
            self.hangs.append(self.now)

    def idle(self) -> Stall | None:
        """What the operator finds in the answers of both pods; one that is stopped does not answer."""
        if self.frozen:
            return None
        report, seconds = self.reports.of(0), self.reports.seconds_since_step(0)
        ranks = [
            RankStatus(rank=2 * pod, seconds_since_step=seconds, report=report, idle=clock.idle(2 * pod))
            for pod, clock in enumerate(self.clocks)
        ]
        found = [idle_stall_of(AgentStatus(job_uid="u", attempt=1, ranks=[rank]), self.spec) for rank in ranks]
        return None if found[0] is None or found[1] is None else together([found[0], found[1]])

    def works(self, seconds: float) -> None:
        """Let time pass in which processes compute, or read and write: in bursts, with pauses of minutes."""
        end = self.now + seconds
        while self.now < end:
            pause = min(end - self.now, self.chance.uniform(0, self.chance.choice([5, 280])))
            self.pass_time(pause)
            own, others, bytes_, _ = self.done
            share, most = self.chance.uniform(0.1, 1.0), self.chance.randrange(20, 2000) * 2**20
            more = self.chance.choice([(share * pause + 1, 0, 0), (0, share * pause + 1, 0), (0, 0, most)])
            self.done = Work(own + more[0], others + more[1], bytes_ + more[2], has_gpu=False)

    def look_for_hangs(self) -> None:
        """The operator looks whether ranks stand still. One that is stopped does not answer: nobody is named."""
        report = self.reports.of(0)
        found = [
            standstill_of(
                AgentStatus(
                    job_uid="u", attempt=1, ranks=[RankStatus(rank=2 * pod, report=report, pace=clock.pace(2 * pod))]
                )
            )
            for pod, clock in enumerate(self.clocks)
        ]
        if found[0] is None or found[1] is None:
            return
        suspicion = suspect(self.blame, self.blame, found[0] & found[1])
        if suspicion is not None:
            self.suspicions.append((self.now, suspicion))

    def freeze(self, seconds: float) -> tuple[int, ...]:
        """A machine stands still, and its node is not ready after a while until it reports again; or all processes of
        the first pod or of both do, and no node says so. Returns whose."""
        index = self.chance.randrange(2)
        if self.chance.random() < 0.25:
            self.frozen = frozen = (0, 1)
            self.pass_time(seconds)
            self.frozen = ()
            return frozen
        self.frozen = (index,)
        pod = self.world.pod(index)
        of_machine = index == 1 or self.chance.random() < 0.5
        self.pass_time(min(seconds, SILENT_SECONDS) if of_machine else seconds)
        if of_machine and seconds > SILENT_SECONDS:
            pod["status"]["conditions"] = [{"type": "Ready", "status": "False"}]
            self.pass_time(seconds - SILENT_SECONDS)
            since = timestamp(self.began + timedelta(seconds=self.now))
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True", "lastTransitionTime": since}]
        self.frozen = ()
        return (index,)

    def work(self) -> None:
        """Take a step; now and then one that is long, but no two of them between two lines of the log."""
        chance = self.chance
        usual = self.seconds * chance.uniform(0.8, 1.1)
        own = [0.8 * self.seconds * chance.uniform(0.9, 1.1) for _ in range(4)]
        own[SLOW_RANK] *= self.slow
        event = chance.random() if not self.disturbed else 1.0
        if event < 0.01:
            # Something is compiled anew, on all ranks: none waits.
            self.blame = None
            longer = chance.uniform(0, 60)
            own = [one + longer for one in own]
        elif event < 0.03:
            # One rank waits for its disk or a sample.
            self.blame = READS
            own[chance.randrange(4)] += chance.uniform(0, 60)
        whole, done = max(usual, *own), 1.0
        if 0.03 <= event < 0.04:
            # Amid a step, of which there is more to do when the machine goes on.
            done = chance.random()
            self.pass_time(done * whole)
            before = self.now
            for pod in self.freeze(chance.choice([chance.uniform(0, 40), chance.uniform(0, 1500)])):
                own[2 * pod] += self.now - before
            done = 1.0 - done
        self.pass_time(done * whole)
        for times in self.times:
            times.stepped()
        self.blame = WAITS
        self.disturbed |= event < 0.04
        self.step += 1
        self.owns.append(own)
        if self.step % self.interval == 0:
            self.log()

    def log(self) -> None:
        step, at = self.line
        own = [sorted(own[rank] for own in self.owns)[(len(self.owns) - 1) // 2] for rank in range(4)]
        self.watch.take(own, self.step - step, self.now - at)
        if self.watch.found is not None:
            self.stragglers.add(self.watch.found.rank)
        left = (STEPS - self.step) * self.now / self.step
        self.say(step=self.step, loss=1.0, remaining_seconds=left)
        self.line, self.owns, self.disturbed = (self.step, self.now), [], False

    def rest(self, phase: RankPhase, seconds: float) -> None:
        """Do something else than to train."""
        self.take_steps(False)
        self.say(phase=phase)
        with ExitStack() as both:
            for times in self.times:
                both.enter_context(times.during(phase))
            if phase is RankPhase.SAVING:
                self.works(seconds)
            else:
                self.evaluate(seconds)
        self.say(phase=RankPhase.TRAINING)
        self.take_steps(True)

    def evaluate(self, seconds: float) -> None:
        """Batches, of which the first may be compiled, and now and then one waits for a server of data."""
        end = self.now + seconds
        self.pass_time(min(seconds, self.chance.uniform(0, 240 if self.evaluated else 840)))
        self.evaluated = True
        while self.now < end:
            for times in self.times:
                times.moved()
            self.pass_time(min(end - self.now, self.chance.uniform(0, 280 if self.chance.random() < 0.05 else 10)))
            if self.chance.random() < 0.01:
                self.freeze(self.chance.choice([self.chance.uniform(0, 40), self.chance.uniform(0, 1500)]))

    def start_again(self) -> None:
        """All ranks start again in their pods: they load a checkpoint, or the parameters of another job, and compile
        their first step."""
        self.take_steps(False)
        self.reports.begin_again()
        for times in self.times:
            times.close()
        self.times = [StepTimes(2 * pod, self.folder, lambda: self.now) for pod in (0, 1)]
        self.watch = Stragglers([range(4)])
        self.say(phase=RankPhase.STARTING, loss=None, remaining_seconds=None)
        for times in self.times:
            times.begin(RankPhase.STARTING)
        self.works(self.chance.uniform(0, 2400))
        self.say(phase=RankPhase.TRAINING)
        self.take_steps(True)
        self.works(self.chance.uniform(0, 2400))
        self.line, self.owns, self.disturbed = (self.step, self.now), [], False

    def take_steps(self, takes: bool) -> None:
        """The ranks begin to take steps, or have ended that."""
        if takes:
            self.blocks = ExitStack()
            for times in self.times:
                self.blocks.enter_context(times.counted())
        else:
            self.blocks.close()

    def train(self, seconds: float, every: int = 1) -> None:
        """Train for so long, with all that a job does besides. every: the least steps between two evaluations."""
        chance = self.chance
        evaluates, saves = every * chance.choice([7, 50]), every * chance.choice([11, 100])
        # Compilation, before anybody has seen a step.
        self.works(chance.uniform(0, 2400))
        until = self.now + seconds
        while self.now < until:
            self.work()
            if self.step % evaluates == 0:
                # Tasks of choices take longer than a held-out loss.
                self.rest(RankPhase.EVALUATING, chance.uniform(0, 7200 if chance.random() < 0.1 else 1200))
            if chance.random() < 0.003:
                self.start_again()
            if self.step % saves == 0:
                self.rest(RankPhase.SAVING, chance.uniform(0, 600))


@pytest.mark.parametrize("seed", SEEDS)
def test_an_hour_without_a_hang_and_a_slow_rank_has_no_alarm(tmp_path: Path, seed: int) -> None:
    hours = Hours(tmp_path, random.Random(seed), deadline=240)
    hours.train(3600.0, every=hours.chance.choice([1, 50]))
    assert (hours.hangs, hours.stragglers, hours.suspicions) == ([], set(), [])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hang_is_always_found_in_time(tmp_path: Path, seed: int) -> None:
    """Once the deadline is over and three lines of the log are missing; the agent looks every two seconds."""
    chance = random.Random(seed)
    hours = Hours(tmp_path, chance, deadline=chance.choice([60, 240]))
    while hours.now < 600 or hours.step % hours.interval:
        hours.disturbed = True
        hours.work()
    _, logged = hours.line
    needed = max(hours.deadline, 3 * hours.interval * hours.now / hours.step)
    hours.pass_time(needed + LOOK_SECONDS + ASKED_EVERY * LOOK_SECONDS)
    assert hours.hangs
    assert needed <= hours.hangs[0] - logged


@pytest.mark.parametrize("phase", [RankPhase.STARTING, RankPhase.EVALUATING, RankPhase.SAVING])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hang_in_another_phase_is_found_after_what_it_has_taken_before(
    tmp_path: Path, seed: int, phase: RankPhase
) -> None:
    """Red where a former evaluation or save teaches nothing."""
    hours = Hours(tmp_path, random.Random(seed), deadline=60)
    while hours.now < 600 or hours.step % hours.interval:
        hours.disturbed = True
        hours.work()
    needed = {RankPhase.STARTING: 900.0, RankPhase.EVALUATING: 300.0, RankPhase.SAVING: 600.0}[phase]
    hours.take_steps(False)
    for one, seconds in ((phase, 50.0), (RankPhase.TRAINING, LOOK_SECONDS), (phase, 0.0)):
        for times in hours.times:
            times.begin(one)
        hours.pass_time(seconds)
    hours.say(phase=phase)
    began = hours.now
    hours.pass_time(needed + LOOK_SECONDS + ASKED_EVERY * LOOK_SECONDS)
    assert hours.hangs
    assert needed <= hours.hangs[0] - began


@pytest.mark.parametrize("seed", SEEDS)
def test_a_rank_that_hangs_is_named_after_a_few_of_the_jobs_own_steps(tmp_path: Path, seed: int) -> None:
    """After three medians, or once and a half the longest of the last steps, and a second; the operator looks every two
    seconds here. One that reads is named later, and in both cases before the job would restart."""
    chance = random.Random(seed)
    hours = Hours(tmp_path, chance, deadline=3600)
    hours.disturbed = True
    for _ in range(30):
        hours.disturbed = True
        hours.work()
    hours.blame = chance.choice([WAITS, READS])
    began, pace = hours.now, hours.clocks[0].pace(0)
    assert pace is not None
    needed = max(3 * pace.median_seconds, 1.5 * pace.longest_seconds) + 1
    if hours.blame is READS:
        needed = max(needed, 60 + 5 * pace.longest_seconds)
    late = TICK_SECONDS + LOOK_SECONDS
    hours.pass_time(needed + late + TICK_SECONDS)
    at, suspicion = hours.suspicions[0]
    assert suspicion.blame is hours.blame
    assert needed <= at - began <= needed + late
    assert hours.hangs == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slow_rank_is_always_named_and_no_other(tmp_path: Path, seed: int) -> None:
    hours = Hours(tmp_path, random.Random(seed), deadline=240, slow=1.7)
    # Where a job trains for a small part of its time, a slow rank is not worth a word.
    hours.train(3 * 3600.0, every=10)
    assert (hours.hangs, hours.stragglers) == ([], {SLOW_RANK})
