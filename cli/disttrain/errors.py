"""Errors that end a command with one sentence instead of a traceback."""

from disttrain_api.errors import DisttrainError

USAGE = 2


class CommandError(DisttrainError):
    """The command cannot go on; the message is for the user as it stands."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
