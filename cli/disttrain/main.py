"""The `disttrain` command. argparse: six commands do not need a dependency, and it starts at once."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from disttrain.errors import CommandError
from disttrain.local.folder import DEFAULT_RUNS
from disttrain.output import OutputError, drain, open_closed_streams, show, tell
from disttrain_api.errors import DisttrainError
from disttrain_trainer.collectives_check.plan import add_arguments


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code. What the user can cause ends with a sentence, never with a traceback."""
    open_closed_streams()
    given = _parser().parse_args(arguments)
    try:
        return int(given.command(given))
    except OutputError as error:
        # A pipe's reader that has gone, for example `| head`, wants no more.
        if not isinstance(error.__cause__, BrokenPipeError):
            tell(f"disttrain: {error}")
        return error.exit_code
    except CommandError as error:
        tell(f"disttrain: {error}")
        return error.exit_code
    except DisttrainError as error:
        tell(f"disttrain: {error}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        drain()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="disttrain", description="Train PyTorch models on this machine or a cluster.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = commands.add_parser("run", help="run a job on this machine, without a cluster", description=_run.__doc__)
    what = run.add_mutually_exclusive_group(required=True)
    what.add_argument("file", nargs="?", metavar="FILE", help="manifest of a DistTrainingJob")
    what.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with the job in this folder")
    run.add_argument(
        "--runs",
        type=Path,
        default=Path(DEFAULT_RUNS),
        metavar="FOLDER",
        help=f"where the folder of the run is made (default: {DEFAULT_RUNS})",
    )
    run.add_argument("-y", "--yes", action="store_true", help="start even what does not fit this machine")
    run.set_defaults(command=_run)

    submit = commands.add_parser("submit", help="send a job to a cluster", description=_submit.__doc__)
    submit.add_argument("file", metavar="FILE", help="manifest of a DistTrainingJob")
    submit.add_argument("-n", "--namespace", help="namespace (default: the manifest's, else the context's)")
    submit.add_argument("--context", help="context of the kubeconfig (default: the current one)")
    submit.add_argument("--wait", action="store_true", help="follow the job until it has finished")
    submit.set_defaults(command=_submit)

    validate = commands.add_parser(
        "validate", help="say all that is wrong with a manifest", description=_validate.__doc__
    )
    validate.add_argument("files", nargs="+", metavar="FILE", help="manifest of a DistTrainingJob")
    validate.set_defaults(command=_validate)

    export = commands.add_parser("export", help="write a checkpoint's model into one file", description=_export.__doc__)
    export.add_argument("checkpoint", metavar="CHECKPOINT", help="folder or URL of a checkpoint, or of several")
    export.add_argument("target", type=Path, metavar="OUT.safetensors", help="file to write")
    export.set_defaults(command=_export)

    collectives = commands.add_parser(
        "collectives", help="check and time collectives on this machine", description=_collectives.__doc__
    )
    collectives.add_argument("--ranks", type=int, default=2, metavar="N", help="processes (default: 2)")
    collectives.add_argument("--gpus", action="store_true", help="give each rank a GPU, and talk over NCCL")
    add_arguments(collectives)
    collectives.add_argument("--json", action="store_true", help="print JSON instead of tables")
    collectives.set_defaults(command=_collectives)

    version = commands.add_parser("version", help="print the version")
    version.set_defaults(command=_version)
    return parser


# The commands are imported when they are called: `disttrain version` need not wait for the Kubernetes client.


def _run(given: argparse.Namespace) -> int:
    """Run a job as processes of this machine. Ctrl-C suspends it after a checkpoint; a second one stops it at once."""
    from disttrain.run import resume, run

    return resume(given.resume, yes=given.yes) if given.resume else run(given.file, given.runs, yes=given.yes)


def _submit(given: argparse.Namespace) -> int:
    """Check a manifest and send it to a cluster."""
    from disttrain.submit import submit

    return submit(given.file, namespace=given.namespace, context=given.context, wait=given.wait)


def _validate(given: argparse.Namespace) -> int:
    """Say all that is wrong with manifests, before anything is applied."""
    from disttrain.validate import validate

    return max(validate(path) for path in given.files)


def _export(given: argparse.Namespace) -> int:
    """Write the model of a checkpoint (of several, the latest), trained in any layout, into one safetensors file."""
    from disttrain.export import export
    from disttrain_trainer.object_path import location

    return export(location(given.checkpoint), given.target)


def _collectives(given: argparse.Namespace) -> int:
    """Check collectives over processes of this machine, element by element, and time them. Exit code 1: wrong."""
    from disttrain.collectives import collectives
    from disttrain_trainer.collectives_check.plan import plan_of

    return collectives(plan_of(given), ranks=given.ranks, gpus=given.gpus, as_json=given.json)


def _version(_: argparse.Namespace) -> int:
    from importlib.metadata import version

    show(f"disttrain {version('disttrain')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
