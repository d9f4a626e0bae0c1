"""Every order in which several processes can do their I/O, and every point at which one can die.

A program is ordinary code, here the trainer's own, that does all its I/O through one function, `port`, in phases. From
one phase to the next it keeps nothing but one value. A phase is run again from its beginning for each of its
operations, with the answers that it has had so far; the operation after those is what it does next, and there it is
left. So no thread is needed, a state is (store, and of each process: phase, value, answers), and states that are alike
are visited once. A process that dies is one that is not run any more: what must hold at every moment is checked in
every state.
"""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Store = frozenset[tuple[Hashable, Hashable]]
"""What lies on the storage: pairs of a place and its content."""
Operation = tuple[str, tuple[Any, ...]]
Apply = Callable[[dict[Any, Any], Operation], Any]
"""Does an operation to a store, and returns the answer. Raises OSError as the storage would."""


class Answer(NamedTuple):
    value: Any
    errno: int | None = None


class _LeftHere(BaseException):
    """The program's next operation is known."""


@dataclass
class Port:
    """What a program does its I/O through."""

    answers: tuple[Answer, ...]
    next: Operation | None = None
    _names: int = 0
    _done: int = 0

    def __call__(self, name: str, *arguments: Any) -> Any:
        if self.next is not None or self._done == len(self.answers):
            # Also what it does on its way out, which it would not do if it were not left.
            self.next = self.next or (name, arguments)
            raise _LeftHere
        answer = self.answers[self._done]
        self._done += 1
        if answer.errno is not None:
            raise OSError(answer.errno, "no")
        return answer.value

    def token(self, _: int) -> str:
        """A name that is alike whenever the phase is run again."""
        self._names += 1
        return f"{self._names:04x}"


Phase = Callable[[Port, Any], Any]
"""From the value that the phase before has left to its own."""
Program = tuple[Phase, ...]


@dataclass(frozen=True)
class Process:
    """One process in one state."""

    phase: int
    value: Any
    """What the phase before has left."""
    answers: tuple[Answer, ...]
    """In this phase."""
    who: int = -1
    """Index of the program."""
    next: Operation | None = field(compare=False, default=None)
    """None where it has ended."""
    error: Exception | None = field(compare=False, default=None)
    """With which it has ended."""

    def with_answer(self, answer: Answer) -> "Process":
        """The same once its operation is done; what is next is not known yet."""
        return Process(self.phase, self.value, (*self.answers, answer), self.who)


class Move(NamedTuple):
    """One operation of one process."""

    before: Store
    after: Store
    who: int
    operation: Operation
    processes: tuple[Process, ...]
    """As they are afterwards."""


class Explorer:
    """All states that the programs can reach together."""

    def __init__(self, programs: tuple[Program, ...], apply: Apply, preemptions: int | None = None) -> None:
        """`preemptions`: how often a process is left before it ends; None for as often as can be."""
        self._programs, self._apply, self._preemptions = programs, apply, preemptions
        # Hashing stores and answers is most of the work, so each is known by a number.
        self._stores, self._processes = _Numbers(), _Numbers()
        self._steps: dict[tuple[int, int, int], tuple[int, int]] = {}

    def moves(self, start: Store) -> Iterator[Move]:
        """Every move from every state, once."""
        first = (run(program, Process(0, None, (), who)) for who, program in enumerate(self._programs))
        processes = tuple(map(self._processes.number, first))
        seen: set[Hashable] = set()
        left = [(self._stores.number(start), processes, -1, self._preemptions)]
        while left:
            state = left.pop()
            if state in seen:
                continue
            seen.add(state)
            for after, moved, who, remaining in self._from(*state):
                operation = self._processes[state[1][who]].next
                states = tuple(self._processes[number] for number in moved)
                yield Move(self._stores[state[0]], self._stores[after], who, operation, states)
                left.append((after, moved, who if remaining is not None else -1, remaining))

    def _from(
        self, store: int, processes: tuple[int, ...], running: int, preemptions: int | None
    ) -> Iterator[tuple[int, tuple[int, ...], int, int | None]]:
        for who, number in enumerate(processes):
            if self._processes[number].next is None:
                continue
            remaining = preemptions
            if remaining is not None and running not in (-1, who) and self._processes[processes[running]].next:
                remaining -= 1
                if remaining < 0:
                    continue
            after, then = self._step(store, number, who)
            yield after, (*processes[:who], then, *processes[who + 1 :]), who, remaining

    def alone(self, program: Program, store: Store) -> tuple[Store, Process]:
        """Run one program to its end while no other runs."""
        process = run(program, Process(0, None, ()))
        while process.next is not None:
            store, answer = self._done(store, process.next)
            process = run(program, process.with_answer(answer))
        return store, process

    def _step(self, store: int, number: int, who: int) -> tuple[int, int]:
        key = (store, number, who)
        if key not in self._steps:
            process = self._processes[number]
            after, answer = self._done(self._stores[store], process.next)
            answered = run(self._programs[who], process.with_answer(answer))
            self._steps[key] = self._stores.number(after), self._processes.number(answered)
        return self._steps[key]

    def _done(self, store: Store, operation: Operation) -> tuple[Store, Answer]:
        contents = dict(store)
        try:
            answer = Answer(self._apply(contents, operation))
        except OSError as error:
            return store, Answer(None, error.errno)
        return frozenset(contents.items()), answer


class _Numbers:
    """A number for each of the values that are alike."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: list[Any] = []

    def number(self, value: Hashable) -> int:
        found = self._numbers.setdefault(value, len(self._values))
        if found == len(self._values):
            self._values.append(value)
        return found

    def __getitem__(self, number: int) -> Any:
        return self._values[number]


def run(program: Program, process: Process) -> Process:
    """The process with its next operation known; in a later phase where these answers are all that this one takes."""
    phase, value, answers = process.phase, process.value, process.answers
    while phase < len(program):
        port = Port(answers)
        try:
            value = program[phase](port, value)
        except _LeftHere:
            return Process(phase, value, answers, process.who, port.next)
        except Exception as error:
            return Process(phase, value, answers, process.who, None, error)
        phase, answers = phase + 1, ()
    return Process(phase, value, (), process.who)
