"""An error of one rank, as it travels to the others: its class by name, and its text."""

from __future__ import annotations

from dataclasses import dataclass

from disttrain_trainer.runtime import errors
from disttrain_trainer.runtime.errors import PeerLost, TrainerError, one_line, peer_lost


@dataclass(frozen=True)
class Failure:
    """An error that the other ranks raise as well."""

    name: str
    """Class name of a TrainerError, "OSError", or "" for any other class."""
    message: str
    errno: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Return what others must know of an error."""
        if isinstance(error, TrainerError):
            return cls(type(error).__name__, str(error))
        if peer_lost(error):
            return cls(PeerLost.__name__, one_line(error))
        if isinstance(error, OSError):
            return cls("OSError", error.strerror or str(error), error.errno)
        return cls("", f"{type(error).__name__}: {one_line(error)}")

    def error(self) -> Exception:
        """Return the error of this description; a RuntimeError where no class of this name is known."""
        known = getattr(errors, self.name, None)
        if isinstance(known, type) and issubclass(known, TrainerError):
            return known(self.message)
        if self.name == "OSError":
            return OSError(self.errno, self.message)
        return RuntimeError(self.message)
