"""Fence and commits in every order of two attempts' I/O, with a death at every point; of three, in all orders with few
switches. What is run is the trainer's own code, on a file system and on an object store in memory."""

from collections.abc import Iterator
from functools import cache, partial
from hashlib import sha256
from types import NoneType
from typing import Any, NamedTuple

import pytest

from disttrain_api.training import Checkpoint
from disttrain_trainer.checkpoint import storage
from disttrain_trainer.checkpoint.fence import Claim, Fence
from disttrain_trainer.checkpoint.object_steps import ObjectSteps
from disttrain_trainer.checkpoint.owned_steps import OwnedSteps
from disttrain_trainer.checkpoint.step_manifest import FileDigest, StepManifest, flaws, read_manifest, write_manifest
from disttrain_trainer.checkpoint.storage import StepFolders
from disttrain_trainer.runtime import object_path
from disttrain_trainer.runtime.errors import CheckpointsTaken, Fenced
from disttrain_trainer.runtime.object_path import ObjectPath
from tests.soak import SOAK
from tests.unit.trainer.interleavings import Apply, Explorer, Move, Port, Process, Program, Store
from tests.unit.trainer.memory_storage import FOLDER, MemoryPath, MemoryStore, in_store, on_disk

METADATA_FILE, DATA_FILE = ".metadata", "__0_0.distcp"
KEEP_ONE = Checkpoint(keep_latest=1)


class Kind:
    """Where the checkpoints lie."""

    apply: Apply
    empty: Store
    port: Port
    """The I/O of the program that is run just now."""

    def steps(self, port: Port, uid: str) -> StepFolders | ObjectSteps:
        """Return the checkpoints as a program sees them, whose I/O goes through the port from now on."""
        raise NotImplementedError


class Disk(Kind):
    """In a folder."""

    apply = staticmethod(on_disk)
    empty: Store = frozenset({((), FOLDER)})

    def steps(self, port: Port, uid: str) -> StepFolders:
        self.port = port
        return StepFolders(MemoryPath(port))  # type: ignore[arg-type]


class Bucket(Kind):
    """In an object store."""

    apply = staticmethod(in_store)
    empty: Store = frozenset({("s3://bucket/job/metrics", b"")})

    def steps(self, port: Port, uid: str) -> ObjectSteps:
        self.port = port
        return ObjectSteps(ObjectPath("s3://bucket/job"), uid)


