"""Pushes that came in parts, put together again on the server.

    part, part, …, push    worker -> server; the last one says how many there were before it, and is answered

So nothing of a task is taken in before all of it is there. A worker whose parts a server does not have, because it was
started anew in between, is asked for all of it again.
"""

from __future__ import annotations

from disttrain_trainer.parameter_server.protocol.tasks import Task
from disttrain_trainer.parameter_server.protocol.wire import Message


class Reassembly:
    """Parts of incomplete pushes, by sender: one push at a time."""

    def __init__(self) -> None:
        self._held: dict[bytes, tuple[Task, list[Message]]] = {}

    def add(self, sender: bytes, task: Task, part: Message) -> None:
        """Keep a part; what the sender began for another task it has given up."""
        held_task, parts = self._held.get(sender, (task, []))
        self._held[sender] = (task, [*parts, part] if held_task == task else [part])

    def join(self, sender: bytes, task: Task, push: Message) -> Message | None:
        """The whole push; None where parts are missing. Forgets them, and those of steps that are complete."""
        held_task, parts = self._held.pop(sender, (task, []))
        floor = push.number("floor")
        self._held = {other: held for other, held in self._held.items() if held[0].step >= floor}
        expected = push.number("parts") if "parts" in push.fields else 0
        if expected == 0:
            return push
        if held_task != task or len(parts) != expected:
            return None
        whole = [*parts, push]
        fields = {name: [value for one in whole for value in one.numbers(name)] for name in ("ranges", "counts")}
        return Message(push.kind, {**push.fields, **fields}, [tensor for one in whole for tensor in one.tensors])
