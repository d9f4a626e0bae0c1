"""Starts a program that does not report, passes its output on byte for byte, and reports what the job's rules read.

    python3 -P -m disttrain_session.program COMMAND …

The operator puts this before the command of the first worker where the job has `progress`. It is an agent: it ends with
the program's exit code, passes signals on, takes the exits of orphans, and tells the operator the progress.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from disttrain_agent.listen import listen
from disttrain_agent.look import Look
from disttrain_agent.output import KEPT_LINES, log, write_all
from disttrain_agent.own_ranks import OwnRanks
from disttrain_agent.parent import die_with
from disttrain_agent.reports import LOOK_SECONDS, Reports
from disttrain_api.log_rules import LoggedProgress, compiled
from disttrain_api.names import Env
from disttrain_session.log_progress import Lines, LogProgress
from disttrain_session.place import Place, place_of, pod_of
from disttrain_session.reporting import INTERVAL_SECONDS, Reporter

_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_READ_BYTES = 64 * 1024
_LAST_READS = 64
"""After the program has ended. A pipe holds 64 KiB, unless somebody has made it larger."""
_NOT_FOUND, _NOT_EXECUTABLE = 127, 126
"""Exit codes, as a shell's."""
_SIGNALLED = 128


def main(command: Sequence[str], variables: Mapping[str, str] = os.environ) -> int:
    """Run the command; returns the exit code of the pod, which for a program that a signal has ended is 128 + n."""
    place, text = place_of(variables), variables.get(Env.PROGRESS)
    if not command or place is None or text is None:
        print(f"{Env.PROGRESS} and a command are needed: the operator sets them", file=sys.stderr)
        return _NOT_EXECUTABLE

    async def life() -> int:
        return await _Program(command, place, _progress_of(text), variables).run()

    code = asyncio.run(life())
    return code if code >= 0 else _SIGNALLED - code


def _progress_of(text: str) -> LogProgress:
    """Return the job's rules. One that cannot be used is left out: it is not worth a training."""
    rules, expressions = LoggedProgress.model_validate_json(text), []
    for rule in rules.log_rules:
        try:
            expressions.append(compiled(rule.pattern))
        except ValueError as error:
            log(f"`{rule.pattern}` is left out: {error}")
    return LogProgress(expressions, rules.total_steps, time.monotonic)


@dataclass
class _Output:
    """The last lines that the program printed."""

    lines: deque[str] = field(default_factory=lambda: deque(maxlen=KEPT_LINES))

    def last(self, count: int) -> list[str]:
        """Return the last `count` lines."""
        return list(self.lines)[-count:] if count > 0 else []


class _Program:
    """The program, as the agent's API sees the process of a rank. `run` may be called once."""

    def __init__(
        self, command: Sequence[str], place: Place, progress: LogProgress, variables: Mapping[str, str]
    ) -> None:
        self._command, self._place, self._progress = command, place, progress
        self.rank, self.output = place.rank, _Output()
        self.pid = 0
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._streams: list[_Stream] = []
        self._reporter = Reporter(place)
        self._flush: asyncio.TimerHandle | None = None
        self._pod = pod_of(place, variables)
        # The port of the agent's API is this process's.
        self._environment = {name: value for name, value in variables.items() if name != Env.AGENT_PORT}

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self.returncode is None

    async def run(self) -> int:
        """Return the exit code of the program; negative: the signal that ended it."""
        for number in _PASSED_ON:
            self._loop.add_signal_handler(number, self._pass_on_signal, number)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)
        try:
            child = _start(self._command, self._environment)
        except OSError as error:
            write_all(f"cannot start {self._command[0]}: {error.strerror}\n".encode(), 2)
            return _NOT_FOUND if isinstance(error, FileNotFoundError) else _NOT_EXECUTABLE
        self.pid = child.pid
        assert child.stdout is not None
        assert child.stderr is not None
        for pipe, target in ((child.stdout.fileno(), 1), (child.stderr.fileno(), 2)):
            os.set_blocking(pipe, False)
            stream = _Stream(pipe, target, self._read)
            self._streams.append(stream)
            self._loop.add_reader(pipe, self._pass_on, stream)
        reports = Reports(self._place.reports, [self.rank])
        own = OwnRanks(self._place.reports, self._place.ranks)
        listener = listen(self._pod, Look(self._pod, _Alone(self), reports, asked=own), log)
        self._reap()
        while not self._ended.is_set():
            reports.of(self.rank)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), LOOK_SECONDS)
        if listener is not None:
            listener.close()
        return self._finish(child)

    def _finish(self, child: "subprocess.Popen[bytes]") -> int:
        assert self.returncode is not None
        child.returncode = self.returncode
        # Orphans may hold the other end, and write on.
        for stream in self._streams:
            self._loop.remove_reader(stream.pipe)
            for _ in range(_LAST_READS):
                if not stream.pass_on():
                    break
            stream.finish()
        self._reporter.flush()
        if self.returncode == 0:
            self._reporter.leave()
        return self.returncode

    def _pass_on(self, stream: "_Stream") -> None:
        if stream.pass_on() is None:
            self._loop.remove_reader(stream.pipe)

    def _read(self, line: str) -> None:
        self.output.lines.append(line)
        figures = self._progress.read(line)
        if figures is None:
            return
        self._reporter.take(figures)
        if self._flush is None:
            # The last of several lines within the interval, after which nothing may come for long.
            self._flush = self._loop.call_later(INTERVAL_SECONDS, self._flush_now)

    def _flush_now(self) -> None:
        self._flush = None
        self._reporter.flush()

    def _pass_on_signal(self, number: signal.Signals) -> None:
        if self.returncode is None and self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _reap(self) -> None:
        """Take the exit of every child that has ended: the program, and orphans where this process is PID 1."""
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.pid:
                    self.returncode = os.waitstatus_to_exitcode(ended[1])
                    self._ended.set()


@dataclass(frozen=True)
class _Alone:
    """The program as the only rank of its pod."""

    program: _Program

    @property
    def ranks(self) -> list[_Program]:
        return [self.program]

    @property
    def alive(self) -> list[_Program]:
        return [self.program] if self.program.alive else []


def _start(command: Sequence[str], environment: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    pipe = subprocess.PIPE
    # The function makes two system calls, by what is loaded already.
    die = die_with(os.getpid())
    return subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, preexec_fn=die)  # noqa: PLW1509


class _Stream:
    """A pipe of the program and where it leads."""

    def __init__(self, pipe: int, target: int, read: Callable[[str], None]) -> None:
        self.pipe, self._target, self._read = pipe, target, read
        self._lines = Lines()

    def pass_on(self) -> bool | None:
        """Pass on what is there; False where there is nothing now, None at the end."""
        try:
            data = os.read(self.pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            return None
        write_all(data, self._target)
        for line in self._lines.feed(data):
            self._read(line)
        return True

    def finish(self) -> None:
        """Read the last line, which may lack an end."""
        for line in self._lines.finish():
            self._read(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
