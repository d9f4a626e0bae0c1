"""The `disttrain` command, and `kubectl disttrain`: from a command line to an exit code."""

import sys
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import typer

from disttrain.errors import USAGE, CommandError
from disttrain.extras import sentence_of
from disttrain.output import OutputError, drain, open_closed_streams, print_stderr
from disttrain.terminal import plain_lines
from disttrain.verbs import command
from disttrain_api.errors import DisttrainError

# The library gives this class no public name.
_UsageError: Any = typer.BadParameter.__mro__[1]
_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. What the user can cause ends with a sentence, never with a traceback."""
    open_closed_streams()
    try:
        return _run(arguments)
    except OutputError as error:
        # A pipe's reader that has gone, for example `| head`, wants no more.
        if not isinstance(error.__cause__, BrokenPipeError):
            print_stderr(f"disttrain: {plain_lines(error)}")
        return error.exit_code
    except CommandError as error:
        print_stderr(f"disttrain: {plain_lines(error)}")
        return error.exit_code
    except DisttrainError as error:
        print_stderr(f"disttrain: {plain_lines(error)}")
        return 1
    except ModuleNotFoundError as error:
        sentence = sentence_of(error)
        if sentence is None:
            raise
        print_stderr(f"disttrain: {sentence}")
        return 1
    except (KeyboardInterrupt, typer.Abort):
        return _INTERRUPTED
    finally:
        drain()


def _run(arguments: Sequence[str] | None) -> int:
    name = "kubectl disttrain" if PurePath(sys.argv[0]).name.startswith("kubectl-") else "disttrain"
    args = list(sys.argv[1:] if arguments is None else arguments)
    try:
        answer = command().main(args, prog_name=name, complete_var="_DISTTRAIN_COMPLETE", standalone_mode=False)
    except _UsageError as error:
        usage = error.ctx.get_usage() if error.ctx is not None else f"Usage: {name} COMMAND …"
        where = error.ctx.command_path if error.ctx is not None else name
        sentence = error.format_message().removeprefix("Invalid value: ").rstrip(".")
        print_stderr(f"{usage[:1].lower()}{usage[1:]}\n{name}: {sentence}; see {where} --help")
        raise SystemExit(USAGE) from None
    return int(answer or 0)


if __name__ == "__main__":
    sys.exit(main())