@pytest.fixture(params=[Disk, Bucket], ids=["folder", "object store"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kind:
    made: Kind = request.param()
    monkeypatch.setattr(object_path, "_connected", lambda protocol, process: MemoryStore(made.port))
    monkeypatch.setattr(storage, "token_hex", lambda count: made.port.token(count))  # noqa: PLW0108 - of another port
    return made


class Owner(NamedTuple):
    """What an attempt keeps from one phase to the next."""

    claim: Claim | None
    committed: int = 0
    """The last step."""


def attempt(
    kind: Kind,
    number: int,
    steps: tuple[int, ...],
    uid: str = "job",
    process: str = "",
    clears: bool = True,
    evaluates: bool = False,
) -> Program:
    """An attempt that takes over, and then saves these steps, whatever it has found."""

    def owned_by(port: Port, claim: Claim | None) -> tuple[StepFolders | ObjectSteps, OwnedSteps]:
        found = kind.steps(port, uid)
        fence = Fence(found.folder, uid, number, _nonce=f"{number:02x}{process}", _own=claim)
        owned = OwnedSteps(found, fence, KEEP_ONE)
        owned._number = claim.number if claim is not None else 0
        return found, owned

    def take_over(port: Port, _: object) -> Owner:
        _, owned = owned_by(port, None)
        if clears:
            owned.take_over()
        else:
            owned._fence.take()
        return Owner(owned._fence._own)

    def save(step: int, port: Port, owner: Owner) -> Owner:
        found, owned = owned_by(port, owner.claim)
        place = found.partial(step, owner.claim.number)
        try:
            write(place, step, number)
        except OSError:
            # As Checkpoints does where torch cannot write.
            owned.give_up(place)
            raise
        owned.commit(place, step)
        if evaluates:
            owned.add_figures(step, {"loss": 0.5})
        return Owner(owner.claim, step)

    return (take_over, *(partial(save, step) for step in steps))


def write(place: Any, step: int, attempt: int) -> None:
    """What torch's writer and ours write, in their order."""
    contents = {DATA_FILE: f"{step} of {attempt}", METADATA_FILE: "metadata"}
    place.mkdir()
    for name, text in contents.items():
        (place / name).write_text(text)
    files = {
        name: FileDigest(size=len(text), sha256=sha256(text.encode()).hexdigest()) for name, text in contents.items()
    }
    write_manifest(place, StepManifest(step=step, attempt=attempt, world_size=1, mesh={}, files=files))


class Watch:
    """What a store holds, found by the trainer's own readers while nobody writes."""

    def __init__(self, kind: Kind, explorer: Explorer) -> None:
        self._kind, self._explorer = kind, explorer
        self.complete = cache(self._complete)
        self.recovered = cache(self._recovered)

    def _complete(self, store: Store) -> dict[str, tuple[int, int]]:
        """Step and attempt of each complete checkpoint; all of it must be as its manifest says."""
        found: dict[str, tuple[int, int]] = {}

        def look(port: Port, _: object) -> None:
            steps = self._kind.steps(port, "job")
            for one in steps.look().complete:
                place = steps.folder / one.name
                manifest = read_manifest(place)
                assert isinstance(manifest, StepManifest), manifest
                assert manifest.step == one.step
                found[one.name] = (manifest.step, manifest.attempt)
                # What is older may be on its way out.
                if one == steps.look().complete[-1]:
                    assert flaws(place, manifest, manifest.files) == []

        self._run((look,), store)
        return found

    def _recovered(self, store: Store) -> int:
        """The step from which a new attempt would go on, were all others dead. It must be able to save, too."""
        after, _ = self._run(attempt(self._kind, 90, (), "rescue"), store)
        step = newest(self._complete(after))
        last, _ = self._run(attempt(self._kind, 91, (step, step + 1), "rescue"), after)
        assert set(self._complete(last).values()) == {(step + 1, 91)}
        assert not [place for place in names(last) if "partial" in place or "deleting" in place]
        return step

    def _run(self, program: Program, store: Store) -> tuple[Store, Process]:
        after, process = self._explorer.alone(program, store)
        if process.error is not None:
            raise process.error
        return after, process


def names(store: Store) -> list[str]:
    return ["/".join(place) if isinstance(place, tuple) else str(place) for place, _ in store]


def newest(complete: dict[str, tuple[int, int]]) -> int:
    return max((step for step, _ in complete.values()), default=0)


def explore(
    kind: Kind, *programs: Program, start: Store | None = None, preemptions: int | None = None, in_turn: bool = True
) -> Iterator[tuple[Move, Watch]]:
    """Every move, after what must hold after each has been checked. `in_turn`: each program is a later attempt."""
    explorer = Explorer(programs, kind.apply, preemptions)
    watch = Watch(kind, explorer)
    for move in explorer.moves(start if start is not None else kind.empty):
        if move.after != move.before:
            before, after = watch.complete(move.before), watch.complete(move.after)
            assert newest(after) >= newest(before), f"{move.operation} loses the newest checkpoint"
            assert watch.recovered(move.after) >= newest(after), f"after {move.operation} a restart begins earlier"
            if overtaken(move, in_turn):
                new = {name: found for name, found in after.items() if name not in before}
                assert new == {}, f"{move.operation} commits although a later attempt has taken over"
        yield move, watch


def overtaken(move: Move, in_turn: bool) -> bool:
    """Whether somebody with a higher claim than who has moved has taken over."""
    claims = [process.value.claim if process.value is not None else None for process in move.processes]
    own = claims[move.who]
    if own is None:
        # It may have claimed, and is older than what a later attempt owns.
        return in_turn and any(claims[move.who + 1 :])
    return any(own < other for other in claims if other is not None)


def started(kind: Kind, *programs: Program) -> Store:
    """What the programs leave, one after the other."""
    store = kind.empty
    for program in programs:
        store, process = Explorer((), kind.apply).alone(program, store)
        assert process.error is None
    return store


def ended(process: Process) -> bool:
    """Whether it has done all, or met an error."""
    return process.next is None


SWITCHES = None if SOAK else 4
"""How often the longer programs are interrupted, in all ways: in the soak, as often as can be."""


def outcomes(kind: Kind, *programs: Program, **options: Any) -> set[tuple[tuple[type, int], ...]]:
    """How the programs can end together: of each its error, and how many of its phases it has done."""
    found, moves = set(), 0
    for move, _ in explore(kind, *programs, **options):
        moves += 1
        if all(map(ended, move.processes)):
            found.add(tuple((type(process.error), process.phase) for process in move.processes))
    assert moves > 10_000, "hardly anything has been looked at"
    return found


class TestAttempts:
    def test_the_newer_one_wins_and_nothing_is_lost(self, kind):
        """In every order. Both save the same step. Red where a commit does not look at the fence."""
        found = outcomes(kind, attempt(kind, 1, (10,)), attempt(kind, 2, (10,)))
        assert found == {(old, (NoneType, 2)) for old in ((NoneType, 2), (Fenced, 0), (Fenced, 1))}

    def test_also_where_the_old_one_goes_on_to_save(self, kind):
        found = outcomes(kind, attempt(kind, 1, (10, 20)), attempt(kind, 2, (20,)), preemptions=SWITCHES)
        assert found == {(old, (NoneType, 2)) for old in ((NoneType, 3), (Fenced, 0), (Fenced, 1), (Fenced, 2))}

    def test_also_where_both_begin_from_what_others_have_left(self, kind):
        start = started(kind, attempt(kind, 1, (10,), "another"), attempt(kind, 2, (10,)))
        found = outcomes(kind, attempt(kind, 3, (20,)), attempt(kind, 4, (20,)), start=start, preemptions=SWITCHES)
        assert {newer for _, newer in found} == {(NoneType, 2)}

    def test_also_where_figures_are_added_to_what_is_complete(self, kind):
        """By one that may have been overtaken."""
        programs = (attempt(kind, 1, (10,), evaluates=True), attempt(kind, 2, (10,), evaluates=True))
        found = outcomes(kind, *programs, preemptions=SWITCHES)
        assert {newer for _, newer in found} == {(NoneType, 2)}

    def test_of_two_processes_of_one_attempt_one_goes_on(self, kind):
        """Where a pod was made again and the old one lives on."""
        programs = (attempt(kind, 1, (10,), process="a"), attempt(kind, 1, (10,), process="b"))
        found = outcomes(kind, *programs, in_turn=False)
        assert {NoneType, Fenced} == {error for ends in found for error, _ in ends}
        assert all((NoneType, 2) in ends for ends in found)

    def test_of_three_the_newest_wins(self, kind):
        """In all orders with two switches; with three in the soak."""
        programs = (attempt(kind, 1, (10,)), attempt(kind, 2, (20,)), attempt(kind, 3, (20,)))
        found = outcomes(kind, *programs, preemptions=3 if SOAK else 2)
        assert {newest for _, _, newest in found} == {(NoneType, 2)}

    def test_of_three_the_newest_takes_away_what_the_oldest_writes(self, kind):
        """Where the one between them stops before it has done so, and the newest saves nothing. Red where `take_over`
        does not clear away: a commit does, too, and what the owner right before has written is adopted."""
        programs = (attempt(kind, 1, (10,)), attempt(kind, 2, ()), attempt(kind, 3, ()))
        found = outcomes(kind, *programs, preemptions=2)
        assert {newest for _, _, newest in found} == {(NoneType, 1)}

    def test_a_fence_alone_would_let_an_old_attempt_commit(self, kind):
        """Which has looked at it and then sleeps: a newer one that takes nothing away comes too late to be seen."""
        with pytest.raises(AssertionError, match="commits although a later attempt has taken over"):
            outcomes(kind, attempt(kind, 1, (10,)), attempt(kind, 2, (), clears=False))


class TestJobs:
    def test_one_of_two_is_refused_for_good(self, kind):
        """Who has lost the folder does not take it back, so two jobs do not take turns for ever. Red where another
        job's claim does not count, and where it is removed."""
        explorer = Explorer((), kind.apply)
        programs = (attempt(kind, 1, (10,), "one"), attempt(kind, 1, (10,), "two"))
        left = set()
        for move, _ in explore(kind, *programs, in_turn=False):
            ended_with = [type(process.error) for process in move.processes if ended(process)]
            assert set(ended_with) <= {NoneType, CheckpointsTaken}
            assert ended_with != [CheckpointsTaken] * 2
            if len(ended_with) == 2:
                left.add(move.after)
        owners = set()
        for store in left:
            again = [explorer.alone(attempt(kind, 2, (20,), uid), store) for uid in ("one", "two")]
            errors = [type(process.error) for _, process in again]
            assert sorted(errors, key=str) == sorted([CheckpointsTaken, NoneType], key=str)
            owners.add(errors.index(NoneType))
        assert owners == {0, 1}


class TestDeaths:
    def test_amid_a_commit_of_a_step_that_is_there_it_stays(self, kind):
        """At every point: what the step's checkpoint was, or what it is to be. Red where the former one goes before the
        rename."""
        start = started(kind, attempt(kind, 1, (10,)))
        seen = set()
        for move, watch in explore(kind, attempt(kind, 2, (10,)), start=start):
            complete = set(watch.complete(move.after).values())
            assert complete in ({(10, 1)}, {(10, 2)}, {(10, 1), (10, 2)})
            seen |= complete
        assert seen == {(10, 1), (10, 2)}

    def test_what_was_written_whole_is_committed_by_the_next_attempt(self, kind):
        """Were it all there is, it would be lost otherwise."""
        for move, watch in explore(kind, attempt(kind, 1, (10,))):
            written = [name for name in names(move.after) if "manifest." in name]
            assert watch.recovered(move.after) == (10 if written else 0)
