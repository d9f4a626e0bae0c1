"""How many bytes may be kept of all objects, and whose turn it is to give way.

Anybody may fill a namespace, so each may have a third: two that take all they may leave another its own. Where several
together would take more than there is, the namespace that has most gives way, with what it has deleted first and then
with its largest objects: who has little gets in, however many others have much.

All caches of a process share one budget.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from disttrain_operator.kube.sizes import size_of

KEPT_BYTES = 225 * 2**20
"""The chart gives 512 MiB to the operator, which takes 70 without any object and reads one page at a time."""
SHARES = 3
ENTRY_BYTES = 600
"""What it takes to find an object again."""
UNBOUNDED = 2**62


def weight(kept: Mapping[str, Any]) -> int:
    """Return the bytes that count for an object: its own, those to find it again, and what it says is read from it."""
    reserved: int = kept.get("reserved", 0)
    return size_of(kept) + ENTRY_BYTES + reserved


class Keeper(Protocol):
    """A keeper of objects, by uid."""

    def forget_oldest_gone(self, namespace: str) -> bool:
        """Forget the oldest of the namespace's deleted objects. Returns whether there was one."""

    def give_up(self, uid: str) -> None:
        """Keep the name of this object alone."""


class Budget:
    """Bytes by namespace, and in sum."""

    def __init__(self, most: int = KEPT_BYTES, most_of_one: int | None = None) -> None:
        self.most, self.most_of_one = most, most // SHARES if most_of_one is None else most_of_one
        self.total = 0
        self._sums: dict[str, int] = {}
        self._accounts: list[Account] = []

    def open(self, keeper: Keeper) -> "Account":
        """Return the account of another cache."""
        account = Account(self, keeper)
        self._accounts.append(account)
        return account

    def of(self, namespace: str) -> int:
        """Return what is kept of this namespace."""
        return self._sums.get(namespace, 0)

    def fits(self, namespace: str, more: int) -> bool:
        """Return whether so much more of this namespace would be let in, if nothing deleted is forgotten for it."""
        wanted = self.of(namespace) + more
        return wanted <= self.most_of_one and (self.total + more <= self.most or wanted < self.of(self._largest()))

    def make_room(self, namespace: str, more: int) -> bool:
        """Return whether so much more of this namespace may be kept now. Others may have given way for it."""
        if more <= 0:
            return True
        while self.of(namespace) + more > self.most_of_one:
            if not self._forget_gone(namespace):
                return False
        while self.total + more > self.most:
            largest = self._largest()
            if self.of(largest) <= self.of(namespace) + more:
                largest = namespace
            if self._forget_gone(largest):
                continue
            if largest == namespace:
                return False
            self._give_way(largest)
        return True

    def count(self, namespace: str, change: int) -> None:
        """So much more, or less, is kept of this namespace."""
        self.total += change
        left = self.of(namespace) + change
        if left:
            self._sums[namespace] = left
        else:
            self._sums.pop(namespace, None)

    def _largest(self) -> str:
        return max(self._sums, key=self._sums.__getitem__, default="")

    def _forget_gone(self, namespace: str) -> bool:
        return any(account.keeper.forget_oldest_gone(namespace) for account in self._accounts)

    def _give_way(self, namespace: str) -> None:
        _, uid, account = max(
            ((size, uid, account) for account in self._accounts for uid, size in account.of(namespace)),
            key=lambda found: found[0],
        )
        account.keeper.give_up(uid)


class Account:
    """Size of one cache, in bytes."""

    def __init__(self, budget: Budget, keeper: Keeper) -> None:
        self.budget, self.keeper = budget, keeper
        self._sizes: defaultdict[str, dict[str, int]] = defaultdict(dict)
        """By namespace and uid."""

    def of(self, namespace: str) -> Iterator[tuple[str, int]]:
        """Yield uid and size of all that is kept of this namespace."""
        yield from self._sizes.get(namespace, {}).items()

    def size(self, namespace: str, uid: str) -> int:
        """Return the size that an object is kept in; 0 where it is not."""
        return self._sizes.get(namespace, {}).get(uid, 0)

    def make_room(self, namespace: str, uid: str, size: int) -> bool:
        """Return whether the object may be kept in this size, instead of that in which it is kept."""
        return self.budget.make_room(namespace, size - self.size(namespace, uid))

    def put(self, namespace: str, uid: str, size: int) -> None:
        """The object is kept in this size; 0: no longer."""
        self.budget.count(namespace, size - self.size(namespace, uid))
        if size:
            self._sizes[namespace][uid] = size
            return
        self._sizes[namespace].pop(uid, None)
        if not self._sizes[namespace]:
            del self._sizes[namespace]
